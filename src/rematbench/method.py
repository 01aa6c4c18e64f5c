"""The imports of a method's file: the vocabulary of plans (its output), `Problem` (its input), and
the ranges of its parameters.  Solvers that methods share are in `rematbench.solve`."""

# ruff: noqa: F403, PLC0414  # files of methods import these names from here
from rematbench.plan import *
from rematbench.problem import Problem as Problem
from rematbench.workload import NonNegativeInt as NonNegativeInt
from rematbench.workload import PositiveInt as PositiveInt
