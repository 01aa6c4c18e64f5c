"""Writes the states that a pipeline holds until a rank's last pass: one gather and one reduction.

Source: FSDP2 in a pipeline (torch 2.13). distributed/pipelining/stage.py: every backward runs with
set_reshard_after_backward(False) and set_requires_gradient_sync(False); perform_reduce_grad then
reshards and reduces one group after the other. distributed/fsdp/_fully_shard/_fsdp_param.py,
to_accumulated_grad_if_needed: gradients of another dtype than the reduction's are added to a sum.
Deviations: torch reduces a chunk after the chunk's last backward; here all chunks of a rank are
reduced after the rank's last pass. The seconds of additions to a sum are left out.
"""

from typing import NamedTuple

from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.states.emit_states import (
    GradReducer,
    ParameterGatherer,
    allocate_gradients,
    gathered_parts,
    gradient_reductions,
    updated,
)
from rematbench.engine.program.action import COMPUTE, Alloc
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import ModelPart, Role, Storage, storage_of
from rematbench.plan import Plan, gathers_by_layer
from rematbench.problem import Problem, gathered_bytes


def holds_parameters(plan: Plan, problem: Problem) -> bool:
    """Whether gathered parameters stay until the rank's last pass."""
    parameter = plan.state("parameter")
    return gathers_by_layer(parameter, problem.layout) and parameter.release == "step"


def sums_gradients(plan: Plan) -> bool:
    """Whether whole gradients add up until the rank's last pass."""
    updated = plan.state("optimizer").update == "backward"
    return plan.state("gradient").release == "step" and not updated


def lends_gradients(plan: Plan) -> bool:
    """Whether no gradients are resident: a unit's gradients live only until its update, or the
    program allocates and frees them."""
    return plan.state("optimizer").update == "backward" or sums_gradients(plan)


class HeldParameters(ParameterGatherer):
    """Gives kernels the copies that the chunk's first forward gathered and waited for."""

    def before(self, w: BlockWriter, units: list[Unit], position: int) -> None:
        self.ready(w, units[position])

    def ready(self, w: BlockWriter, unit: Unit) -> None:
        w.parameters[unit.prefix] = self.buffers(unit)

    def arrive(self, w: BlockWriter, units: list[Unit]) -> set[Storage]:
        return set()

    def after(self, w: BlockWriter, unit: Unit) -> None:
        """Keep the copies."""


class GradientSums(GradReducer):
    """Adds each unit's gradients to a sum of `reduce_bytes` per parameter, which the chunk's
    `first` backward allocates. Gradients of another width first go to a buffer of the unit. A rank
    has no shard of gradients until the reduction (zero_grad(set_to_none=True))."""

    def __init__(self, plan: Plan, problem: Problem, *, first: bool) -> None:
        states = plan.state("gradient"), plan.state("optimizer")
        super().__init__(*states, problem.system, problem.layout, gathered_bytes(problem))
        self.first = first
        self.apart = self.width != self.system.states.reduce_bytes

    def before(self, w: BlockWriter, unit: Unit) -> None:
        if self.apart:
            super().before(w, unit)
        else:
            self._begin(w, unit)

    def after(self, w: BlockWriter, unit: Unit, *, last: bool) -> None:
        if self.apart and unit.trained:
            self._begin(w, unit)
            w.free(self.buffer(unit))

    def _begin(self, w: BlockWriter, unit: Unit) -> None:
        if self.first and unit.trained:
            sums = _sums_of(unit.prefix)
            allocate_gradients(w, unit, Alloc(sums, self.system.states.reduce_bytes * unit.trained))
            self.survivors.add(sums)


def _sums_of(unit: ModelPart) -> Storage:
    return storage_of(unit, role=Role.SUMS).held


def held_copies(plan: Plan, problem: Problem, chunk: ChunkOps) -> tuple[Storage, ...]:
    fate, lay = plan.state("parameter"), problem.layout
    return tuple(part.storage for unit in chunk.units for part in gathered_parts(unit, fate, lay))


class UnitSums(NamedTuple):
    part: ModelPart
    comms: tuple[Comm, ...]
    shard: Alloc


def sums_block(units: tuple[UnitSums, ...]) -> Block:
    """Reduce the sums of a chunk's gradients to shards, unit by unit, and free each sum."""
    w = BlockWriter()
    for part, comms, shard in units:
        reads, allocs = [_sums_of(part)], [shard]
        for comm in comms:
            w.wait(COMPUTE, w.collective(comm, part, "gradients", reads, allocs))
            reads, allocs = [_sums_of(part), shard.storage], []
        w.free(_sums_of(part))
    return Block("reduce", tuple(w.actions))


def unit_sums(plan: Plan, problem: Problem, chunk: ChunkOps) -> tuple[UnitSums, ...]:
    """The units of a chunk that have gradients, from the last to the first."""
    lay, system, gradient = problem.layout, problem.system, plan.state("gradient")
    shards, width = (plan.state("optimizer").shards, gradient.shards), system.states.reduce_bytes
    found = []
    for unit in reversed(chunk.units):
        count, experts = unit.trained, unit.table.trained_experts
        comms = gradient_reductions(lay, *shards, width * count, width * experts)
        nbytes = system.states.grad_bytes * updated(unit, gradient, lay)
        shard = storage_of(unit.prefix, role=Role.SHARD).held
        found.append(UnitSums(unit.prefix, comms, Alloc(shard, nbytes)))
    return tuple(one for one in found if one.comms[0].nbytes)
