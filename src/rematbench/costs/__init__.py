"""The costs of a model's operators, copies, collectives and states, in seconds and bytes."""
