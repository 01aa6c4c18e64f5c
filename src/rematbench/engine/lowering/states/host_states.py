"""Host bytes of the states that a plan keeps in host memory."""

from rematbench.costs.operators.ops import Op, OpTable
from rematbench.costs.states import (
    PARAMETER_STAGE,
    HostStates,
    pieces_host_bytes,
    tensors_host_bytes,
    zero1_host_states,
    zero3_host_states,
)
from rematbench.engine.lowering.states.state_shards import (
    operator_tensors,
    rank_sharded,
    sharded,
)
from rematbench.plan import Plan
from rematbench.problem import Problem, trained_operators


def host_states(problem: Problem, plan: Plan, rank: int) -> HostStates:
    system, layout = problem.system, problem.layout
    parameter, gradient = plan.state("parameter"), plan.state("gradient")
    optimizer = plan.state("optimizer")
    sizes = (system.states.param_bytes, system.states.grad_bytes, system.states.optimizer_bytes)
    hosted, leaves = (state.home == "host" for state in (optimizer, parameter))
    counts = [rank_sharded(problem, plan, rank, one) for one in (parameter, gradient, optimizer)]
    if hosted and system.host.host_tensors:
        return HostStates(held=_of_tensors(problem, plan, rank))
    if optimizer.pieces is not None:
        places = optimizer.cut(counts[2])
        updated = [piece.count for piece in places if piece.place == "host"]
        visiting = [piece.count for piece in places if piece.place == "visit"]
        weights = counts[0] * system.states.param_bytes * leaves
        weights += pieces_host_bytes(updated, visiting, system)
        return HostStates(held=weights, update=0)
    if not (hosted or leaves) or not system.host.host_gradients:
        states = zip((parameter, gradient, optimizer), counts, sizes, strict=True)
        return HostStates(held=sum(many * n for state, many, n in states if state.home == "host"))
    tensors = rank_tensors(problem, plan, rank)
    if layout.zero_stage == PARAMETER_STAGE:
        shards = optimizer.shards
        return zero3_host_states(tensors, shards, system, optimizer=hosted, parameters=leaves)
    accumulates = layout.num_micro_batches > 1
    return zero1_host_states(tensors, optimizer.shards, system, accumulates=accumulates)


def _of_tensors(problem: Problem, plan: Plan, rank: int) -> int:
    """Host bytes if each tensor that the host updates has its own buffers. All experts of an
    operator count as one tensor: their number is usually a power of two, as buffers' sizes are."""
    optimizer, parts = plan.state("optimizer"), list[int]()
    for table, op in _weighted(problem, plan, rank):
        for count in operator_tensors(problem, table, op):
            rest, experts = (0, count) if op.of_experts else (count, 0)
            parts.append(sharded(rest, experts, optimizer, problem.layout))
    held = rank_sharded(problem, plan, rank, optimizer)
    away = held - optimizer.counts(held)["device"]
    return tensors_host_bytes(parts, problem.system) * away // max(1, held)


def on_device(problem: Problem, plan: Plan, rank: int) -> dict[str, int]:
    """For each kind of state whose home is the host, the bytes of a rank that stay on the device:
    the optimizer states of resident pieces, `resident_bytes` for each other parameter, and
    gradients of pieces that the host does not update."""
    optimizer, states = plan.state("optimizer"), problem.system.states
    if optimizer.home == "device":
        return {}
    counts = optimizer.counts(rank_sharded(problem, plan, rank, optimizer))
    left = {"optimizer": states.optimizer_bytes * counts["device"]}
    left["optimizer"] += problem.system.host.resident_bytes * (counts["host"] + counts["visit"])
    if plan.state("gradient").home == "host" and optimizer.pieces is not None:
        left["gradient"] = states.grad_bytes * (counts["device"] + counts["visit"])
    return left


def rank_tensors(problem: Problem, plan: Plan, rank: int) -> list[int]:
    return [
        count
        for table, op in _weighted(problem, plan, rank)
        for count in reversed(operator_tensors(problem, table, op))
    ]


def _weighted(problem: Problem, plan: Plan, rank: int) -> list[tuple[OpTable, Op]]:
    tables = [problem.embedding] if rank == 0 else []
    tables += [problem.layer(index) for chunk in plan.partition[rank] for index in chunk]
    tables += [problem.head] if rank == plan.head_rank else []
    by_table = {id(table): trained_operators(problem, table) for table in tables}
    return [(table, op) for table in tables for op in by_table[id(table)]]
