"""The options of Megatron-LM's pretraining script for the facts of a stack, a layout and a model.

Source: Megatron-LM, megatron/training/arguments.py of core 0.16. `flags` lists facts as assumed if
they have an effect in a job and have no option here.
"""

import shlex
from collections.abc import Callable

from rematbench.foreign.recipes import ENDS, MEGATRON, REUSE
from rematbench.inputs.layout import Layout
from rematbench.inputs.stages import Stage, stages_text
from rematbench.inputs.system import System, with_facts
from rematbench.problem import Problem
from rematbench.workload import Model, Workload

BUCKET_PARAMETERS = 40_000_000
"""The smallest default of --ddp-bucket-size (megatron/core/distributed)."""
BACKENDS = {"fa1": "flash", "fa2": "flash", "fa3": "flash", "cudnn": "fused"}
CP_KINDS = {"ring": "p2p", "allgather": "all_gather", "ulysses": "a2a"}
VOCAB_MULTIPLE = 128
RANK_ORDERS: dict[tuple[str, ...], str] = {
    ("tp", "cp", "dp", "pp"): "",
    ("tp", "cp", "pp", "dp"): "--use-tp-pp-dp-mapping",
}
ROPES = {"fused": "", "eager": "--no-rope-fusion"}
TP_OVERLAPS = {"gemm": "--tp-comm-overlap", "backward": ""}
P2P_OVERLAPS = {"interleaved": "", "none": "--no-overlap-p2p-communication"}
GRADIENTS = {4: "", 2: "--grad-reduce-in-bf16"}
"""The option for the dtype of gradients, in buffers and reductions, by its bytes."""
STATES = {12: "", 8: "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"}
"""The options for the dtypes of moments, by the bytes of an element's master weight and moments."""
POSITIONS = {"rope": "rope", "learned": "learned_absolute", "none": "none"}
DISPATCHERS = {
    "alltoall": "alltoall",
    "allgather": "allgather",
    "deepep": "flex --moe-flex-dispatcher-backend deepep",
    "hybridep": "flex --moe-flex-dispatcher-backend hybridep",
}
EP_OVERLAPS = {"none": "", "interleaved": "--overlap-moe-expert-parallel-comm"}


def _attention(system: System) -> str | None:
    backend = BACKENDS.get(system.kernels.attention)
    return backend and f"--attention-backend {backend}"


def _states(system: System) -> str | None:
    words = STATES.get(system.states.optimizer_bytes)
    return f"--use-precision-aware-optimizer {words}" if words else words


def _graphs(system: System) -> str:
    scope = system.kernels.cuda_graphs
    whole = {"none": "", "layer": "--cuda-graph-impl local"}
    named = "local" if scope == "full_iteration" else "transformer_engine"
    words = scope.replace(",", " ")
    return whole.get(scope, f"--cuda-graph-impl {named} --cuda-graph-scope {words}")


def _bucket(system: System) -> str:
    size = system.zero.bucket_bytes // max(1, system.states.grad_bytes)
    return f"--ddp-bucket-size {size}" if size not in (0, BUCKET_PARAMETERS) else ""


OPTIONS: dict[str, Callable[[System], str | None]] = {
    "attention": _attention,
    "cudnn_first": lambda _: "",  # --attention-backend says which kernel the generation uses
    "fused_loss": lambda system: "--cross-entropy-loss-fusion" * system.loss.fused_loss,
    "rope": lambda system: ROPES.get(system.kernels.rope),
    "norm": lambda system: "" if system.kernels.norm == "fused" else "--transformer-impl local",
    "optimizer_bytes": _states,
    "grad_bytes": lambda system: GRADIENTS.get(system.states.grad_bytes),
    "reduce_bytes": lambda system: GRADIENTS.get(system.states.reduce_bytes),
    "tp_overlap": lambda system: TP_OVERLAPS.get(system.parallel.tp_overlap),
    "p2p_overlap": lambda system: P2P_OVERLAPS.get(system.parallel.p2p_overlap),
    "reduce_overlap": lambda system: "--overlap-grad-reduce" * system.zero.reduce_overlap,
    "gather_overlap": lambda system: "--overlap-param-gather" * system.zero.gather_overlap,
    "bucket_bytes": _bucket,
    "cp_kind": lambda system: f"--cp-comm-type {CP_KINDS.get(system.parallel.cp_kind, 'p2p')}",
    "dispatcher": lambda system: (
        f"--moe-token-dispatcher-type {DISPATCHERS[system.experts.dispatcher]}"
    ),
    "ep_overlap": lambda system: EP_OVERLAPS.get(system.experts.ep_overlap),
    "delayed_wgrad": lambda system: "--delay-wgrad-compute" * system.experts.delayed_wgrad,
    "cuda_graphs": _graphs,
    "optimizer_on_host": lambda system: (
        "--optimizer-cpu-offload --use-precision-aware-optimizer" * system.host.optimizer_on_host
    ),
    "vocab_multiple": lambda system: (
        f"--make-vocab-size-divisible-by {system.loss.vocab_multiple}"
        * (system.loss.vocab_multiple != VOCAB_MULTIPLE)
    ),
    "rank_order": lambda system: RANK_ORDERS.get(system.parallel.rank_order),
}
"""The option for each fact: empty if Megatron-LM's default equals it, None if no option does."""
POLICY = ("fused_swiglu", "param_bytes")
"""Facts that are set by the options of the policy and of the precision."""


def stack_words(problem: Problem) -> list[str]:
    """The options for the facts of the stack that have an effect in a job."""
    useful = _useful(problem)
    kernel = problem.system.attention_on(problem.cluster.generation)
    system = with_facts(problem.system, attention=kernel, cudnn_first=False)
    given = (words(system) for fact, words in OPTIONS.items() if useful.get(fact, True))
    return list(dict.fromkeys(words for words in given if words))


def _useful(problem: Problem) -> dict[str, bool]:
    """Whether a fact has an effect in a job; facts that are not listed always have one."""
    lay, model, system = problem.layout, problem.workload.model, problem.system
    peers, stage = lay.dp * lay.cp > 1, lay.zero_stage if lay.state_shards > 1 else 0
    exchanges = lay.ep > 1 and lay.num_micro_batches > 1
    nodes = lay.gpus > problem.cluster.gpus_per_node
    return {
        "attention": problem.attention == "flash",
        "rope": model.position == "rope" and not system.kernels.compiled,
        "norm": model.norm == "rmsnorm" or model.norm_in_fp32,
        "reduce_bytes": peers,
        "tp_overlap": lay.tp > 1,
        "p2p_overlap": lay.pp > 1,
        "reduce_overlap": peers and (lay.pp == 1 or stage < 2),
        "gather_overlap": stage > 0,
        "bucket_bytes": system.zero.reduce_overlap and peers and stage < 2,
        "cp_kind": lay.cp > 1,
        "dispatcher": lay.ep > 1,
        "ep_overlap": exchanges,
        "delayed_wgrad": exchanges,
        "rank_order": nodes and sum(d > 1 for d in (lay.tp, lay.cp, lay.dp, lay.pp)) > 1,
    }


def facts_with_options(problem: Problem) -> set[str]:
    """The facts that options can set, or that Megatron-LM's defaults equal."""
    given = {fact for fact, words in OPTIONS.items() if words(problem.system) is not None}
    gathered = {"gather_bytes"} if problem.workload.fp8_params else set[str]()
    return {*POLICY, *given, *gathered}


def expert_words(layout: Layout, work: Workload) -> list[str]:
    if work.model.experts is None:
        return []
    factor, padded = work.capacity_factor, work.expert_padding == "capacity"
    return [
        *([f"--moe-expert-capacity-factor {factor:g}"] if factor else []),
        *(["--moe-pad-expert-input-to-capacity"] if padded else []),
        f"--expert-model-parallel-size {layout.ep}",
        f"--expert-tensor-parallel-size {layout.expert_tp}",
        "--moe-grouped-gemm",
    ]


RECIPES = {name: word for word, name in MEGATRON.items()}


def recipe_words(work: Workload) -> list[str]:
    """The options for the recipe of quantised linears. Recipes with one scale per tensor quantise
    gradients in another format (hybrid: e4m3, but e5m2 for gradients)."""
    if work.recipe == "none":
        return []
    bits, one = (4, "e2m1") if work.recipe == "nvfp4" else (8, "e4m3")
    mixed = "hybrid" if work.recipe in ("fp8", "fp8-delayed") else one
    words = [f"--fp{bits}-format {mixed}", f"--fp{bits}-recipe {RECIPES[work.recipe]}"]
    words += ["--fp8-param-gather"] * work.fp8_params
    words += [f"--{REUSE}"] * (work.fp8_params and work.recipe == "mxfp8")
    if work.bf16_ends:
        words += ["--first-last-layers-bf16", *(f"--{end} {work.bf16_ends}" for end in ENDS)]
    return words


def partition_words(stages: tuple[Stage, ...], layout: Layout) -> list[str]:
    """The options for the layers of each chunk: none if all chunks are equal, the layers of the
    first and the last rank, or the text of all stages (Megatron-LM derives chunks from it)."""
    sizes = [len(stage.layers) for stage in stages]
    ahead = any(stage.prediction for stage in stages[:-1])
    if len(set(sizes)) > 1 or ahead or layout.stages:
        if layout.vpp > 1 or len(set(sizes[1:-1])) > 1 or not all(sizes) or ahead:
            return [f"--pipeline-model-parallel-layout {shlex.quote(stages_text(stages))}"]
        if len(set(sizes)) > 1:
            return [
                f"--decoder-first-pipeline-num-layers {sizes[0]}",
                f"--decoder-last-pipeline-num-layers {sizes[-1]}",
            ]
    if layout.vpp > 1:
        return [f"--num-layers-per-virtual-pipeline-stage {sizes[0]}"]
    return []


def model_words(model: Model) -> list[str]:
    words = [
        f"--num-layers {model.num_layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.num_heads}",
        *([] if model.latent else [f"--kv-channels {model.head_dim}"]),
        f"--vocab-size {model.vocab}",
        f"--position-embedding-type {POSITIONS.get(model.position, 'rope')}",
        f"--hidden-dropout {model.dropout}",
        f"--attention-dropout {model.dropout}",
    ]
    if model.max_positions:
        words.append(f"--max-position-embeddings {model.max_positions}")
    if model.num_kv_heads < model.num_heads:
        words.append(f"--group-query-attention --num-query-groups {model.num_kv_heads}")
    words += ["--normalization RMSNorm"] * (model.norm == "rmsnorm")
    if model.position == "rope" and model.rotary_share < 1.0:
        words.append(f"--rotary-percent {model.rotary_share}")
    words += ["--softmax-type learnable"] * model.attention_sinks
    words += ["--swiglu"] * (model.mlp == "swiglu")
    words += ["--untie-embeddings-and-output-weights"] * (not model.tied_embeddings)
    words += ["--disable-bias-linear"] * (not model.mlp_bias)
    words += ["--add-qkv-bias"] * (model.qkv_bias and not model.mlp_bias)
    words += [f"--mtp-num-layers {model.mtp_layers}"] * (model.mtp_layers > 0)
    return words + _latent(model) + _experts(model)


def _latent(model: Model) -> list[str]:
    given = model.latent
    if given is None:
        return []
    return [
        "--multi-latent-attention",
        *([f"--q-lora-rank {given.q_rank}"] if given.q_rank else []),
        f"--kv-lora-rank {given.kv_rank}",
        f"--qk-head-dim {given.nope}",
        f"--qk-pos-emb-head-dim {given.rope}",
        f"--v-head-dim {given.v}",
    ]


def _experts(model: Model) -> list[str]:
    experts = model.experts
    if experts is None:
        return []
    words = [
        f"--num-experts {experts.count}",
        f"--moe-router-topk {experts.active}",
        f"--moe-ffn-hidden-size {experts.ffn}",
        f"--moe-router-score-function {experts.router}",
    ]
    if experts.shared_ffn:
        words.append(f"--moe-shared-expert-intermediate-size {experts.shared_ffn}")
    if experts.aux_loss:
        words.append("--moe-router-load-balancing-type aux_loss")
        words.append(f"--moe-aux-loss-coeff {experts.aux_loss}")
    if experts.dense_layers:
        layers = [str(int(not model.is_dense(i))) for i in range(model.num_layers)]
        words.append(f"--moe-layer-freq {shlex.quote('[' + ','.join(layers) + ']')}")
    return words
