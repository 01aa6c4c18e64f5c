"""Writes gradient reductions through buckets that are allocated whole, as DeepSpeed's ZeRO does.

Source: deepspeed 0.19.8, contiguous_gradients: stage_1_and_2.py, setup_buckets (two buckets with
overlap_comm, at the first gradient), reduce_independent_p_g_buckets_and_remove_grads (if a gradient
no longer fits, the bucket is reduced first), allreduce_bucket (the copy that is reduced) and
_release_ipg_buffers; stage3.py, one bucket from the start, and comm/coalesced_collectives.py,
reduce_scatter_coalesced (the copy).
Deviation: the gradients of a unit enter the bucket together, after the unit's backward.
"""

from collections.abc import Mapping, Sequence

from rematbench.costs.states import Buckets, reduce_buckets
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.states.emit_states import GradReducer
from rematbench.engine.lowering.states.state_shards import operator_tensors
from rematbench.engine.program.action import COMPUTE, Action, Alloc, Kind
from rematbench.engine.program.storage import NO_PART, ModelPart, storage_of
from rematbench.plan import Plan, StateFate
from rematbench.problem import Problem, gathered_bytes, trained_operators

BUCKET = "bucket"
PART, COPY = storage_of(NO_PART, "gradient_part"), storage_of(NO_PART, "bucket_copy")
"""The storages of the rank's part of the gradients, which reductions fill, and of the copy of a
bucket that is reduced."""


def buckets_of(plan: Plan, problem: Problem, chunks: Sequence[ChunkOps]) -> Buckets | None:
    """The buckets of a rank's reductions; None if the stack does not allocate buckets whole."""
    optimizer = plan.state("optimizer")
    if optimizer.shards == 1 or optimizer.update == "backward":
        return None
    count = sum(unit.trained for chunk in chunks for unit in chunk.units)
    found = reduce_buckets(count, problem.layout, problem.system)
    return found if found.copy else None


class BucketReducer(GradReducer):
    """Reduces gradients on the dp stream when the next unit's do not fit into the bucket."""

    def __init__(
        self,
        gradient: StateFate,
        optimizer: StateFate,
        problem: Problem,
        tied: Unit | None,
        buckets: Buckets,
        leaving: Mapping[ModelPart, int] | None = None,
    ) -> None:
        width = gathered_bytes(problem)
        super().__init__(gradient, optimizer, problem.system, problem.layout, width, tied, leaving)
        self.problem, self.buckets, self.opened = problem, buckets, False
        size, count = buckets.copy, buckets.opened // buckets.copy
        names = [f"{BUCKET}{number}" for number in range(count)]
        self.held = tuple(Alloc(storage_of(NO_PART, name), size) for name in names)
        if buckets.part and not self.leaves:
            self.held += (Alloc(PART, buckets.part),)

    def _bytes(self, unit: Unit) -> int:
        """The most bytes of a unit's gradients that are alive together: those of one tensor."""
        weighted = trained_operators(self.problem, unit.table)
        sizes = (max(operator_tensors(self.problem, unit.table, op)) for op in weighted)
        return self.width * max(sizes, default=0)

    def after(self, w: BlockWriter, unit: Unit, *, last: bool) -> None:
        if unit.trained:
            if self.held and not self.opened:
                w.add(Action(kind=Kind.ALLOC, stream=COMPUTE, op=BUCKET, allocs=self.held))
            self.opened = True
            if self._filled() + self._size(unit) > self.system.zero.bucket_bytes:
                self._empty(w)
            if self.transient:
                w.free(self.buffer(unit))
            self.bucket.append(unit)
        if last or self._filled() >= self.system.zero.bucket_bytes:
            self._empty(w)
        if last:
            self._drain(w, 0)
            if self.held and self.opened:
                w.free(*(alloc.storage for alloc in self.held))
            self._record_end(w)

    def _size(self, unit: Unit) -> int:
        return self.system.states.reduce_bytes * unit.trained

    def _filled(self) -> int:
        return sum(map(self._size, self.bucket))

    def _empty(self, w: BlockWriter) -> None:
        self._drain(w, 0)
        if self.bucket:
            copy = Alloc(COPY, min(self._filled(), self.buckets.copy))
            self._reduce_storages(w, self._filled(), (), (copy,))
