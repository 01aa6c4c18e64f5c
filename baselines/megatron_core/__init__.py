"""Megatron-core, the package itself, under its own pipeline schedules."""
