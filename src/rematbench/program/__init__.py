"""A lowered plan: its actions, their order, the proof that they are sound, and their bytes."""
