"""Actions and costs to times."""
