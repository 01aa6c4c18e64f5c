"""The number of parameters whose state a rank holds.  States of experts are sharded over another
group, and only trained parameters have gradients."""

from rematbench.costs.operators.ops import Op, OpTable
from rematbench.costs.states import GRADIENT_STAGE, OPTIMIZER_STAGE, shard
from rematbench.inputs.layout import Layout
from rematbench.inputs.recipes import resident_bytes
from rematbench.plan import Plan, StateFate
from rematbench.problem import Problem, expert_parameters, rank_parameters

STAGES = {"optimizer": OPTIMIZER_STAGE, "gradient": GRADIENT_STAGE}
"""The lowest ZeRO stage that shards each kind of state."""


def sharded(rest: int, experts: int, fate: StateFate, layout: Layout) -> int:
    """The number of parameters whose state the fullest rank holds, out of `rest` parameters and
    `experts` parameters of experts, whose states are sharded over expert data parallelism."""
    shards = layout.expert_shards if shards_experts(fate, layout) else 1
    return shard(rest, fate.shards) + shard(experts, shards)


def shards_experts(fate: StateFate, layout: Layout) -> bool:
    """Whether expert data parallelism shards the experts' states: if ZeRO shards the states of
    other parameters, or would shard them if there were peers."""
    parted = fate.shards > 1 or layout.state_shards == 1
    if fate.kind == "parameter":
        return parted and fate.gather == "layer"
    return parted and layout.zero_stage >= STAGES[fate.kind]


def has_whole_gradients(gradient: StateFate, layout: Layout) -> bool:
    """Whether a unit's gradients are whole until their reduction and sharded afterwards."""
    return gradient.shards > 1 or (layout.expert_shards > 1 and shards_experts(gradient, layout))


def rank_sharded(problem: Problem, plan: Plan, rank: int, fate: StateFate) -> int:
    """The number of parameters whose state a rank holds."""
    trained = fate.kind != "parameter"
    experts = expert_parameters(problem, plan, rank, trained=trained)
    rest = rank_parameters(problem, plan, rank, trained=trained) - experts
    return sharded(rest, experts, fate, problem.layout)


def operator_tensors(problem: Problem, table: OpTable, op: Op) -> list[int]:
    """The numbers of trained parameters of an operator's tensors, in reverse order, as autograd
    reaches them. Without fused linears, each output of a linear has a separate tensor."""
    widths = [table.activations[name].row_bytes for name in op.outputs]
    count = op.trained_parameters
    if problem.system.kernels.fused_linears or not op.has_weight or len(widths) < 2:
        return [count]
    others = [count * width // sum(widths) for width in reversed(widths[1:])]
    return [*others, count - sum(others)]


def quantised_weights(problem: Problem, plan: Plan, rank: int) -> int:
    """The number of weights of a rank that matrix products read in quantised form."""
    if problem.workload.recipe == "none":
        return 0
    layers = [problem.layer(index) for chunk in plan.partition[rank] for index in chunk]
    return sum(table.quantised for table in layers)


def quantised_bytes(problem: Problem, plan: Plan, rank: int) -> int:
    """Bytes that a rank's quantised weights add to its parameters (negative if they replace
    some)."""
    each = resident_bytes(
        problem.workload, problem.system, problem.cluster.generation, problem.layout.zero_stage
    )
    return round(each * quantised_weights(problem, plan, rank))
