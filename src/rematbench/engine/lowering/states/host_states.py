"""Host bytes of the states that a plan has in host memory."""

from rematbench.costs.states import (
    PARAMETER_STAGE,
    HostStates,
    pieces_host_bytes,
    shard,
    zero1_host_states,
    zero3_host_states,
)
from rematbench.engine.lowering.states.state_shards import operator_tensors
from rematbench.plan import Plan
from rematbench.problem import Problem, rank_parameters, trained_operators


def host_states(problem: Problem, plan: Plan, rank: int) -> HostStates:
    """Host bytes of the states of one rank that a plan has in host memory."""
    system, layout = problem.system, problem.layout
    parameter, gradient = plan.state("parameter"), plan.state("gradient")
    optimizer = plan.state("optimizer")
    sizes = (system.states.param_bytes, system.states.grad_bytes, system.states.optimizer_bytes)
    hosted, leaves = (state.home == "host" for state in (optimizer, parameter))
    held = rank_parameters(problem, plan, rank)
    count = rank_parameters(problem, plan, rank, trained=True)
    if optimizer.pieces is not None:
        places = optimizer.cut(shard(count, optimizer.shards))
        updated = [piece.count for piece in places if piece.place == "host"]
        visiting = [piece.count for piece in places if piece.place == "visit"]
        weights = shard(held, parameter.shards) * system.states.param_bytes * leaves
        weights += pieces_host_bytes(updated, visiting, system)
        return HostStates(held=weights, update=0)
    if not (hosted or leaves) or not system.host.host_gradients:
        states = zip((parameter, gradient, optimizer), (held, count, count), sizes, strict=True)
        away = [shard(many, state.shards) * n for state, many, n in states if state.home == "host"]
        return HostStates(held=sum(away))
    tensors = rank_tensors(problem, plan, rank)
    if layout.zero_stage == PARAMETER_STAGE:
        shards = optimizer.shards
        return zero3_host_states(tensors, shards, system, optimizer=hosted, parameters=leaves)
    accumulates = layout.num_micro_batches > 1
    return zero1_host_states(tensors, optimizer.shards, system, accumulates=accumulates)


def on_device(plan: Plan, held: int) -> dict[str, int]:
    """The parameters of a rank, which trains `held` before any sharding, whose states of a kind at
    home on the host stay on the device: optimizer states of resident pieces, and the gradients of
    all pieces that the host does not update."""
    optimizer = plan.state("optimizer")
    if optimizer.pieces is None:
        return {}
    counts = optimizer.counts(shard(held, optimizer.shards))
    kept = {"optimizer": counts["device"], "gradient": counts["device"] + counts["visit"]}
    return {kind: n for kind, n in kept.items() if plan.state(kind).home == "host"}  # type: ignore[arg-type]


def rank_tensors(problem: Problem, plan: Plan, rank: int) -> list[int]:
    """Parameters of each tensor of a rank, in the order of the model."""
    layers = [problem.layer(index) for chunk in plan.partition[rank] for index in chunk]
    tables = [problem.embedding] if rank == 0 else []
    tables += layers
    tables += [problem.head] if rank == problem.layout.pp - 1 else []
    by_table = {
        id(table): [
            count
            for op in trained_operators(problem, table)
            for count in reversed(operator_tensors(problem, table, op))
        ]
        for table in tables
    }
    return [count for table in tables for count in by_table[id(table)]]
