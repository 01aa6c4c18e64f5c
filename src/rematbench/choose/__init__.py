"""Which method for a job: candidates, the outcome of each, and their comparison."""
