"""Solvers that methods share, such as Pareto fronts, MILPs and one-dimensional searches."""
