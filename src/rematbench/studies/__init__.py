"""Claims of papers beyond a step time: their questions, put to our methods, and the verdicts."""
