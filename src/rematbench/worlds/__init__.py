"""The executed and traced worlds beside the simulated one: measure, compare, set out."""
