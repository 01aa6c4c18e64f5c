"""The arithmetic of each operator, forward and backward, on plain tensors.

Tensors are rows x columns. A backward gets everything that it needs as an argument: norms recompute
their statistics, activation functions their derivative. Statistics of bf16 tensors are computed in
fp32.

On a GPU, norms and fp32 sums of weight gradients use torch's fused kernels, which need no memory
beyond their result. A CPU has no such kernels, so the operators are written out for it. Traces
(meta tensors) behave like GPUs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0
_aten = torch.ops.aten
IGNORED = -100
"""The label of tokens that neither the sum nor the mean of the loss includes."""
PARTS = 8


def kept(rows: Tensor, columns: Tensor, rate: float) -> Tensor:
    """The mask of the elements that dropout keeps: a share of 1 - rate, evenly spread."""
    places = rows[:, None].double() * 0.6180339887 + columns * 0.7548776662
    return (places.frac() >= rate).to(torch.uint8)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, losses and gradient sums for this compute dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def fused(x: Tensor) -> bool:
    """Whether torch's fused kernels are used for a tensor: on every device except a CPU."""
    return x.device.type != "cpu"


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight."""
    if fused(x):
        if x.is_meta:
            return torch.empty_like(x)
        return _aten._fused_rms_norm(x, x.shape[-1:], weight, NORM_EPS)[0]  # type: ignore[no-any-return]
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)
    return (y * weight).to(x.dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(input gradient, weight gradient); on a CPU the weight gradient is in the wide dtype."""
    if fused(x):
        return fused_rms_norm_backward(grad, x, weight)
    g, y = _wide_copies(grad, x)
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)
    y.mul_(scale)
    dw = (g * y).sum(0)
    g.mul_(weight)
    dx = g.sub_(y.mul_((g * y).mean(-1, keepdim=True))).mul_(scale)
    return dx.to(x.dtype), dw


def _wide_copies(*tensors: Tensor) -> list[Tensor]:
    """Copies in the wide dtype, on which a CPU computes in place to need few wide tensors."""
    return [x.to(wide(x.dtype), copy=True) for x in tensors]


def fused_rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(input gradient, weight gradient) by torch's kernel, the latter in the weight's dtype."""
    if x.is_meta:
        return torch.empty_like(x), torch.empty_like(weight)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide(x.dtype))
    scale = norm.square_().div_(x.shape[-1]).add_(NORM_EPS).rsqrt_()
    dx, dw = _aten._fused_rms_norm_backward(grad, x, x.shape[-1:], scale, weight, [True, True])
    return dx, dw


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) / std * weight + bias."""
    if x.is_meta and fused(x):
        return torch.empty_like(x)
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), NORM_EPS)


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(input, weight and bias gradients); on a CPU the last two are in the wide dtype."""
    if fused(x):
        return fused_layer_norm_backward(grad, x, weight)
    g, y = _wide_copies(grad, x)
    y.sub_(y.mean(-1, keepdim=True))
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)
    y.mul_(scale)
    dw, db = (g * y).sum(0), g.sum(0)
    g.mul_(weight)
    means = g.mean(-1, keepdim=True), (g * y).mean(-1, keepdim=True)
    dx = g.sub_(means[0]).sub_(y.mul_(means[1])).mul_(scale)
    return dx.to(x.dtype), dw, db


def fused_layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(input, weight and bias gradients) by torch's kernel. A second forward is the cheapest call
    that gives both statistics."""
    if x.is_meta:
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
    shape = x.shape[-1:]
    _, mean, scale = _aten.native_layer_norm(x, shape, weight, weight, NORM_EPS)
    bias, every = weight, [True, True, True]  # the kernel reads only the dtype of a bias
    dx, dw, db = _aten.native_layer_norm_backward(grad, x, shape, mean, scale, weight, bias, every)
    return dx, dw, db


def split_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    columns: int,
    total: Callable[[Tensor], None],
) -> Tensor:
    """RMSNorm (LayerNorm if there is a bias) of rows whose columns are split over several ranks;
    `total` sums a tensor over these ranks in place."""
    y, _ = _normed(x, bias is not None, columns, total)
    return y * weight if bias is None else y * weight + bias


def _normed(
    x: Tensor, centred: bool, columns: int, total: Callable[[Tensor], None]
) -> tuple[Tensor, Tensor]:
    """(the rank's columns of the normed rows, the factor of each row)."""
    sums = torch.stack([x.square().sum(-1), *([x.sum(-1)] if centred else [])]).div_(columns)
    total(sums)
    mean = sums[1][:, None] if centred else torch.zeros_like(sums[0][:, None])
    scale = torch.rsqrt(sums[0][:, None] - mean.square() + NORM_EPS)
    return (x - mean) * scale, scale


def split_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    centred: bool,
    columns: int,
    total: Callable[[Tensor], None],
) -> tuple[Tensor, Tensor, Tensor]:
    """(input, weight and bias gradients) of `split_norm`, for this rank's columns."""
    y, scale = _normed(x, centred, columns, total)
    g = grad * weight
    sums = torch.stack([(g * y).sum(-1), *([g.sum(-1)] if centred else [])]).div_(columns)
    total(sums)
    g = g - y * sums[0][:, None] - (sums[1][:, None] if centred else 0.0)
    return g * scale, (grad * y).sum(0), grad.sum(0)


def add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """total += grad.T @ x, in the gradient buffer's dtype. On a GPU the sum is inside the product;
    on a CPU the product is made in PARTS, so that its temporary stays small."""
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x)
    elif fused(x) and hasattr(_aten.addmm, "dtype_out"):
        if not x.is_meta:  # a trace makes no tensor here
            _aten.addmm.dtype_out(total, grad.t(), x, total.dtype, out=total)
    else:
        for some, rows in zip(total.chunk(PARTS), grad.t().chunk(PARTS), strict=True):
            some.add_(rows @ x)


def rope_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the position of every row: rows x head_dim / 2 each."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * ROPE_BASE**-powers
    return angles.cos().to(wide(dtype)), angles.sin().to(wide(dtype))


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate the (first half, second half) pairs of each head; the inverse is the backward."""
    rows, half = x.shape[0], cos.shape[-1]
    pairs, out = x.view(rows, -1, 2, half), torch.empty_like(x)
    turned, a, b = out.view(pairs.shape), pairs[:, :, 0], pairs[:, :, 1]
    c, s = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    turned[:, :, 0] = (a * c).sub_(b * s)  # this needs only two wide halves besides the result
    turned[:, :, 1] = (b * c).add_(a * s)
    return out


def activation(gate: Tensor, kind: str) -> Tensor:
    """SiLU for swiglu, GELU for geglu and gelu."""
    return F.silu(gate) if kind == "swiglu" else F.gelu(gate)


def activation_backward(grad: Tensor, gate: Tensor, kind: str) -> Tensor:
    if kind == "swiglu":
        return torch.ops.aten.silu_backward(grad, gate)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu_backward(grad, gate)  # type: ignore[no-any-return]


def embed(ids: Tensor, table: Tensor, first: int, *, whole: bool) -> Tensor:
    """Rows of a vocabulary shard that starts at `first`; zero for tokens of other shards. `whole`:
    the shard is the whole vocabulary."""
    if whole:
        return table[ids]
    local, mine = in_shard(ids, first, table.shape[0])
    return table[local] * mine[:, None]


def embed_backward(total: Tensor, grad: Tensor, ids: Tensor, first: int, *, whole: bool) -> None:
    """Add each token's gradient to its row, if this shard holds the row. No shape depends on data
    (a boolean index would), so that fake tensors can run this function too."""
    if whole:
        total.index_add_(0, ids, grad.to(total.dtype))
        return
    local, mine = in_shard(ids, first, total.shape[0])
    total.index_add_(0, local, (grad * mine[:, None]).to(total.dtype))


def in_shard(tokens: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """(row inside a vocabulary shard that starts at `first` and has `width` rows, whether the shard
    has the token), for each token."""
    local = tokens - first
    mine = (local >= 0) & (local < width)
    return local.clamp(0, width - 1), mine


def cross_entropy_backward(
    probs: Tensor, labels: Tensor, first: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits of a vocabulary shard: (softmax - one-hot) x scale, zero for
    ignored labels. It makes no wide copy of the softmax."""
    column, mine = in_shard(labels, first, probs.shape[-1])
    grad = torch.mul(probs, scale, out=probs.new_empty(probs.shape, dtype=dtype))
    at_label = probs.gather(1, column[:, None]).sub_(mine[:, None].to(probs.dtype)).mul_(scale)
    grad.scatter_(1, column[:, None], at_label.to(dtype))
    return grad.masked_fill_((labels == IGNORED)[:, None], 0.0)
