"""The models and layouts that Megatron-core 0.16.1 refuses or runs wrongly, or that this project
does not run with it, each with the reason."""

from rematbench.workload import Model
from rematbench.worlds.packages.limits import NOT_RUN, QUANTISED, Reason, Setup


def has_biases(model: Model) -> bool:
    """Whether every linear has a bias (`add_bias_linear`)."""
    return model.qkv_bias and model.proj_bias and model.mlp_bias


def of_model(setup: Setup) -> list[Reason]:
    model, features = setup.model, setup.special_features
    some = model.proj_bias or model.mlp_bias
    return [
        (
            some and not has_biases(model),
            "biases of some linears only (add_bias_linear is for all)",
        ),
        (model.position == "alibi", "ALiBi positions are not in megatron-core"),
        (model.post_norm, "post-norms are not in the GPT layer spec"),
        *((words not in TRACED_HERE, f"{words} {_said(words)}") for words in features),
        *_experts(setup),
        *_latent(setup),
        (any(model.attention_window), "sliding-window attention needs TransformerEngine"),
        (setup.work.document_len > 0, "packed documents need TransformerEngine"),
        (
            model.attention_soft_cap != 0 or model.logit_soft_cap != 0,
            "soft caps are not in megatron-core",
        ),
        (model.mlp == "geglu", "geglu: its fused function is the tanh approximation"),
        (
            setup.work.precision not in ("fp32", "bf16"),
            f"precision {setup.work.precision} (fp32 and bf16 run)",
        ),
    ]


TRACED_HERE = ("experts", "latent attention")
"""Features that Llama's and GPT's layers lack and that this baseline traces."""
HAVE_OPTIONS = (
    *("rotary positions on a part of the heads", "no positions", "attention sinks"),
    *("layers that predict more tokens", "sparse attention", QUANTISED),
)
"""Features of a layer for which Megatron-LM has an option, but which this baseline does not run."""


def _said(words: str) -> str:
    return f"({NOT_RUN}" if words in HAVE_OPTIONS else "(no option of megatron-core)"


def _experts(setup: Setup) -> list[Reason]:
    """Reasons against experts: features that are not run here, and two cases in which 0.16.1
    computes the right loss and wrong gradients."""
    model, lay, experts = setup.model, setup.layout, setup.model.experts
    if experts is None:
        return []
    return [
        (model.mlp_bias, "biases of experts (not run here)"),
        (model.mlp != "swiglu", f"experts with {model.mlp} (not run here)"),
        (experts.router_bias, "a bias of the router (not run here)"),
        (experts.shared_gate, "a gate of the shared expert (not run here)"),
        (experts.groups > 1, "groups of experts (not run here)"),
        (setup.work.drops_tokens, "a capacity of experts without padding (not run here)"),
        (
            experts.aux_loss > 0 and lay.tp > 1,
            "an auxiliary loss under tp: with --calculate-per-token-loss 0.16.1 scales its gradient"
            f" by one rank's tokens, which makes it 1/tp of the right one ({NOT_RUN}",
        ),
        (
            lay.tp > 1 and lay.ep == 1 and lay.expert_tp == 1,
            "tp with ep 1 and etp 1: 0.16.1 does not sum the gradients of experts over tp, "
            "although the loss is right; set etp = tp, or ep above 1",
        ),
    ]


def _latent(setup: Setup) -> list[Reason]:
    """Reasons against latent attention: features that are not run here, and a case in which 0.16.1
    computes the right loss and wrong gradients."""
    model, lay = setup.model, setup.layout
    if model.latent is None:
        return []
    return [
        (
            lay.tp > 1,
            "latent attention under tp: the local spec of 0.16.1 gives the shared part of keys the "
            "gradient of this rank's heads only, although the loss is right",
        ),
        (lay.cp > 1, "latent attention under cp (not run here)"),
        (model.norm != "rmsnorm", "latent attention with LayerNorm (not run here)"),
        (model.qkv_bias, "biases of latent attention's projections (no option of megatron-core)"),
        (setup.attention == "unfused", "unfused latent attention (not run here)"),
    ]


def of_layout(setup: Setup) -> list[Reason]:
    lay, model = setup.layout, setup.model
    return [
        (lay.zero_stage > 1, f"zero_stage {lay.zero_stage} is Megatron-FSDP, not run here"),
        (
            lay.state_shards < lay.dp * lay.cp,
            "hybrid sharding (num_distributed_optimizer_instances is not run here)",
        ),
        (lay.ulysses > 1, "Ulysses needs TransformerEngine (cp_comm_type a2a)"),
        (model.num_kv_heads % lay.tp != 0, "KV heads replicated over tp"),
        (
            lay.cp > 1 and setup.attention == "unfused",
            "unfused attention under context parallelism",
        ),
        (lay.pp > 1 and lay.vpp > 1 and lay.num_micro_batches % lay.pp != 0,
         "the interleaved schedule needs a multiple of pp micro-batches"),
    ]  # fmt: skip
