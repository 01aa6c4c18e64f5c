"""Solvers that methods share: what a plan keeps, Pareto fronts, one-dimensional searches."""
