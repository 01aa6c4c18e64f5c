"""What a method's file imports: the words of plans, which are its output, `Problem`, its input, and
the ranges of its parameters.  Solvers that methods share are in `rematbench.solve`."""

# ruff: noqa: F403, PLC0414  # every name here is for the files of methods
from rematbench.plan import *
from rematbench.problem import Problem as Problem
from rematbench.workload import NonNegativeInt as NonNegativeInt
from rematbench.workload import PositiveInt as PositiveInt
