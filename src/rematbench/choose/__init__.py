"""Which method for a job: candidates, the outcome of each candidate, and their comparison."""
