"""The features that the torch runtime does not execute, determined without importing torch."""

from rematbench.plan import Plan
from rematbench.problem import Problem

SUM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}
"""Bytes of the runtime's gradient sums, by compute precision."""


def refusals(problem: Problem, plan: Plan) -> list[str]:
    """The features of a problem and plan that the runtime's kernels and executor lack, by name."""
    model, lay, system = problem.workload.model, problem.layout, problem.system
    states = {state.kind: state for state in plan.states}
    hosted = [k for k, state in states.items() if state.home == "host" and k != "optimizer"]
    windows = [w for w in model.attention_window if 0 < w < problem.workload.seq_len]
    refused = {
        "dropout": model.drops,
        "ALiBi positions": model.position == "alibi",
        "sliding-window attention": bool(windows),
        "packed documents": problem.workload.packed,
        "rotary positions with an odd head_dim": model.position == "rope"
        and model.head_dim % 2 != 0,
        "soft caps": model.attention_soft_cap != 0 or model.logit_soft_cap != 0,
        "norms over all heads of queries and keys": model.qk_norm,
        "norms that scale by 1 + weight": model.norm_offset,
        **dict.fromkeys(model.special_features, True),
        f"what {system.name} keeps of eager operators": any(
            (
                system.norm_keeps_steps,
                system.repeats_kv,
                system.eager_operators,
                system.held_logit_bytes,
            )
        ),
        "CUDA graphs": system.cuda_graphs,
        f"precision {problem.workload.precision}": problem.workload.precision not in SUM_BYTES,
        "ring attention (use a system with `cp_kind: allgather`)": lay.cp > 1
        and system.cp_kind != "allgather",
        "unfused attention with context parallelism": lay.cp > 1 and problem.attention != "flash",
        "parameters gathered matrix by matrix": system.prefetch_elements > 0
        and plan.state("parameter").gather == "layer",
        "reduce buckets that are allocated whole": system.whole_buckets
        and lay.state_shards > 1
        and lay.zero_stage > 0,
        "outputs that a pipeline stage holds": system.holds_outputs and lay.pp > 1,
        "replicas of sharded states": lay.state_shards < lay.dp * lay.cp,
        "ZeRO stages 2 and 3": lay.state_shards > 1 and lay.zero_stage >= 2,
        "KV heads replicated over tp": model.num_kv_heads % lay.tp != 0,
        **_refused_in_backward(problem, plan),
        f"{' and '.join(hosted)} states on the host": bool(hosted),
        "parameters gathered per layer": plan.state("parameter").gather == "layer",
    }
    return [name for name, is_so in refused.items() if is_so]


def _refused_in_backward(problem: Problem, plan: Plan) -> dict[str, bool]:
    """Refuse optimizer-in-backward if the stack's gradients and the runtime's gradient sums differ
    in width."""
    asked = plan.state("optimizer").update == "backward"
    width = SUM_BYTES.get(problem.workload.precision, 4)
    given = problem.system.grad_bytes
    words = f"optimizer in backward with {given}-byte gradients where it sums {8 * width} bits"
    return {words: asked and given != width}
