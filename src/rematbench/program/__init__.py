"""A lowered plan: its actions, their order, the proof of its soundness, and its bytes."""
