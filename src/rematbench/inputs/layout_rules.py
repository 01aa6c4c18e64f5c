"""The rules that a layout must obey for a workload on a stack.  Each is a message if broken."""

from collections.abc import Iterator
from math import lcm

from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.load import load_system
from rematbench.inputs.part_rules import part_rules
from rematbench.inputs.stackfacts import other_versions
from rematbench.inputs.stages import prediction_rank
from rematbench.inputs.system import System
from rematbench.inputs.trained_rules import trained_rules
from rematbench.workload import Experts, Model, Workload

DEGREE_WORDS = {
    "tp": "tensor parallelism",
    "pp": "pipeline parallelism",
    "vpp": "interleaved pipelines",
    "cp": "context parallelism",
}
MOST_GPUS, MOST_TOKENS, MOST_PASSES = 1 << 16, 1 << 36, 1 << 18


def check_layout(layout: Layout, workload: Workload, system: System) -> None:
    """Raise LayoutError for the first broken rule."""
    for rule in _rules(layout, workload, system):
        raise LayoutError(rule)


def check_exchanges(layout: Layout, workload: Workload, system: System) -> None:
    """Raise LayoutError for the first broken rule among those that depend on the experts'
    dispatcher and on the overlap of their exchanges, for a layout that obeys all others."""
    for rule in _exchange_rules(layout, workload, system):
        raise LayoutError(rule)


def _exchange_rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    yield from _capacity_rules(work, system)
    yield from _ep_overlap_rules(lay, work, system)
    yield from _graph_rules(work, system)
    if lay.stages or work.model.mtp_layers:
        yield from _prediction_rules(lay, work, system)


def _graph_rules(work: Workload, system: System) -> Iterator[str]:
    """The rules of CUDA graphs, as Megatron-core asserts them (0.16.1,
    core/transformer/transformer_config.py).  With HybridEP the experts' token counts stay on the
    device (NVIDIA/Megatron-LM pull request 4247, paged stashing)."""
    kernels, model, said = system.kernels, work.model, "cuda_graphs:"
    parts, routed = kernels.cuda_graphs.split(","), model.experts is not None
    whole = kernels.captures_iteration or "moe" in parts
    sized = work.expert_padding != "none" or system.experts.dispatcher == "hybridep"
    if not routed and any(part.startswith("moe") for part in parts):
        yield f"{said} moe cuda graph is only supported for MoE"
    if "moe" in parts and "moe_router" in parts:
        yield f"{said} cuda_graph_scope must not contain both moe and moe_router"
    if "moe_preprocess" in parts and "moe_router" not in parts:
        yield f"{said} moe_preprocess cuda graph is only supported with moe_router cuda graph"
    if whole and routed and not sized:
        yield (
            f"{said} {kernels.cuda_graphs} needs known token counts of experts: give "
            "expert_padding, or the dispatcher hybridep, whose counts stay on the device"
        )
    if {"layer", "moe", "mlp"} & {*parts} and system.experts.ep_overlap != "none":
        yield (
            f"{said} scope on moe and mlp is not supported with ep_overlap "
            "(overlap_moe_expert_parallel_comm)"
        )
    if {"attn", "mlp", "moe"} & {*parts} and model.block != "sequential":
        yield f"{said} parts of layers with attention and MLP in parallel are not modelled"


def _prediction_rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    model = work.model
    rank, words = prediction_rank(model, lay), "prediction layers are not simulated"
    if rank is None:
        return
    inside, narrow = 0 < rank < lay.pp - 1, model.embedding_width > 0
    alone = lay.pp == 1 < lay.ep and system.experts.ep_overlap != "none"
    if model.mtp_layers > 1:
        yield f"{words} if the model has more than one"
    if not work.trains_all:
        yield f"{words} if only a part of the model trains"
    if model.block != "sequential":
        yield f"{words} with attention and MLP in parallel"
    if rank == 0 and lay.pp > 1:
        yield f"{words} on the first of several pipeline ranks (as in Megatron-core)"
    if narrow or lay.tp_columns > 1:
        yield f"{words} with a narrow embedding or with tp_columns"
    if model.tied_embeddings and inside:
        yield f"{words} on a rank between the ranks that hold tied embeddings"
    if alone:
        yield "pp must be larger than 1 when enabling ep_overlap with MTP layer (Megatron-core)"


def _size_rules(lay: Layout, work: Workload) -> Iterator[str]:
    """Upper bounds of sizes, which are still simulated in seconds, and the divisors of dp."""
    passes = lay.global_batch // lay.micro_batch // max(1, lay.replicas) * lay.num_chunks
    if lay.gpus > MOST_GPUS:
        yield f"{lay.gpus} GPUs exceed the limit of {MOST_GPUS}"
    if work.seq_len * lay.global_batch > MOST_TOKENS:
        tokens = work.seq_len * lay.global_batch
        yield f"seq_len x global_batch = {tokens} exceed the limit of {MOST_TOKENS} tokens per step"
    if passes > MOST_PASSES:
        yield f"micro-batches x pp x vpp = {passes} exceed the limit of {MOST_PASSES} passes"
    if lay.dp % lay.ulysses != 0:
        yield f"dp {lay.dp} must be a multiple of ulysses = {lay.ulysses} (ranks inside dp)"
    if lay.dp * lay.cp % lay.state_shards != 0:
        yield f"dp x cp = {lay.dp * lay.cp} must be a multiple of shard_degree = {lay.shard_degree}"


def _rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    yield from _size_rules(lay, work)
    yield from _batch_rules(lay)
    yield from _model_rules(lay, work)
    if work.seq_len % (lay.cp * (2 if lay.cp > 1 else 1)) != 0:
        parts = 2 * lay.cp
        yield f"seq_len {work.seq_len} must be a multiple of 2 x cp = {parts} (two slices per rank)"
    if lay.sp and work.seq_len % (lay.cp * lay.tp) != 0:
        yield f"seq_len {work.seq_len} must be a multiple of cp x tp = {lay.cp * lay.tp} (with sp)"
    if lay.cp > 1 and system.parallel.cp_kind == "ring" and any(work.model.attention_window):
        yield (
            f"cp = {lay.cp} on a ring does not support sliding windows (TransformerEngine); stacks "
            "with cp_kind: allgather do"
        )
    yield from _sample_rules(lay, work)
    yield from _ulysses_rules(lay, work, system)
    yield from _latent_rules(lay, work, system)
    yield from _expert_rules(lay, work, system)
    yield from trained_rules(lay, work, system)
    yield from _ep_overlap_rules(lay, work, system)
    yield from _graph_rules(work, system)
    yield from _stack_rules(lay, system)
    if lay.stages or work.model.mtp_layers:
        yield from _prediction_rules(lay, work, system)


def _stack_rules(lay: Layout, system: System) -> Iterator[str]:
    """The rules that the stack must support the degrees and the ZeRO stage."""
    stages, stage = ", ".join(map(str, system.accepts.zero_stages)), lay.zero_stage
    for name, words in DEGREE_WORDS.items():
        if getattr(lay, name) > 1 and not _has(system, name):
            yield (
                f"system {system.name} has no {words}, but {name} = {getattr(lay, name)}"
                f"{_other_version(system, name)}"
            )
    if system.host.parameters_on_host and "param_offload" not in system.accepts.features:
        yield f"system {system.name} cannot keep parameters in host memory (param_offload)"
    if system.host.parameters_on_host and stage != 3:
        yield f"parameters in host memory need zero_stage = 3, but zero_stage = {stage}"
    yield from _shard_rules(lay, system)
    if lay.has_peers and stage not in system.accepts.zero_stages:
        yield f"system {system.name} has no ZeRO stage {stage} (--zero: {stages})"
    if lay.pp > 1 and stage not in system.accepts.pipeline_zero_stages:
        yield (
            f"zero_stage {stage} with pp = {lay.pp}: in a pipeline, system {system.name} has only "
            f"ZeRO stages {', '.join(map(str, system.accepts.pipeline_zero_stages))}"
        )


def _has(system: System, degree: str) -> bool:
    if degree == "cp":
        return system.parallel.cp_kind != "none"
    return degree in system.accepts.model_parallel


def _other_version(system: System, degree: str) -> str:
    """A hint at shipped versions of the stack that support a degree above 1; empty if none does."""
    able = [name for name in other_versions(system.name) if _has(load_system(name), degree)]
    return f" (another version has it: {', '.join(able)})" if able else ""


def _shard_rules(lay: Layout, system: System) -> Iterator[str]:
    degree = lay.shard_degree
    hybrid = 0 < degree < lay.dp * lay.cp
    if hybrid and "hybrid_sharding" not in system.accepts.features:
        yield f"system {system.name} has no hybrid sharding (HSDP), but shard_degree = {degree}"
    if hybrid and (degree == 1 or lay.zero_stage == 0):
        nothing = f"shard_degree {degree} with zero_stage {lay.zero_stage} shards nothing"
        yield f"{nothing}: give zero_stage 0, or a shard_degree of at least 2"


def _sample_rules(lay: Layout, work: Workload) -> Iterator[str]:
    if not work.sample_len:
        if work.sample_spread:
            yield "sample_spread needs a sample_len above 0"
        return
    if work.document_len or work.seq_len % 4:
        yield (
            "sample_len needs a seq_len that is a multiple of 4, and cannot be combined with "
            "document_len"
        )
    if lay.tp * lay.cp * lay.pp > 1:
        yield "sample_len with tp, cp or pp above 1 is not modelled"


def _ulysses_rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    degree = lay.ulysses
    kv_heads = max(1, work.model.num_kv_heads // lay.tp)
    parts = degree * (lay.tp if lay.sp else 1)
    if degree > 1 and lay.cp > 1:
        yield from _nested_rules(lay, work, system, kv_heads)
        return
    if degree > 1 and "ulysses" not in system.accepts.features:
        yield f"system {system.name} has no Ulysses all-to-all, but ulysses = {degree}"
    if degree > 1 and work.seq_len % parts != 0:
        yield f"seq_len {work.seq_len} must be a multiple of ulysses (x tp with sp) = {parts}"
    if max(kv_heads, degree) % min(kv_heads, degree) != 0:
        yield f"{kv_heads} KV heads per rank and ulysses = {degree}: one must divide the other"


def _nested_rules(lay: Layout, work: Workload, system: System, kv_heads: int) -> Iterator[str]:
    """The rules of an all-to-all inside context parallelism: whole KV heads; no packed sequences,
    sliding windows or ALiBi (TransformerEngine, a2a+p2p in context_parallel.py)."""
    degree, ranks = lay.ulysses, lay.cp * lay.ulysses
    parts = ranks * lcm(2, lay.tp if lay.sp else 1)
    shared = f", and tp = {lay.tp} equal parts with sp" if lay.sp and lay.tp > 1 else ""
    refused = {
        "packed documents": work.packed,
        "sliding windows": any(work.model.attention_window),
        "ALiBi": work.model.position == "alibi",
    }
    if "ulysses_in_cp" not in system.accepts.features:
        words = f"system {system.name} has no Ulysses inside context parallelism"
        yield f"{words}, but cp = {lay.cp} with ulysses = {degree}"
    if work.seq_len % parts != 0:
        yield (
            f"seq_len {work.seq_len} must be a multiple of {parts}: each of cp x ulysses = {ranks} "
            f"ranks takes two slices{shared}"
        )
    if kv_heads % degree != 0:
        yield f"{kv_heads} KV heads per rank must be a multiple of ulysses = {degree} inside cp"
    for words, holds in refused.items():
        if holds:
            yield f"Ulysses inside context parallelism does not support {words} (TransformerEngine)"


def _latent_rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    """The rules of latent attention, whose values have other columns than keys, in the words of
    TransformerEngine (context_parallel.py) and of DeepSpeed 0.19.8 (ulysses_sp.py).  Stacks with
    fused norms use TransformerEngine."""
    if work.model.latent is None:
        return
    words = "Context parallelism does not support MLA with cp_comm_type="
    gathered = system.parallel.cp_kind == "allgather" and system.kernels.norm == "fused"
    if lay.cp > 1 and gathered:
        yield f"cp = {lay.cp}: {words}'all_gather' (TransformerEngine)"
    if lay.ulysses > 1 and lay.cp == 1:
        yield (
            f"ulysses = {lay.ulysses} with latent attention: {words}'a2a' (TransformerEngine), and "
            "DeepSpeed's value input tensor does not match the required shape, the keys'"
        )


def _expert_rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    if work.model.experts is None:
        given = lay.ep > 1 or lay.etp is not None
        capacity = work.capacity_factor > 0 or work.expert_padding != "none"
        if given:
            yield f"ep = {lay.ep} and etp = {lay.expert_tp} need a model with experts"
        if capacity:
            yield "capacity_factor and expert_padding need a model with experts"
        if work.imbalance > 1:
            yield f"imbalance {work.imbalance:g} needs a model with experts"
    else:
        yield from _shares_of_experts(lay, work.model.experts, system)
        yield from _capacity_rules(work, system)


def _shares_of_experts(lay: Layout, experts: Experts, system: System) -> Iterator[str]:
    """The rules of expert parallelism, as in Megatron-LM (megatron/training/arguments.py,
    core/transformer/transformer_config.py, core/parallel_state.py)."""
    etp = lay.expert_tp
    ranks = lay.tp * lay.cp * lay.dp
    if lay.ep > 1 and "ep" not in system.accepts.model_parallel:
        yield f"system {system.name} has no expert parallelism, but ep = {lay.ep}"
    if ranks % (etp * lay.ep) != 0:
        yield f"tp x cp x dp = {ranks} must be a multiple of etp x ep = {etp} x {lay.ep}"
    if experts.count % lay.ep != 0:
        yield f"{experts.count} experts must be a multiple of ep = {lay.ep}"
    if experts.ffn % etp != 0:
        yield f"ffn {experts.ffn} of an expert must be a multiple of etp = {etp}"
    if experts.shared_ffn % lay.tp != 0:
        yield f"ffn {experts.shared_ffn} of the shared expert must be a multiple of tp = {lay.tp}"
    if lay.tp > 1 and not lay.sp:
        yield f"experts with tp = {lay.tp} need sequence parallelism (sp)"
    if lay.ulysses > 1:
        yield f"experts with ulysses = {lay.ulysses} are not modelled"
    if lay.shard_degree > 0 and lay.tp * lay.shard_degree % (etp * lay.ep) != 0:
        inside, spread = lay.tp * lay.shard_degree, f"etp x ep = {etp} x {lay.ep}"
        yield f"tp x shard_degree = {inside} must be a multiple of {spread} (spread in a replica)"


def _capacity_rules(work: Workload, system: System) -> Iterator[str]:
    """The rules of experts with a capacity, in Megatron-core's words (0.16.1,
    core/transformer/transformer_config.py)."""
    padded = work.expert_padding == "capacity"
    option = "moe_pad_expert_input_to_capacity"
    if padded and not work.capacity_factor:
        yield (
            "expert_padding without capacity_factor: moe_expert_capacity_factor must be set to "
            f"use {option}"
        )
    if padded and system.experts.dispatcher == "deepep":
        yield (
            "expert_padding with the dispatcher deepep: Flex token dispatcher with deepep backend "
            f"does not support {option}"
        )
    if padded and system.experts.dispatcher == "allgather":
        yield "experts padded to their capacity with the dispatcher allgather are not modelled"


def _ep_overlap_rules(lay: Layout, work: Workload, system: System) -> Iterator[str]:
    """The rules of experts' exchanges that overlap with another micro-batch, as Megatron-core
    asserts them (0.16.1, core/transformer/transformer_config.py)."""
    if system.experts.ep_overlap == "none":
        return
    option = "ep_overlap: overlap_moe_expert_parallel_comm is"
    if "ep_overlap" not in system.accepts.features:
        yield f"system {system.name} has no overlap of experts' exchanges (ep_overlap)"
    if lay.ep == 1:
        yield f"{option} only supported with expert model parallelism, but ep = 1"
    if lay.pp > 1 and lay.vpp == 1 and system.experts.ep_overlap == "interleaved":
        yield (
            "virtual_pipeline_model_parallel_size must be specified with ep_overlap over pipeline "
            f"stages, but pp = {lay.pp} and vpp = {lay.vpp}"
        )
    if system.experts.dispatcher == "allgather":
        yield f"{option} supported with alltoall/flex token dispatcher, but it is allgather"
    if work.precision not in ("bf16", "fp16"):
        yield f"{option} only supported with bf16 or fp16 model, but precision is {work.precision}"


def _batch_rules(lay: Layout) -> Iterator[str]:
    each, micro_batches = lay.replicas * lay.micro_batch, lay.num_micro_batches
    if lay.global_batch % max(each, 1) != 0:
        unit = f"replicas x micro_batch = {each}"
        yield f"global_batch {lay.global_batch} must be a multiple of {unit}"
    if lay.vpp > 1 and lay.pp == 1:
        yield f"vpp = {lay.vpp} needs pp > 1"
    if lay.vpp > 1 and micro_batches % lay.pp != 0:
        yield f"interleaved 1F1B: {micro_batches} micro-batches must be a multiple of pp = {lay.pp}"


def _document_rules(lay: Layout, work: Workload) -> Iterator[str]:
    """The rules of packed documents, each of which context parallelism cuts into 2 x cp slices, as
    TransformerEngine's variable-length attention does."""
    length = work.document_len
    if length > work.seq_len:
        yield f"document_len {length} must be at most seq_len = {work.seq_len}"
    if work.packed and lay.cp > 1 and length < 2 * lay.cp:
        yield f"document_len {length} must be at least 2 x cp = {2 * lay.cp} (two slices per rank)"


def _model_rules(lay: Layout, work: Workload) -> Iterator[str]:
    model = work.model
    yield from _document_rules(lay, work)
    yield from part_rules(lay, work)
    if model.position == "learned" and model.max_positions < work.seq_len:
        positions = f"{model.max_positions} learned positions of {model.name}"
        yield f"seq_len {work.seq_len} exceeds the {positions}"
    if model.num_layers < lay.num_chunks and not lay.stages:
        yield f"{model.num_layers} layers cannot fill pp x vpp = {lay.num_chunks} chunks"
    if model.num_heads % (lay.tp * lay.ulysses) != 0:
        yield f"{model.num_heads} heads must be a multiple of tp x ulysses = {lay.tp * lay.ulysses}"
    if max(model.num_kv_heads, lay.tp) % min(model.num_kv_heads, lay.tp) != 0:
        yield f"{model.num_kv_heads} KV heads and tp = {lay.tp}: one must divide the other"
    if model.expert_layers < model.num_layers and model.ffn % lay.tp != 0:
        yield f"ffn {model.ffn} must be a multiple of tp = {lay.tp}"


def unmodelled_of_experts(model: Model, system: System) -> str:
    """The feature of the stack or the model that is not modelled with experts; empty if none."""
    refused = {
        f"the experts of system {system.name}": "ep" not in system.accepts.model_parallel,
        "reduce buckets that are allocated whole": system.zero.whole_buckets,
        "parameters that are updated as one tensor": system.states.flat_step,
        "attention and MLP in parallel": model.block != "sequential",
    }
    return next((name for name, is_so in refused.items() if model.experts and is_so), "")
