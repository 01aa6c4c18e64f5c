"""Real training packages beside us: run them, size what they keep, set their numbers out."""
