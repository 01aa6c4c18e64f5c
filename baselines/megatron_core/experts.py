"""Experts of Megatron-core: their configuration, and the stand-ins that fake tensors need.

A fake tensor has no values, so the number of tokens that an expert receives cannot be read. The
stand-ins give every expert the same number, as a prediction does. No stand-in changes which tensors
are saved.
"""

from typing import Any

import numpy as np
import torch
from megatron.core.transformer.moe import grouped_gemm_util, token_dispatcher
from torch import Tensor

from baselines.megatron_core.plan import MegatronCore
from rematbench.workload import Experts
from rematbench.worlds.records.record import RunSpec
from rematbench.worlds.torch.dispatch import DispatchMode

ROUTER_DTYPE = "fp32"
"""Megatron-LM's advice for many experts (--moe-router-dtype)."""


def expert_fields(run: RunSpec, policy: MegatronCore) -> dict[str, Any]:
    """The fields of TransformerConfig for a model's experts; empty for a dense model."""
    model, layout, experts = run.model, run.layout, run.model.experts
    if experts is None:
        return {}
    grouped = policy.recompute == "selective" and "moe_act" in policy.modules
    return {
        "num_moe_experts": experts.count,
        "moe_router_topk": experts.active,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_shared_expert_intermediate_size": experts.shared_ffn or None,
        "moe_shared_expert_gate": experts.shared_gate,
        "moe_layer_freq": [int(not model.is_dense(i)) for i in range(model.num_layers)],
        "moe_router_score_function": experts.router,
        "moe_router_dtype": ROUTER_DTYPE,
        "moe_router_load_balancing_type": "aux_loss" if experts.aux_loss else "none",
        "moe_aux_loss_coeff": experts.aux_loss,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": grouped,
        "moe_expert_capacity_factor": run.capacity_factor or None,
        "moe_pad_expert_input_to_capacity": run.expert_padding == "capacity",
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.expert_tp,
        **({"moe_router_num_groups": experts.groups} if experts.groups > 1 else {}),
    }


def is_of_experts(parameter: Tensor) -> bool:
    """Whether a parameter belongs to an expert, so that its gradient is summed over fewer ranks."""
    return not getattr(parameter, "allreduce", True)


class _GroupedProduct(torch.autograd.Function):
    """The shapes of products of groups of rows with one matrix each; it saves both operands."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[2])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[Tensor, Tensor]:
        rows, matrices = ctx.saved_tensors
        return torch.empty_like(rows), torch.empty_like(matrices)


class _Products:
    @staticmethod
    def gmm(rows: Tensor, matrices: Tensor, _: Any, trans_b: bool = False) -> Tensor:
        assert not trans_b
        product: Tensor = _GroupedProduct.apply(rows, matrices)  # type: ignore[no-untyped-call]
        return product


class Selecting(DispatchMode):  # type: ignore[no-untyped-call]
    """Gives masked_select, whose number of results depends on values, the number that balanced
    experts have: `active` of every `count` elements of the mask."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.active, self.count = experts.active, experts.count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.masked_select.default:
            return func(*args, **(kwargs or {}))
        tensor, mask = args
        return tensor.new_empty(mask.numel() * self.active // self.count)


def _even_counts(dispatcher: Any, point: str, tokens_per_expert: Any) -> Any:
    """Set the dispatcher's counts on the host, at the point where it would copy them there."""
    if point != dispatcher.cuda_dtoh_point:
        return tokens_per_expert
    tp, ep, here = dispatcher.tp_size, dispatcher.ep_size, dispatcher.num_local_experts
    each = dispatcher.num_out_tokens // dispatcher.num_experts
    dispatcher.input_splits = dispatcher.output_splits = [each * here] * ep
    dispatcher.output_splits_tp = np.full(tp, each * here * ep)
    dispatcher.num_global_tokens_per_local_expert = np.full((tp * ep, here), each)
    return np.full(here, each * tp * ep)


def install_balance(experts: Experts) -> Selecting:
    """Install the stand-ins for fake tensors. Returns a mode that must be active during the
    step."""
    grouped_gemm_util.grouped_gemm = grouped_gemm_util.ops = _Products
    kind = token_dispatcher.MoEAlltoAllTokenDispatcher
    kind._maybe_dtoh_and_synchronize = _even_counts
    plain = kind.__init__

    def built(self: Any, *arguments: Any, **options: Any) -> None:
        plain(self, *arguments, **options)
        here = self.num_local_experts
        indices = np.arange(self.num_experts * self.tp_size)
        self.sort_input_by_local_experts = indices.reshape(-1, here).T.ravel()
        self.restore_output_by_local_experts = indices.reshape(here, -1).T.ravel()

    if getattr(kind, "_plain_init", None) is None:
        kind._plain_init, kind.__init__ = plain, built
    return Selecting(experts)
