"""Plans to actions."""
