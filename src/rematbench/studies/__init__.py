"""What papers claim beside a step time: their questions asked of our methods, and the verdicts."""
