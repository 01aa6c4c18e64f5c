"""Which method for a job: candidates, what becomes of each, and their comparison."""
