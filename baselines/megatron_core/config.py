"""A job as the configuration objects of Megatron-core."""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend

from baselines.common.interface import NotRunnable
from baselines.megatron_core.experts import expert_fields
from baselines.megatron_core.guards import has_transformer_engine
from baselines.megatron_core.limits import has_biases
from baselines.megatron_core.plan import MegatronCore
from rematbench.workload import Model
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec
from rematbench.worlds.torch.arithmetic import NORM_EPS
from rematbench.worlds.torch.parameters import AdamW

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
UPDATE = AdamW()


def transformer_config(job: PackageJob, policy: MegatronCore) -> TransformerConfig:
    """The model, its parallelism and its recomputation as a TransformerConfig; NotRunnable if
    Megatron-core refuses the configuration."""
    given = _fixed(job, policy) | policy.fields | job.settings
    kind = MLATransformerConfig if job.run.model.latent else TransformerConfig
    try:
        return kind(**given)
    except (ValueError, AssertionError, TypeError) as error:
        said = " ".join(str(error).split())
        raise NotRunnable(
            f"megatron_core: its configuration refuses this: {said or type(error).__name__}"
        ) from error


def _fixed(job: PackageJob, policy: MegatronCore) -> dict[str, Any]:
    """The fields that depend on the job, but not on what is recomputed or offloaded."""
    run = job.run
    lay, dtype = run.layout, DTYPES[run.precision]
    traced = run.world == "traced"
    unfused = run.stack.attention == "unfused" and has_transformer_engine(job)
    return {
        **_model(run.model),
        **_latent(run.model),
        **expert_fields(run, policy),
        "tensor_model_parallel_size": lay.tp,
        "pipeline_model_parallel_size": lay.pp,
        "virtual_pipeline_model_parallel_size": lay.vpp if lay.vpp > 1 else None,
        "context_parallel_size": lay.cp,
        "sequence_parallel": lay.sequence_parallel,
        "bf16": run.precision == "bf16",
        "perform_initialization": False,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bias_activation_fusion": policy.bias_activation_fusion,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "attention_softmax_in_fp32": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "batch_p2p_comm": policy.batch_p2p,
        "overlap_p2p_comm": policy.overlap_p2p,
        "deallocate_pipeline_outputs": lay.pp > 1,
        "calculate_per_token_loss": True,
        # A trace ends with the last backward, because coalesced collectives cannot be fake.
        "finalize_model_grads_func": None if traced else finalize_model_grads,
        # TransformerEngine chooses a kernel unless the job wants materialised scores.
        **({"attention_backend": AttnBackend.unfused} if unfused else {}),
    }


def _model(model: Model) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.num_kv_heads,
        "kv_channels": model.head_dim,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": NORM_EPS,
        "gated_linear_unit": model.gated,
        "activation_func": F.silu if model.mlp == "swiglu" else F.gelu,
        "add_bias_linear": has_biases(model),
        "add_qkv_bias": model.qkv_bias,
        "qk_layernorm": model.qk_norm,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.dropout,
    }


def _latent(model: Model) -> dict[str, Any]:
    """The fields of latent attention; empty without it."""
    given = model.latent
    if given is None:
        return {}
    return {
        "q_lora_rank": given.q_rank or None,
        "kv_lora_rank": given.kv_rank,
        "qk_head_dim": given.nope,
        "qk_pos_emb_head_dim": given.rope,
        "v_head_dim": given.v,
        "rope_type": "rope",
    }


def uses_distributed_optimizer(run: RunSpec) -> bool:
    return run.layout.zero_stage == 1 and run.layout.state_shards > 1


def ddp_config(run: RunSpec, policy: MegatronCore) -> DistributedDataParallelConfig:
    """The configuration of gradient buffers, which are fp32 for bf16 parameters."""
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.precision == "bf16",
        overlap_grad_reduce=policy.overlap_grad_reduce,
        use_distributed_optimizer=uses_distributed_optimizer(run),
        average_in_collective=False,
    )


def optimizer_config(run: RunSpec) -> OptimizerConfig:
    """AdamW with the hyperparameters of the project's own executor."""
    return OptimizerConfig(
        optimizer="adam",
        lr=UPDATE.lr,
        weight_decay=UPDATE.weight_decay,
        adam_beta1=UPDATE.beta1,
        adam_beta2=UPDATE.beta2,
        adam_eps=UPDATE.eps,
        clip_grad=0.0,
        params_dtype=DTYPES[run.precision],
        bf16=run.precision == "bf16",
        use_distributed_optimizer=uses_distributed_optimizer(run),
    )
