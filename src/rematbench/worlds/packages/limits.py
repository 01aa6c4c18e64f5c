"""The reasons why a baseline does not run a job; its plan, its guards and its flags share them."""

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import fields

from rematbench.inputs.effects import ACTS, Use
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import flat
from rematbench.problem import AttentionKind, Problem
from rematbench.workload import Model, Precision
from rematbench.worlds.records.record import RunSpec

Reason = tuple[bool, str]
"""(whether the reason holds, the feature that the baseline then does not run)."""


NOT_RUN = "not run here)"
"""End of a reason for a job that has options, and that this baseline does not run."""


class Setup(NamedTuple):
    """The facts on which reasons depend, for a problem to plan or a run to start."""

    model: Model
    layout: Layout
    seq_len: int
    precision: Precision
    attention: AttentionKind
    document_len: int
    drops_tokens: bool = False


def setup_of(request: Problem | RunSpec) -> Setup:
    """The setup of a problem to plan or of a run to start."""
    work = request.workload if isinstance(request, Problem) else request
    kind: AttentionKind = "unfused" if request.attention == "unfused" else "flash"
    size = work.seq_len, work.precision, kind, work.document_len
    drops = work.capacity_factor > 0 and work.expert_padding == "none"
    return Setup(work.model, request.layout, *size, drops)


def active_reasons(reasons: Iterable[Reason]) -> tuple[str, ...]:
    """The texts of the reasons that hold."""
    return tuple(reason for holds, reason in reasons if holds)


def overridden(policy: Struct, options: Struct, names: Iterable[str]) -> str:
    """The settings among `names` that `policy` sets and `options` overrides, in words; empty if
    there are none.  A setting at its default counts as not set."""
    defaults = {field.name: field.default for field in fields(policy)}
    words = [
        f"{name} is {getattr(policy, name)}, but the options say {getattr(options, name)}"
        for name in names
        if getattr(policy, name) not in (defaults[name], getattr(options, name))
    ]
    return "; ".join(words)


ABILITIES = (
    *("model_parallel", "zero_stages", "pipeline_zero_stages"),
    *("features", "wide_attention"),
)
"""What decides which jobs a stack takes, or what a published peak means: not facts of a job."""


def use_of(problem: Problem, *, offloads: bool = False) -> Use:
    """What a job makes of its stack.  `offloads`: activations are copied to the host."""
    return Use(
        problem.system,
        problem.layout,
        problem.workload.model,
        flash=problem.attention == "flash",
        offloads=offloads,
        leaves_node=problem.layout.gpus > problem.cluster.gpus_per_node,
        rebuilds=True,
        precision=problem.workload.precision,
    )


def assumed_facts(problem: Problem, said: Container[str], *, offloads: bool) -> Iterator[str]:
    """The facts that act in a job and are not in `said`, with their values."""
    use, values = use_of(problem, offloads=offloads), flat(problem.system)
    for fact, acts in ACTS.items():
        if fact not in said and fact not in ABILITIES and acts(use):
            value = values[fact]
            yield f"{fact} {str(value).lower() if isinstance(value, bool) else value}"
