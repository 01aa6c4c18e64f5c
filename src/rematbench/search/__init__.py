"""Which layout and plan is fastest for a job: a space, lower bounds, best first."""
