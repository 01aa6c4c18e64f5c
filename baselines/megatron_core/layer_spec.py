"""The layer spec: Megatron-core's own modules, with this baseline's norm and core attentions.

Megatron-core itself has such a norm and such attentions only with TransformerEngine. If
TransformerEngine is installed (on GPUs), Megatron-core's spec for it is used unchanged.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from baselines.megatron_core.guards import has_transformer_engine
from baselines.megatron_core.plan import MegatronCore
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import RunSpec
from rematbench.worlds.torch.attention_backends import attend, attend_backward
from rematbench.worlds.torch.batch import slice_order
from rematbench.worlds.torch.groups import Group


class Norm:
    """torch's LayerNorm or RMSNorm in the parameters' dtype. Under sequence parallelism its
    gradients are summed over tensor-parallel ranks. (Megatron-core's wrapper of torch's norms
    refuses sequence parallelism.)"""

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        made: Any = kind(hidden_size, eps=eps, dtype=config.params_dtype)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made


class SdpaAttention(MegatronModule):  # type: ignore[misc]  # its base has no types
    """Causal core attention by torch's scaled_dot_product_attention."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        self.dropout = config.attention_dropout

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """seq x batch x heads x head_dim -> seq x batch x (heads head_dim)."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if k.shape[1] != q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        out: Tensor = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout
        )
        return out.permute(2, 0, 1, 3).flatten(2)


class UnequalAttention(MegatronModule):  # type: ignore[misc]  # its base has no types
    """Causal core attention where values have another head_dim than keys, which torch's flash
    operator on a CPU refuses. It saves the tensors that a flash kernel saves."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """seq x batch x heads x columns -> seq x batch x (heads columns of values)."""
        out: Tensor = _Unequal.apply(query, key, value)  # type: ignore[no-untyped-call]
        return out.flatten(2)


class _Unequal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *rows: Tensor) -> Tensor:
        q, k, v = (x.permute(1, 2, 0, 3) for x in rows)
        out, lse = attend(q, k, v, (0,))
        found = out.permute(2, 0, 1, 3).contiguous()
        ctx.save_for_backward(*rows, found, lse)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, rows, lse = ctx.saved_tensors
        q, k, v, out, grad = (x.permute(1, 2, 0, 3) for x in (query, key, value, rows, grads[0]))
        found = attend_backward(grad, q, k, v, out, lse, (0,))
        return tuple(x.permute(2, 0, 1, 3).contiguous() for x in found)


class GatheredAttention(MegatronModule):  # type: ignore[misc]  # its base has no types
    """Core attention under context parallelism, with the keys and values of all ranks gathered. The
    backward gathers them once more. A rank holds one slice from the head and one from the tail of
    each sequence."""

    def __init__(self, config: Any, *_: Any, pg_collection: Any = None, **__: Any) -> None:
        super().__init__(config=config)
        handle = pg_collection.cp
        self.group = Group(handle.size(), handle.rank(), handle)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """seq x batch x heads x head_dim -> seq x batch x (heads head_dim)."""
        out: Tensor = _Gathered.apply(query, key, value, self.group)  # type: ignore[no-untyped-call]
        return out.flatten(2)


def _whole(part: Tensor, group: Group) -> Tensor:
    """The rows of all ranks in the order of positions: batch x heads x seq x head_dim."""
    rows = part.contiguous()
    full = rows.new_empty((group.size * rows.shape[0], *rows.shape[1:]))
    torch.distributed.all_gather_into_tensor(full, rows, group=group.handle)
    slices = full.view(2 * group.size, rows.shape[0] // 2, *rows.shape[1:])
    return slices[slice_order(group.size)].flatten(0, 1).permute(1, 2, 0, 3)


def _own(grad: Tensor, group: Group) -> Tensor:
    """This rank's rows of the gradient of whole keys or values, summed over ranks."""
    rows = grad.permute(2, 0, 1, 3)
    slices = rows.reshape(2 * group.size, -1, *rows.shape[1:])
    back = torch.empty_like(slices)
    back[slice_order(group.size)] = slices
    whole = back.flatten(0, 1).contiguous()
    torch.distributed.all_reduce(whole, group=group.handle)
    return whole.chunk(group.size)[group.rank].clone()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: Group) -> Tensor:
        slices = (group.rank, 2 * group.size - 1 - group.rank)
        q = query.permute(1, 2, 0, 3)
        out, lse = attend(q, _whole(key, group), _whole(value, group), slices)
        rows = out.permute(2, 0, 1, 3).contiguous()
        ctx.save_for_backward(query, key, value, rows, lse)  # the projection saves the same rows
        ctx.group, ctx.slices = group, slices
        return rows

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        query, key, value, rows, lse = ctx.saved_tensors
        out = rows.permute(1, 2, 0, 3)
        grad = grads[0].permute(1, 2, 0, 3).contiguous()
        k, v = _whole(key, ctx.group), _whole(value, ctx.group)
        dq, dk, dv = attend_backward(grad, query.permute(1, 2, 0, 3), k, v, out, lse, ctx.slices)
        dk, dv = _own(dk, ctx.group), _own(dv, ctx.group)
        return dq.permute(2, 0, 1, 3).contiguous(), dk, dv, None


def layer_spec(job: PackageJob, policy: MegatronCore, first: int) -> tuple[Any, str]:
    """The spec of a chunk's layers, which begin with layer `first` of the model, and the name of
    their core attention."""
    run = job.run
    if has_transformer_engine(job):
        return get_gpt_layer_with_transformer_engine_spec(), "TransformerEngine"
    kinds = {dense: _local_spec(run, policy, dense=dense) for dense in (True, False)}
    count = run.model.num_layers // run.layout.num_chunks
    specs = [kinds[run.model.is_dense(first + i)][0] for i in range(count)]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm), kinds[True][1]


def _local_spec(run: RunSpec, policy: MegatronCore, *, dense: bool) -> tuple[Any, str]:
    rms, experts = run.model.norm == "rmsnorm", None if dense else run.model.experts
    spec = get_gpt_layer_local_spec(
        num_experts=experts.count if experts else None,
        moe_grouped_gemm="moe_act" in policy.modules,
        qk_layernorm=run.model.qk_norm,
        multi_latent_attention=run.model.latent is not None,
        normalization="RMSNorm" if rms else "LayerNorm",
    )
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm
    attention = spec.submodules.self_attention.submodules
    if run.model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    if run.model.latent is not None:
        attention.q_layernorm = attention.kv_layernorm = Norm
        attention.core_attention = UnequalAttention
        return spec, "torch's products as one operator, for values of other columns than keys"
    if run.layout.cp > 1:
        attention.core_attention = GatheredAttention
        return spec, "gathered keys and values, torch's flash operator"
    if run.stack.attention == "unfused":
        return spec, "megatron-core DotProductAttention (materialised scores)"
    attention.core_attention = SdpaAttention
    return spec, "torch scaled_dot_product_attention"


def mask_padding(projection: Any, vocab: int, rank: int) -> None:
    """Mask the logits of the vocabulary's padding in this rank's output projection, if the rank has
    any. Megatron-core itself counts them in the loss."""
    width = projection.output_size_per_partition
    own = max(0, min(width, vocab - rank * width))

    def masked(_: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        return _Masked.apply(logits, own), bias  # type: ignore[no-untyped-call]

    if own < width:
        projection.register_forward_hook(masked)


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, own: int) -> Tensor:
        ctx.mark_dirty(logits)
        logits[..., own:] = -torch.inf
        return logits

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
