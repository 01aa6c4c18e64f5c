"""Real training packages behind one contract: a directory each, never imported by rematbench."""
