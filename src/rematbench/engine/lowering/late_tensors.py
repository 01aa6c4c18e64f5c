"""The tensors that a rank allocates between activations: optimizer states and gradients."""

from collections.abc import Sequence

from rematbench.costs.operators.ops import OpTable
from rematbench.costs.states import shard
from rematbench.engine.lowering.chunk_ops import ChunkOps
from rematbench.engine.program.program import Late, LateUnit
from rematbench.plan import Plan
from rematbench.problem import (
    Problem,
    operator_tensors,
    tensor_parameters,
    weighted_operators,
)

MOMENTS = 2
"""Adam keeps two moments of each parameter (Kingma & Ba 2015), each a separate tensor."""


def late_tensors(chunks: Sequence[ChunkOps], plan: Plan, problem: Problem) -> Late | None:
    """Return the late tensors of a rank; None if the stack allocates states and gradients before
    training.

    Gradients are late if a pipeline of one rank accumulates them.  With one micro-batch the ledger
    counts them from the start of the step, which overestimates the bytes by at most their size.
    Updates in the backward free each unit's gradients directly.
    """
    system, layout = problem.system, problem.layout
    state_bytes = system.late_state_bytes if plan.state("optimizer").home == "device" else 0
    accumulates = layout.num_micro_batches > 1 and layout.pp == 1
    resident = plan.state("gradient").home == "device"
    fresh = system.fresh_gradients and accumulates and resident
    grad_bytes = system.grad_bytes if fresh else 0
    if not state_bytes and not grad_bytes:
        return None
    units = {}
    for chunk in chunks:
        for unit in chunk.units:
            tensors = tensor_parameters(problem, unit.table)
            updated = [shard(n, plan.state("optimizer").shards) for n in tensors]
            units[chunk.chunk, unit.prefix] = LateUnit(
                states=tuple(n * state_bytes // MOMENTS for n in updated for _ in range(MOMENTS)),
                gradients=_gradients(problem, plan, unit.table, grad_bytes) if grad_bytes else {},
                scratch=tuple(n * system.step_scratch_bytes for n in updated),
            )
    return Late(units=units)


def _gradients(
    problem: Problem, plan: Plan, table: OpTable, grad_bytes: int
) -> dict[str, tuple[int, ...]]:
    """Bytes of the gradients of a unit's tensors, by operator, in the order of the table."""
    shards = plan.state("gradient").shards
    return {
        op.name: tuple(shard(n, shards) * grad_bytes for n in operator_tensors(problem, table, op))
        for op in weighted_operators(problem, table)
    }
