"""Checks of the facts of a model, cluster or stack.  Every error is one line.

Only impossible or contradictory facts are errors.  A fact without an effect is allowed, such as
`repeats_kv` with unfused attention, because a run may choose fused attention.
"""

import difflib
import re
from collections.abc import Iterable

from rematbench.host.declared import flat
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError, closest
from rematbench.inputs.system import System
from rematbench.workload import Experts, Model

FEATURES = (
    "activation_offload",
    "async_tp",
    "compile",
    "cuda_graphs",
    "ep_overlap",
    "ep_overlap_recompute",
    "hybrid_sharding",
    "optimizer_offload",
    "param_offload",
    "ulysses",
    "ulysses_in_cp",
)
DEGREES = ("tp", "cp", "dp", "pp")
WIRES = ("reduce_bytes", "gather_bytes", "host_grad_bytes")
"""Fields that give bytes per parameter of a tensor with a single dtype."""
DTYPES = (1, 2, 4)
"""Bytes per element of the dtypes used in training."""
GRADIENTS = (*DTYPES, 6)
"""Bytes per parameter of gradients: in one dtype, or in bf16 with an fp32 sum."""
CPU = "cpu"
"""The `generation` of clusters without GPUs, whose rates are not checked."""
GENERATIONS = {
    "ampere": re.compile(r"\bA(100|800)\b"),
    "hopper": re.compile(r"\bG?H(20|100|200|800)\b"),
    "blackwell": re.compile(r"\bG?B(100|200|300)\b"),
}
"""Patterns of GPU names, by the generation that they imply."""
UNCHECKED = "CHECK"
"""The placeholder that `doctor --write` leaves for the user to fill in."""
TPU = re.compile(r"\btpu", re.IGNORECASE)
SPELLING = 0.8
"""The similarity (difflib's ratio) from which an unknown generation counts as a misspelt known
one."""
PLAUSIBLE: dict[str, tuple[float, float, str]] = {
    "peak_flop_per_s": (1e13, 1e17, "FLOP/s of a GPU"),
    "fp32_flop_per_s": (1e11, 1e17, "FLOP/s of a GPU"),
    "tf32_flop_per_s": (1e11, 1e17, "FLOP/s of a GPU"),
    "fp64_flop_per_s": (1e10, 1e17, "FLOP/s of a GPU"),
    "hbm_bytes": (2**32, 2**41, "bytes of a GPU"),
    "hbm_bytes_per_s": (1e11, 1e14, "bytes/s of a GPU's memory"),
    "nvlink_bytes_per_s": (1e9, 1e13, "bytes/s between GPUs, one direction"),
    "nics_per_node": (1, 64, "NICs of a node"),
    "nic_bytes_per_s": (1e8, 1e12, "bytes/s of a NIC"),
    "pcie_bytes_per_s": (1e9, 1e12, "bytes/s between GPU and host, one direction"),
    "dram_bytes_per_s": (1e9, 1e13, "bytes/s of a socket's memory"),
    "numa_nodes": (1, 32, "sockets of a node"),
    "host_bytes": (2**33, 2**47, "bytes of a node's memory"),
}
"""The smallest and largest plausible value of each number of a GPU cluster, and its unit.  Numbers
outside have a wrong unit (TFLOP/s, GB, Gbit/s) or count the wrong thing (NICs of all nodes)."""
LOSS = (
    "unknown key: set fused_loss, or loss_in_place, loss_keeps_logits and logits_fp32; to tile "
    "the loss, use the method mst:head_chunks=N"
)


def check_model(model: Model, label: str) -> None:
    """ConfigError for sizes that no decoder can have."""
    if model.num_heads % model.num_kv_heads != 0:
        problem = (
            f"the number of heads ({model.num_heads}) must be a multiple of the number of "
            f"KV heads ({model.num_kv_heads})"
        )
        raise ConfigError(label, "num_kv_heads", problem)
    if model.experts is not None:
        _check_experts(model, model.experts, label)
    contradictions = {
        "pre_norm": (
            not model.pre_norm and (not model.post_norm or model.block != "sequential"),
            "false needs post_norm: true and block: sequential",
        ),
        "head_bias": (
            model.head_bias and model.tied_embeddings,
            "true with tied_embeddings: true is not modelled",
        ),
    }
    for key, (wrong, problem) in (contradictions | _of_latent(model)).items():
        if wrong:
            raise ConfigError(label, key, problem)
    if model.attention_window and len(model.attention_window) != model.num_layers:
        problem = (
            f"got {len(model.attention_window)} windows, expected one for each of the "
            f"{model.num_layers} layers"
        )
        raise ConfigError(label, "attention_window", problem)


def _of_latent(model: Model) -> dict[str, tuple[bool, str]]:
    """(whether it is wrong, problem) of each key that latent attention restricts; empty without
    latent attention."""
    given = model.latent
    if given is None:
        return {}
    sizes = f"{given.nope} + {given.rope} = {given.qk} with latent attention"
    index = (given.index_heads, given.index_dim, given.index_top)
    rotary = model.position == "rope" and model.rotary_share == 1.0
    return {
        "head_dim": (model.head_dim != given.qk, f"must be nope + rope = {sizes}"),
        "num_kv_heads": (model.num_kv_heads != model.num_heads, "must equal num_heads with MLA"),
        "block": (model.block != "sequential", f"{model.block} with MLA is not modelled"),
        "position": (not rotary, "must be rope with MLA, on the columns `rope`"),
        "qk_norm": (model.qk_norm, "true with MLA is not modelled"),
        "attention_sinks": (model.attention_sinks, "true with MLA is not modelled"),
        "latent": (any(index) and not all(index), "set all of index_heads, index_dim, index_top"),
    }


def _check_experts(model: Model, experts: Experts, label: str) -> None:
    layers = experts.dense_layers
    contradictions = {
        f"active {experts.active} exceeds count {experts.count}": experts.active > experts.count,
        f"{experts.count} experts do not form {experts.groups} groups": (
            experts.count % experts.groups != 0
        ),
        "shared_gate: true needs shared_ffn": experts.shared_gate and not experts.shared_ffn,
        f"dense_layers must be different layers below {model.num_layers}": (
            max(layers, default=-1) >= model.num_layers or len({*layers}) < len(layers)
        ),
        "every layer is dense": len(layers) >= model.num_layers,
        f"experts with block {model.block} are not modelled": model.block != "sequential",
    }
    for problem, wrong in contradictions.items():
        if wrong:
            raise ConfigError(label, "experts", problem)


def check_cluster(cluster: Cluster, label: str, generations: Iterable[str]) -> None:
    """ConfigError for facts of a cluster that contradict each other or are not plausible.
    `generations`: the GPU generations with constants."""
    _check_generation(cluster, label, tuple(generations))
    for key, (low, high, unit) in PLAUSIBLE.items() if cluster.generation != CPU else ():
        value = getattr(cluster, key)
        if value is not None and not low <= value <= high:
            problem = f"{value:g}: expected {unit}, from {low:.3g} to {high:.3g}"
            raise ConfigError(label, key, problem)
    if (cluster.non_torch_bytes or 0) >= cluster.hbm_bytes:
        raise ConfigError(label, "non_torch_bytes", "must be smaller than hbm_bytes")
    if cluster.pcie_gpus_per_link > cluster.gpus_per_node:
        problem = f"must not exceed the {cluster.gpus_per_node} GPUs of a node"
        raise ConfigError(label, "pcie_gpus_per_link", problem)
    if cluster.nvlink_domain is not None and cluster.nvlink_domain % cluster.gpus_per_node:
        problem = f"{cluster.nvlink_domain} GPUs are not whole nodes of {cluster.gpus_per_node}"
        raise ConfigError(label, "nvlink_domain", problem)


def _check_generation(cluster: Cluster, label: str, named: tuple[str, ...]) -> None:
    """ConfigError for a generation that contradicts the GPU's name or looks like a misspelt one of
    `named`, those with constants.  Other names are allowed, but such GPUs get no step time."""
    declared = cluster.generation
    if declared == UNCHECKED:
        problem = f"{UNCHECKED}: give the GPU's generation (with rates: {', '.join(named)})"
        raise ConfigError(label, "generation", problem)
    near = difflib.get_close_matches(declared, named, n=1, cutoff=SPELLING)
    if near and declared not in named:
        raise ConfigError(label, "generation", f"{declared!r}; did you mean {near[0]!r}?")
    if TPU.search(cluster.gpu) or TPU.search(declared):
        problem = f"{cluster.gpu!r}: a TPU, on which none of these stacks runs (PyTorch on GPUs)"
        raise ConfigError(label, "gpu", problem)
    for generation, gpus in GENERATIONS.items():
        if declared in GENERATIONS and declared != generation and gpus.search(cluster.gpu):
            problem = f"{declared}, but the GPU {cluster.gpu!r} is of generation {generation}"
            raise ConfigError(label, "generation", problem)


def check_system(system: System, label: str) -> None:
    """ConfigError for unknown features, for bytes that match no dtype, and for contradictions."""
    for feature in system.accepts.features:
        if feature not in FEATURES:
            hint = f"{closest(feature, FEATURES)} (allowed: {', '.join(FEATURES)})"
            raise ConfigError(label, "features", f"{feature!r}{hint}")
    if sorted(system.parallel.rank_order) != sorted(DEGREES):
        given = ", ".join(system.parallel.rank_order)
        problem = f"{given}: expected each of {', '.join(DEGREES)} once"
        raise ConfigError(label, "rank_order", problem)
    _check_bytes(system, label)
    for key, problem in contradictions(system):
        raise ConfigError(label, key, problem)


def _check_bytes(system: System, label: str) -> None:
    if not system.states.param_bytes:
        raise ConfigError(label, "param_bytes", "0: must be above 0")
    values = flat(system)
    for key in ("grad_bytes", *WIRES):
        allowed = GRADIENTS if key == "grad_bytes" else DTYPES
        if values[key] not in allowed:
            listed = ", ".join(map(str, allowed))
            problem = f"{values[key]} bytes match no training dtype (allowed: {listed})"
            raise ConfigError(label, key, problem)
    most = system.states.optimizer_bytes
    if system.states.late_state_bytes > most:
        problem = f"must not exceed optimizer_bytes, {most} bytes per parameter"
        raise ConfigError(label, "late_state_bytes", problem)


def contradictions(system: System) -> Iterable[tuple[str, str]]:
    """Yield (key, problem) of each pair of facts that contradict each other; the fact `key` depends
    on the other one."""
    kernels, zero = system.kernels, system.zero
    if kernels.norm_keeps_steps and system.norm_kernel != "eager":
        why = "compiled: true" if kernels.compiled else f"norm: {kernels.norm}"
        yield "norm_keeps_steps", f"true with {why}: only an eager norm keeps its steps"
    if system.loss.fused_loss and not system.loss.loss_in_place:
        yield "loss_in_place", "false with fused_loss: true, which writes its gradient in place"
    if system.experts.delayed_wgrad and system.experts.ep_overlap == "none":
        yield "delayed_wgrad", "true with ep_overlap: none, without which nothing is delayed"
    if zero.data_parallel == "fsdp" and zero.bucket_bytes:
        problem = "with data_parallel: fsdp, which reduces each unit separately (use 0)"
        yield "bucket_bytes", f"{zero.bucket_bytes} {problem}"
    hosts = system.host.host_gradients
    if max(system.accepts.pipeline_zero_stages) > 1 and (zero.whole_buckets or hosts):
        problem = "2 and 3 (FSDP2) exclude whole_buckets and host_gradients"
        yield "pipeline_zero_stages", problem
    if zero.prefetch_elements and (zero.data_parallel == "fsdp" or not zero.live_elements):
        problem = "needs data_parallel: zero and live_elements"
        yield "prefetch_elements", f"{zero.prefetch_elements}: {problem}"
