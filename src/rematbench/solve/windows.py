"""The recomputation jobs of a layer, and the idle compute during collectives of its backward.

Times follow the lowering: a window opens when the collective is issued and closes when compute
waits for its end.  If the collective already overlaps a GEMM, only the time after the GEMM is idle.
"""

from collections.abc import Collection
from math import fsum

from msgspec import Struct

from rematbench.costs.operators.ops import Op, OpTable, rebuild_ops
from rematbench.problem import Problem


class WindowJob(Struct, frozen=True, kw_only=True):
    """The recomputation of one operator's saved outputs from other saved tensors.

    `needs`: operators whose saved outputs the job reads; `deadline`: the position in backward order
    of the first operator that reads the job's outputs; `hides`: whether the job may overlap with a
    collective (a job that itself has collectives may not).
    """

    op: str
    outputs: tuple[str, ...]
    nbytes: int
    seconds: float
    needs: tuple[str, ...]
    deadline: int
    hides: bool


class Slot(Struct, frozen=True, kw_only=True):
    """The window during a collective of `op`.  The collective belongs to the backward of the layer
    whose tensors are rebuilt (`layer_offset` 0), or to that of the layer above (1).  `order` sorts
    the windows in time."""

    op: str
    layer_offset: int
    order: int


class LayerWindows(Struct, frozen=True, kw_only=True):
    """The jobs of a layer in forward order, its windows in backward order, and the idle seconds of
    each operator's window.  `stall`: the share of a job's seconds by which the job and the
    concurrent collective slow each other."""

    jobs: tuple[WindowJob, ...]
    slots: tuple[Slot, ...]
    idle_s: dict[str, float]
    stall: float = 0.0

    def allowed(self, job: WindowJob) -> tuple[Slot, ...]:
        """The windows that close before the first reader of the job's outputs."""
        return tuple(s for s in self.slots if job.hides and s.order < job.deadline)


def layer_windows(problem: Problem, table: OpTable, droppable: Collection[str]) -> LayerWindows:
    """The jobs and windows of a layer whose `droppable` saved tensors a plan may drop."""
    order = {op.name: at for at, op in enumerate(reversed(table.ops))}
    idle = {op.name: idle_s(problem, op) for op in table.ops}
    windows = [name for name in order if idle[name] > 0]
    slots = [
        Slot(op=name, layer_offset=offset, order=order[name] - offset * len(order))
        for offset in (1, 0)
        for name in windows
    ]
    makers = [op for op in table.ops if any(name in droppable for name in op.outputs)]
    jobs = tuple(_job(problem, table, op, droppable, order) for op in makers)
    stall = problem.cost.stack.tp_stall
    return LayerWindows(jobs=jobs, slots=tuple(slots), idle_s=idle, stall=stall)


def _job(
    problem: Problem, table: OpTable, maker: Op, droppable: Collection[str], order: dict[str, int]
) -> WindowJob:
    outputs = tuple(name for name in maker.outputs if name in droppable and name in table.saved)
    others = frozenset(table.saved) - set(outputs)
    chain = rebuild_ops(table, frozenset(outputs), others)
    made = {name for op in chain for name in op.outputs}
    read = {name for op in chain for name in op.inputs} - made
    sources = {table.producer(name) for name in read if name in droppable}
    comms = [c for op in chain for c in (op.amax, op.gather, op.reduce) if c is not None]
    readers = [order[op.name] for op in table.ops if not set(outputs).isdisjoint(op.saves)]
    return WindowJob(
        op=maker.name,
        outputs=outputs,
        nbytes=sum(table.activations[name].nbytes for name in outputs),
        seconds=fsum(problem.cost.op_s(op, "forward") for op in chain)
        + fsum(problem.cost.comm_s(comm, 0) for comm in comms),
        needs=tuple(sorted(op.name for op in sources if op is not None)),
        deadline=min(readers, default=len(order)),
        hides=not comms,
    )


def idle_s(problem: Problem, op: Op) -> float:
    """Idle compute seconds during the first collective of an operator's backward."""
    cost = problem.cost
    beside = problem.tp_overlap in ("backward", "gemm") and op.has_weight
    if op.exchanges and problem.ep_overlaps:  # Another micro-batch computes meanwhile.
        return 0.0
    if op.grad_gather is not None:
        return cost.comm_s(op.grad_gather, 0)
    if op.regather is not None:
        if op.regather.kind == "ring":
            return 0.0
        hidden = cost.op_s(op, "backward_input") if beside else 0.0
        return max(0.0, cost.comm_s(op.regather, 0) - hidden)
    if op.grad_reduce is not None:
        hidden = cost.op_s(op, "backward_weight") if beside else 0.0
        return max(0.0, cost.comm_s(op.grad_reduce, 0) - hidden)
    return 0.0
