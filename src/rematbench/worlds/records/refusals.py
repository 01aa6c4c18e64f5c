"""The features of a job that the torch runtime does not execute, found without importing torch."""

from math import gcd

from rematbench.costs.operators.ops import OpTable
from rematbench.costs.states import GRADIENT_STAGE
from rematbench.engine.lowering.states.state_shards import has_whole_gradients
from rematbench.inputs.shapes import shapes
from rematbench.plan import VOCABULARY, Plan
from rematbench.problem import Problem, gathered_bytes, trained_operators
from rematbench.workload import PACKINGS, Packing

EXECUTED = (
    *("experts", "latent attention", "memory layers"),
    *("layers that predict more tokens", "layers that share weights"),
)
"""Features beyond a plain Llama or GPT block that the runtime executes."""
SUM_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4}
"""Bytes of the runtime's gradient sums, by compute precision."""


def refusals(problem: Problem, plan: Plan) -> list[str]:
    """The features of a problem and plan that the runtime does not execute, in words."""
    model, lay, system = problem.workload.model, problem.layout, problem.system
    windows = [w for w in model.attention_window if 0 < w < problem.workload.seq_len]
    refused = {
        "dropout": model.drops,
        "ALiBi positions": model.position == "alibi",
        "sliding-window attention": bool(windows),
        "packed documents": problem.workload.packed,
        "samples of differing lengths": problem.workload.sample_len > 0,
        "rotary positions with an odd head_dim": model.position == "rope"
        and (model.latent.rope if model.latent else model.head_dim) % 2 != 0,
        "slices of several sequences, or with sequence parallelism": bool(plan.slices)
        and (lay.micro_batch > 1 or lay.sequence_parallel),
        "a vocabulary over all stages with states in host memory, or updated in the backward": (
            plan.schedule in VOCABULARY
            and (plan.state("optimizer").home, plan.state("optimizer").update) != ("device", "step")
        ),
        "soft caps": model.attention_soft_cap != 0 or model.logit_soft_cap != 0,
        "norms over each head with tensor parallelism and without sequence parallelism": (
            model.qk_norm and lay.tp > 1 and not lay.sequence_parallel
        ),
        "norms that scale by 1 + weight": model.norm_offset,
        **{words: words not in EXECUTED for words in model.special_features},
        f"tensors that eager operators of {system.name} keep": any(
            (
                system.kernels.norm_keeps_steps,
                system.kernels.repeats_kv,
                system.kernels.eager_operators,
                system.loss.held_logit_bytes,
            )
        ),
        "CUDA graphs": system.kernels.captures,
        f"precision {problem.workload.precision}": problem.workload.precision not in SUM_BYTES,
        "ring attention (use a system with `cp_kind: allgather`)": lay.cp > 1
        and system.parallel.cp_kind != "allgather",
        "Ulysses inside context parallelism": lay.cp > 1 and lay.ulysses > 1,
        "unfused attention with context parallelism": lay.cp > 1 and problem.attention != "flash",
        "parameters gathered matrix by matrix": system.zero.prefetch_elements > 0
        and plan.state("parameter").gather == "layer",
        "reduce buckets that are allocated whole": system.zero.whole_buckets
        and lay.state_shards > 1
        and lay.zero_stage > 0,
        "pipeline stages that hold their outputs until the backward": system.parallel.holds_outputs
        and lay.pp > 1,
        "replicas of sharded states": lay.state_shards < lay.dp * lay.cp,
        "quantised linears over slices of heads": problem.workload.recipe != "none"
        and any(run.of == "heads" for run in plan.mini_sequences),
        "a second tensor dimension over data-parallel ranks": lay.tp_columns > 1 and lay.has_peers,
        "memory layers over data-parallel ranks": model.memory is not None and lay.has_peers,
        "KV heads replicated over tp": model.num_kv_heads % lay.tp != 0,
        **_refused_of_recipes(problem),
        **_refused_of_adapters(problem),
        **_refused_of_experts(problem, plan),
        **_refused_of_predictions(problem, plan),
        **_refused_in_backward(problem, plan),
        **_refused_of_units(problem, plan),
        **_refused_of_pieces(problem, plan),
    }
    return [name for name, is_so in refused.items() if is_so]


def uneven_experts(problem: Problem) -> bool:
    """Whether experts would receive different numbers of a rank's tokens. The token at position p
    goes to `active` consecutive experts from number p x active on, modulo the number of experts, so
    the experts repeat after `period` positions."""
    lay, experts = problem.layout, problem.workload.model.experts
    assert experts is not None
    period = experts.count // gcd(experts.count, experts.active)
    slices = 2 * lay.cp if lay.cp > 1 else 1
    rows = (
        problem.workload.seq_len // slices,
        shapes(problem.workload, lay, problem.system).shard_tokens,
    )
    return any(count % period for count in rows)


def _refused_of_adapters(problem: Problem) -> dict[str, bool]:
    work, lay, model = problem.workload, problem.layout, problem.workload.model
    packed = work.base_dtype in PACKINGS
    others = bool(work.trained_parts or work.frozen_layers or work.dora or work.bottleneck)
    return {
        "partial training other than low-rank adapters": others,
        f"frozen weights in {work.base_dtype}": work.base_dtype != "stack"
        and not PACKINGS.get(work.base_dtype, Packing(4)).block,
        "packed weights with ZeRO 2 or 3, memory layers or layers that predict more tokens": packed
        and (lay.zero_stage >= GRADIENT_STAGE or model.memory is not None or model.mtp_layers > 0),
        "frozen norms in fp32": work.fp32_norms and work.element_bytes < SUM_BYTES["fp32"],
        f"trained weights in {work.trained_dtype}": work.trained_dtype != "stack",
        "adapters over tensor-parallel ranks": work.partly and lay.tp > 1,
        "adapters of models with experts": work.partly and work.model.experts is not None,
        f"the optimizer {problem.stack_choice.optimizer_kind}": problem.stack_choice.optimizer_kind
        is not None,
    }


def _refused_of_recipes(problem: Problem) -> dict[str, bool]:
    work, lay = problem.workload, problem.layout
    given = work.recipe != "none"
    return {
        "a recipe in FP4": work.recipe == "nvfp4",
        "FP8 with one scale per row": work.recipe == "fp8-rows",
        "quantised parameters": work.fp8_params,
        "quantised linears with tensor or context parallelism": given and lay.tp * lay.cp > 1,
        "scales of earlier steps over data-parallel ranks": (
            work.recipe == "fp8-delayed" and lay.has_peers
        ),
        "quantised experts": given and work.model.experts is not None,
        "quantised projections of latent attention": given and work.model.latent is not None,
    }


def _refused_of_experts(problem: Problem, plan: Plan) -> dict[str, bool]:
    model, system = problem.workload.model, problem.system
    if model.experts is None:
        return {}
    homes = {plan.state(kind).home for kind in ("parameter", "gradient", "optimizer")}
    by_unit = has_whole_gradients(plan.state("gradient"), problem.layout)
    return {
        "ZeRO stages 2 and 3 with experts": by_unit or plan.state("parameter").gather == "layer",
        f"experts of unequal load ({problem.workload.balance})": problem.workload.imbalance != 1,
        "a capacity limit of experts": problem.workload.capacity_factor > 0,
        "experts that receive unequal numbers of a rank's tokens": uneven_experts(problem),
        f"the dispatcher {system.experts.dispatcher}": system.experts.dispatcher != "alltoall",
        "exchanges of experts that overlap another micro-batch": problem.ep_overlaps,
        "experts with biases": model.mlp_bias,
        "a gate of the shared expert": model.experts.shared_gate,
        "states of experts in host memory": "host" in homes,
    }


def _refused_of_predictions(problem: Problem, plan: Plan) -> dict[str, bool]:
    lay = problem.layout
    if not problem.workload.model.mtp_layers:
        return {}
    inside = (problem.embedding_ranks or (0, lay.pp - 1)) != (0, lay.pp - 1)
    by_unit = has_whole_gradients(plan.state("gradient"), lay)
    by_unit = by_unit or plan.state("parameter").gather == "layer"
    return {
        "layers that predict more tokens, with tensor but without sequence parallelism": (
            lay.tp > 1 and not lay.sequence_parallel
        ),
        "layers that predict more tokens on a middle pipeline stage": inside,
        "ZeRO stages 2 and 3 with layers that predict more tokens": by_unit,
        "layers that predict more tokens, with weights updated in the backward": (
            plan.state("optimizer").update == "backward"
        ),
    }


def _refused_of_units(problem: Problem, plan: Plan) -> dict[str, bool]:
    """Refusals for weights or gradients kept by unit: under ZeRO 2 and 3, or in host memory."""
    lay, width = problem.layout, problem.workload.element_bytes
    parameter, gradient = plan.state("parameter"), plan.state("gradient")
    optimizer = plan.state("optimizer")
    homes = {"gradients": gradient.home, "parameters": parameter.home}
    on_host = [kind for kind, home in homes.items() if home == "host"]
    by_unit = bool(on_host) or gradient.shards > 1 or parameter.gather == "layer"
    tables = (problem.embedding, *problem.layer_kinds, problem.head)
    counts = [sum(tensor_parameters(problem, table)) for table in tables]
    held = [table.parameters - count for table, count in zip(tables, counts, strict=True)]
    gathered, words = gathered_bytes(problem), " and ".join(on_host)
    refused = {
        "ZeRO stages 2 and 3, or gradients on the host, with pipeline stages": lay.pp > 1,
        f"units whose parameters {lay.state_shards} ranks cannot share evenly": any(
            count % lay.state_shards for count in (*counts, *held * problem.workload.partly)
        ),
        f"{words} of adapters on the host": bool(on_host) and problem.workload.partly,
        "optimizer states in pieces beside frozen weights": optimizer.pieces is not None
        and problem.workload.partly,
        f"gathered parameters of {gathered} bytes, not {width}": gathered != width,
        f"{words} on the host without an optimizer there": bool(on_host)
        and optimizer.home != "host",
        f"{words} on the host with sequence parallelism": bool(on_host) and lay.sequence_parallel,
    }
    return {name: by_unit and is_so for name, is_so in refused.items()}


def _refused_of_pieces(problem: Problem, plan: Plan) -> dict[str, bool]:
    """Refusals of optimizer states in pieces: other bytes than the runtime's, tensors that ranks
    cannot share evenly, and pieces on the device beside weights or gradients on the host."""
    optimizer, nbytes = plan.state("optimizer"), problem.system.states.optimizer_bytes
    if optimizer.pieces is None or optimizer.home == "device":
        return {}
    width = SUM_BYTES.get(problem.workload.precision, 4)
    mixed = set(optimizer.pieces.places) != {"host"}
    counts = [
        count
        for table in (problem.embedding, *problem.layer_kinds, problem.head)
        for count in tensor_parameters(problem, table)
    ]
    refused = {
        f"pieces of optimizer states of {nbytes} bytes, not {3 * width}": nbytes != 3 * width,
        f"pieces of tensors that {optimizer.shards} ranks cannot share evenly": any(
            count % optimizer.shards for count in counts
        ),
    }
    for kind in ("gradient", "parameter"):
        on_host = plan.state(kind).home == "host"
        refused[f"pieces on the device with {kind}s on the host"] = mixed and on_host
    return refused


def _refused_in_backward(problem: Problem, plan: Plan) -> dict[str, bool]:
    """Refuse an optimizer in the backward if the stack's gradients are not as wide as the
    runtime's."""
    asked = plan.state("optimizer").update == "backward"
    width = SUM_BYTES.get(problem.workload.precision, 4)
    given = problem.system.states.grad_bytes
    words = f"an optimizer in the backward with gradients of {given} bytes, not {width}"
    return {words: asked and given != width}


def tensor_parameters(problem: Problem, table: OpTable) -> list[int]:
    """The number of trained parameters of each operator of a table that has any."""
    return [op.trained_parameters for op in trained_operators(problem, table)]
