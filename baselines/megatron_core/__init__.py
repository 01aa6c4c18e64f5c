"""Megatron-core itself, under its own pipeline schedules."""
