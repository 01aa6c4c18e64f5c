"""Solvers that methods share: what a plan leaves kept, Pareto fronts, one-dimensional searches."""
