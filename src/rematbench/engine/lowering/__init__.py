"""Lowering: from plans to actions."""
