"""Solvers that methods share: kept activations, Pareto fronts, one-dimensional searches."""
