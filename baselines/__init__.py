"""Real training packages behind one contract: one directory each, never imported by rematbench."""
