"""What a baseline does not run, as reasons that its plan, its guards and its flags share."""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from rematbench.problem import AttentionKind, Problem
from rematbench.runs.record import RunSpec
from rematbench.spec.layout import Layout
from rematbench.workload import Model, Precision

Reason = tuple[bool, str]
"""Whether it holds, and what is then not run."""


class Setup(NamedTuple):
    """What reasons are about, of a problem or of a run alike."""

    model: Model
    layout: Layout
    seq_len: int
    precision: Precision
    attention: AttentionKind


def setup_of(asked: Problem | RunSpec) -> Setup:
    """The setup of a problem to plan or of a run to start."""
    work = asked.workload if isinstance(asked, Problem) else asked
    return Setup(work.model, asked.layout, work.seq_len, work.precision, asked.attention)


def holding(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """Those that hold."""
    return tuple(reason for holds, reason in reasons if holds)


def overruled(policy: Struct, said: Struct, names: Iterable[str]) -> str:
    """Which settings of a policy the options given beside it say otherwise, in words; empty if none
    is set (a default may be nobody's choice)."""
    defaults = {field.name: field.default for field in fields(policy)}
    words = [
        f"{name} {getattr(policy, name)} is set, the options say {getattr(said, name)}"
        for name in names
        if getattr(policy, name) not in (defaults[name], getattr(said, name))
    ]
    return "; ".join(words)
