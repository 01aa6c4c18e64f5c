"""Tables of traced baselines: bytes beside predicted and published bytes, and tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematbench.host.table import Column, Table, gib, signed_percent
from rematbench.paper.studies.baseline_points import Point, rows
from rematbench.worlds.packages.process import policy
from rematbench.worlds.packages.stack import layer_tensors, stack_of

MIB = 2**20
NOTE = (
    "Traced: one rank through the package's own schedules on fake tensors, states included. Known "
    "extra: what that stack keeps beside the operator table, by tensor in baselines_tensors, sized "
    "from shapes. Unexplained: traced less known extra, over predicted, less 1. Freed: activations "
    "against the same engine without a policy at the same layout; engines are never ranked."
)


def _mib(value: Any) -> str:
    return f"{float(value) / MIB:,.3f}"


def _bytes_or_word(value: Any) -> str:
    return gib(value) if isinstance(value, int) else str(value)


POINTS = (
    Column("point", "point"),
    Column("policy", "policy"),
    Column("status", "status"),
    Column("traced_peak_bytes", "traced GiB", gib),
    Column("known_extra_bytes", "known extra GiB", gib),
    Column("predicted_peak_bytes", "predicted GiB", _bytes_or_word),
    Column("unexplained", "unexplained %", signed_percent),
    Column("published_peak_bytes", "published GiB", _bytes_or_word),
    Column("traced_host_bytes", "traced host GiB", gib),
    Column("freed_against_none", "freed %", lambda value: f"{100 * value:.0f}"),
    Column("kernel_stack", "kernel stack"),
)
TENSORS = (
    Column("model", "model"),
    Column("tensor", "tensor"),
    Column("dtype", "dtype"),
    Column("rows", "rows"),
    Column("row_bytes", "bytes a row"),
    Column("table_bytes", "operator table MiB", _mib),
    Column("stack_bytes", "traced stack MiB", _mib),
    Column("why", "why"),
)


def points_table(points: Sequence[Point], folder: Path) -> Table:
    """The table of every point that has a record."""
    return Table(
        name="baselines_traced",
        title="Baselines traced at paper scale, predicted and published: peak of one rank",
        columns=POINTS,
        rows=tuple(rows(tuple(points), folder)),
        note=NOTE,
    )


def tensors_table(points: Sequence[Point]) -> Table:
    """The tensors that one layer of each model saves for one micro-batch without a policy."""
    found: list[dict[str, Any]] = []
    seen = set()
    for point in points:
        if point.settings or (point.baseline, point.model) in seen:
            continue
        seen.add((point.baseline, point.model))
        stack = stack_of(point.baseline, policy(point.baseline).methods[0], point.problem)
        if stack is not None:
            words = {"model": f"{point.model} ({point.baseline})"}
            found += [
                {**words, "tensor": held.name, **held._asdict()}
                for held in layer_tensors(point.problem, stack)
            ]
            found += [
                {**words, "tensor": name, "stack_bytes": nbytes, "why": "once, never freed"}
                for name, nbytes in stack.once.items()
                if nbytes
            ]
    return Table(
        name="baselines_tensors",
        title="Tensors of one layer and micro-batch: operator table and traced stack",
        columns=TENSORS,
        rows=tuple(found),
        note="Without a policy. Per layer the traced bytes are these exactly (a test).",
    )
