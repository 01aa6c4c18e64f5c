"""The options that describe one run, shared by plan, simulate and timeline."""

import inspect
from collections.abc import Callable
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import typer
from msgspec import Struct

from rematbench.cli_text import CommandError
from rematbench.discover import Composition, discover
from rematbench.layout import Layout, ZeroStage
from rematbench.plan import Plan
from rematbench.problem import AttentionKind, Problem
from rematbench.suite import make_problem
from rematbench.workload import Precision

F = TypeVar("F", bound=Callable[..., Any])


class AttentionOption(str, Enum):
    """--attention."""

    flash = "flash"
    unfused = "unfused"


class PrecisionOption(str, Enum):
    """--precision."""

    bf16 = "bf16"
    fp16 = "fp16"
    fp32 = "fp32"
