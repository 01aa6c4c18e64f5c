"""The fastest layout and plan of a job: a space of layouts, lower bounds, a best-first search."""
