"""The tensors that a rank allocates between activations: optimizer states and gradients."""

from collections.abc import Sequence
from typing import NamedTuple

from rematbench.costs.operators.ops import OpTable
from rematbench.costs.states import PARAMETER_STAGE, shard
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.states.state_shards import operator_tensors, sharded
from rematbench.engine.program.program import Late, LateUnit
from rematbench.engine.program.storage import EMBEDDING, SHARE
from rematbench.plan import VOCABULARY, Plan
from rematbench.problem import Problem, trained_operators

MOMENTS = 2
"""Adam keeps two moments of each parameter (Kingma & Ba 2015), each a separate tensor."""


def late_tensors(chunks: Sequence[ChunkOps], plan: Plan, problem: Problem) -> Late | None:
    """Return the tensors that a rank allocates between activations; None if the stack allocates
    states and gradients before training. Gradients can only be late in a pipeline of one rank, and
    not if an update in the backward frees them unit by unit."""
    system, layout = problem.system, problem.layout
    here = plan.state("optimizer").home == "device"
    state_bytes = system.states.late_state_bytes if here else 0
    scratch_bytes = system.states.step_scratch_bytes if here else 0
    resident = plan.state("gradient").home == "device"
    resident &= layout.num_micro_batches > 1 or plan.state("optimizer").update == "step"
    fresh = system.states.fresh_gradients and layout.pp == 1 and resident
    grad_bytes = system.states.grad_bytes if fresh else 0
    if not state_bytes and not grad_bytes:
        return None
    units = {}
    optimizer = plan.state("optimizer")
    held = sum(unit.trained for chunk in chunks for unit in chunk.units)
    whole = system.states.flat_step and here and optimizer.update == "step"
    flat = flat_update(plan, problem, held) if whole else None
    tables = [((chunk.chunk, unit.prefix), unit.table) for chunk in chunks for unit in chunk.units]
    if plan.schedule in VOCABULARY:  # Every stage has a part of the vocabulary, not the embedding.
        tables = [one for one in tables if one[0][1] != EMBEDDING]
        tables.append(((0, SHARE), problem.shared.share))
    for unit, table in tables:
        updated = [
            sharded(0, op.trained_parameters, optimizer, layout)
            if op.of_experts
            else shard(op.trained_parameters, optimizer.shards)
            for op in trained_operators(problem, table)
        ]
        scratch = [n * scratch_bytes for n in updated]
        if flat is not None:  # The first unit gets the flat tensors of the whole rank.
            updated, scratch, flat = flat.tensors, flat.scratch, NO_UPDATE
        units[unit] = LateUnit(
            states=tuple(n * state_bytes // MOMENTS for n in updated for _ in range(MOMENTS)),
            gradients=_gradients(problem, plan, table, grad_bytes) if grad_bytes else {},
            scratch=tuple(filter(None, scratch)),
        )
    beside = system.zero.data_parallel == "fsdp" and system.zero.reduce_overlap
    return Late(units=units, beside=beside and layout.state_shards > 1)


class FlatUpdate(NamedTuple):
    """The optimizer step of a rank's flat parameters. `tensors`: the parameters of each flat
    tensor; `scratch`: the bytes by which first the step's flat gradients, and then also their wide
    copy, exceed the memory that was in use before the step."""

    tensors: list[int]
    scratch: list[int]


NO_UPDATE = FlatUpdate([], [])


def flat_update(plan: Plan, problem: Problem, held: int) -> FlatUpdate:
    """The optimizer step of a stack with flat_step on a rank that holds `held` parameters before
    sharding.  ZeRO 3 updates one sub-group after the other, on one rank too."""
    system = problem.system
    count = shard(held, plan.state("optimizer").shards)
    grouped = problem.layout.zero_stage == PARAMETER_STAGE
    part = (system.zero.sub_group_parameters if grouped else 0) or count
    tensors = [min(part, count - start) for start in range(0, count, part)]
    freed = system.states.grad_bytes * (shard(held, plan.state("gradient").shards) - count)
    flat = min(system.states.grad_bytes, system.states.step_scratch_bytes) * tensors[0]
    wide = system.states.step_scratch_bytes * tensors[0] - flat
    return FlatUpdate(tensors, [max(0, flat - freed), max(0, wide - max(0, freed - flat))])


def _gradients(
    problem: Problem, plan: Plan, table: OpTable, grad_bytes: int
) -> dict[str, tuple[int, ...]]:
    shards = plan.state("gradient").shards
    return {
        op.name: tuple(shard(n, shards) * grad_bytes for n in operator_tensors(problem, table, op))
        for op in trained_operators(problem, table)
    }
