"""Numbers for claims other than step times: bytes of operators and layers, allocator waste."""

from collections.abc import Callable
from math import fsum
from typing import TypeAlias

from rematbench.costs.operators.kernels import Attention
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import resolve
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.replay import replay
from rematbench.engine.program.storage import Storage
from rematbench.evaluate.evaluation import fullest_rank, program_bytes
from rematbench.evidence.published.estimators import fujii_estimate
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.solve.layer_costs import forward_s
from rematbench.solve.memory_plan import memory_plan
from rematbench.solve.search import first_true

Values: TypeAlias = dict[str, int | float | str]
MLP_OPS = frozenset({"fc1", "act", "mul", "fc2", "fc2_out", "fc2_out.r"})
"""Operators of the MLP. The last two are the whole outputs that mini-sequences write into."""
HEAD_OPS = frozenset({"lm_head", "loss"})


def saved_layer_bytes(problem: Problem, plan: Plan) -> Values:
    """Bytes that the first chunk's layers save for one micro-batch on one rank. `kept_bytes` counts
    all kept tensors, `kept_tensor_bytes` only those with a gradient (no row statistics, no masks),
    as published formulas do."""
    ops = ChunkOps.of_plan(problem, plan, 0, 0)
    fates, _ = resolve(plan, ops.sites, "warmup", 0)
    tensors = ops.sites.sites
    own = {site: fate for site, fate in fates.items() if site[0] == "layer"}
    return {
        "layers": len(plan.partition[0][0]),
        "kept_bytes": sum(fate.keep_bytes for fate in own.values()),
        "kept_tensor_bytes": sum(
            fate.keep_bytes for site, fate in own.items() if tensors[site].differentiable
        ),
    }


def attention_share(problem: Problem, plan: Plan) -> Values:
    """Share of one layer's forward seconds (kernels and collectives) in its attention kernel."""
    del plan  # the share depends on the workload alone
    table = problem.layer_kinds[0]
    kernels = [op for op in table.ops if any(isinstance(k, Attention) for k in op.forward)]
    busy = fsum(problem.cost.op_s(op, "forward") for op in kernels)
    return {"attention_share": busy / forward_s(problem, table)}


def part_peak_bytes(problem: Problem, plan: Plan) -> Values:
    """Peak bytes during a step of two groups of operators: the LM head with its loss, and one
    layer's MLP. They include all live allocations of these operators (outputs, gradients, scratch),
    their inputs, their weights and the weights' gradients, but not other operators."""
    head = [op for op in problem.head.ops if op.name in HEAD_OPS]
    mlp = [op for op in problem.layer_kinds[0].ops if op.name in MLP_OPS]
    per_parameter = problem.system.states.param_bytes + problem.system.states.grad_bytes
    head_input = problem.head.activations["final_norm_out"].nbytes
    mlp_input = problem.layer_kinds[0].activations["mlp_norm_out"].nbytes
    return {
        "head_bytes": head_input
        + per_parameter * sum(op.parameters for op in head)
        + _peak(problem, plan, HEAD_OPS),
        "mlp_bytes": mlp_input
        + per_parameter * sum(op.parameters for op in mlp)
        + _peak(problem, plan, MLP_OPS),
    }


def _peak(problem: Problem, plan: Plan, ops: frozenset[str]) -> int:
    """Peak bytes that the named operators have alive on rank 0, in one layer or in the head. Only
    one layer counts, because what several layers keep at once belongs to no operator."""
    rank = lower(plan, problem).ranks[0]
    parts = {"H"} if ops == HEAD_OPS else {"L0"}
    alive: dict[Storage, int] = {}
    live = peak = 0
    for action, _, _ in rank.actions():
        if action.part in parts and action.op in ops:
            for alloc in action.allocs:
                alive[alloc.storage] = alloc.nbytes
                live += alloc.nbytes
            peak = max(peak, live + action.scratch)
        for freed in action.frees:
            live -= alive.pop(freed, 0)
    return peak


def plan_waste(problem: Problem, plan: Plan) -> Values:
    """Device bytes of the fullest rank on an unlimited device, states included: live bytes at the
    peak, bytes planned ahead (MEMO's two levels), and bytes reserved by the caching allocator with
    default and with expandable segments."""
    program = lower(plan, problem)
    ranks = program_bytes(problem, plan, program)
    number = fullest_rank(ranks)
    held, actions = ranks[number], program.ranks[number]
    states = held.parameter + held.gradient + held.optimizer
    resident, planned = held.blocks(actions.late), memory_plan(actions)
    live_bytes = states + planned.lower_bound_bytes
    reserved_bytes = replay(actions, resident, None).reserved_bytes
    return {
        "live_bytes": live_bytes,
        "planned_bytes": states + planned.peak_bytes,
        "reserved_bytes": reserved_bytes,
        "expandable_bytes": replay(actions, resident, None, mode="expandable").reserved_bytes,
        "reserved_over_live": reserved_bytes / live_bytes,
        "usable_bytes": problem.usable_bytes,
    }


def estimated_bytes(problem: Problem, plan: Plan) -> Values:
    """State and activation bytes by Fujii's closed form; the plan does not enter the formula."""
    del plan
    found = fujii_estimate(problem.workload.model, problem.layout, problem.workload.seq_len)
    return {"state_bytes": found.state_bytes, "activation_bytes": found.activation_bytes}


def hidden_from(
    factory: Callable[[int], Problem], method: Composition, *, granularity: int, limit: int
) -> int:
    """The shortest sequence, in tokens, at which the copies of a whole layer hide behind its
    forward: the method's `alpha_bandwidth`, which grows with the sequence, reaches 1. Return 0 if
    the copies hide at no length up to `limit`."""

    def hides(units: int) -> bool:
        problem = factory(units * granularity)
        plan = method.plan(problem)
        if isinstance(plan, Unsupported) or "alpha_bandwidth" not in plan.fit:
            return False
        return float(str(plan.fit["alpha_bandwidth"])) >= 1.0

    last = max(1, limit // granularity)
    return first_true(hides, 0, last) * granularity if hides(last) else 0
