"""What Megatron-core would refuse late, run wrongly or never finish: refused first, by name."""

import importlib.util

from baselines.common.contract import NotRunnable
from baselines.megatron_core.plan import MegatronCore
from rematbench.baselines.process import Job
from rematbench.record import RunSpec
from rematbench.workload import Model

NORM_OR_QKV = {"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"}


def check(job: Job, policy: MegatronCore) -> None:
    """Raise NotRunnable with the first reason."""
    run = job.run
    for broken, reason in (
        *_model(run),
        *_layout(run),
        *_pipeline(job, policy),
        *_policy(run, policy),
        *(_with_transformer_engine(run, policy) if has_transformer_engine(job) else []),
    ):
        if broken:
            raise NotRunnable(f"megatron_core: {reason}")
    if job.run.world == "executed" and run.model.dropout > 0:
        raise NotRunnable(
            "megatron_core: dropout has no common stream of random numbers to compare"
        )


def has_transformer_engine(job: Job) -> bool:
    """Whether a job runs on TransformerEngine's layers: on GPUs, where it is installed."""
    there = importlib.util.find_spec("transformer_engine") is not None
    return there and job.device == "cuda" and job.run.world == "executed"


def _with_transformer_engine(run: RunSpec, policy: MegatronCore) -> list[tuple[bool, str]]:
    inside = {"attn_norm", "mlp_norm"} & set(policy.offload_modules)
    norms = policy.recompute == "selective" and "layernorm" in policy.modules
    return [
        (
            run.precision == "fp32",
            "fp32 on TransformerEngine, whose fp32 products are TF32 and whose attention has no "
            "fp32 but the quadratic one",
        ),
        (
            norms or bool(inside),
            "norms recomputed or offloaded on TransformerEngine, whose norms are part of the "
            "linear after them: 0.16.1 does nothing and says nothing",
        ),
    ]


def has_biases(model: Model) -> bool:
    """Whether every linear has a bias (`add_bias_linear`)."""
    return model.qkv_bias and model.proj_bias and model.mlp_bias


def _model(run: RunSpec) -> list[tuple[bool, str]]:
    model = run.model
    some = model.proj_bias or model.mlp_bias
    return [
        (
            some and not has_biases(model),
            "biases of some linears only (add_bias_linear is for all)",
        ),
        (model.position == "alibi", "ALiBi positions are not in megatron-core"),
        (model.post_norm, "post-norms are not in the GPT layer spec"),
        (any(model.attention_window), "sliding-window attention needs TransformerEngine"),
        (
            model.attention_soft_cap != 0 or model.logit_soft_cap != 0,
            "soft caps are not in megatron-core",
        ),
        (model.mlp == "geglu", "geglu: its fused function is the tanh approximation"),
        (run.precision not in ("fp32", "bf16"), f"precision {run.precision} (fp32 and bf16 run)"),
    ]


def _layout(run: RunSpec) -> list[tuple[bool, str]]:
    lay, model = run.layout, run.model
    return [
        (lay.zero_stage > 1, f"zero_stage {lay.zero_stage} is Megatron-FSDP, not run here"),
        (lay.ulysses > 1, "Ulysses needs TransformerEngine (cp_comm_type a2a)"),
        (model.num_kv_heads % lay.tp != 0, "KV heads replicated over tp"),
        (
            model.num_layers % (lay.pp * lay.vpp) != 0,
            f"{model.num_layers} layers in pp x vpp = {lay.pp * lay.vpp} chunks: only even ones",
        ),
        (
            lay.cp > 1 and run.attention == "unfused",
            "unfused attention under context parallelism",
        ),
        (lay.pp > 1 and lay.vpp > 1 and lay.num_micro_batches % lay.pp != 0,
         "the interleaved schedule needs micro-batches % pp == 0"),
    ]  # fmt: skip


def _pipeline(job: Job, policy: MegatronCore) -> list[tuple[bool, str]]:
    lay, run_on_cpu = job.run.layout, job.device == "cpu" and job.run.world == "executed"
    return [
        (
            lay.vpp > 1 and lay.pp == 2 and policy.batch_p2p and job.run.world == "executed",
            "interleaving on pp 2 with batched p2p gives wrong gradients: both neighbours are one "
            "rank and messages are told apart by order only; set batch_p2p=false",
        ),
        (
            policy.overlap_grad_reduce and job.run.world == "traced",
            "overlap_grad_reduce on fake tensors (coalesced collectives have none)",
        ),
        (
            policy.overlap_p2p and run_on_cpu,
            "overlap_p2p over gloo gives wrong losses (seen on pp 2 interleaved)",
        ),
        (policy.batch_p2p and policy.overlap_p2p, "batch_p2p and overlap_p2p exclude each other"),
        (policy.overlap_p2p and lay.vpp == 1, "overlap_p2p is for the interleaved schedule"),
    ]


def _policy(run: RunSpec, policy: MegatronCore) -> list[tuple[bool, str]]:
    selective = policy.recompute == "selective"
    modules, moved = set(policy.modules), set(policy.offload_modules)
    per_chunk = run.model.num_layers // (run.layout.pp * run.layout.vpp)
    return [
        (
            selective and "mlp" in modules and has_biases(run.model),
            "selective recomputation of mlp with biases never ends in 0.16.1 without "
            "TransformerEngine; use a model without biases or recompute=full",
        ),
        (selective and not modules, "recompute=selective without modules"),
        (
            policy.recompute == "full" and policy.num_layers > per_chunk,
            f"num_layers {policy.num_layers} is more than a chunk's {per_chunk} layers",
        ),
        (moved == {"attn_proj"}, "offload_modules attn_proj alone (needs core_attn beside it)"),
        (
            bool(moved) and moved == NORM_OR_QKV,
            "all five offload_modules at once fail in 0.16.1; leave one out",
        ),
        (
            bool(moved) and policy.recompute == "full",
            "fine-grained offloading with full recomputation",
        ),
        (
            policy.bias_activation_fusion and run.model.mlp == "gelu" and run.world == "executed",
            "the fused GELU is the tanh approximation: another arithmetic than the other engines'",
        ),
    ]
