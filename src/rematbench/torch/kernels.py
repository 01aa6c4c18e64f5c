"""Each operator's arithmetic, forward and backward, on plain tensors with explicit saved ones.

Tensors are rows x columns.  Nothing is kept between a forward and its backward but what is passed
in: norms recompute their statistics, activation functions their derivative.  Statistics of bf16
tensors are computed in fp32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NORM_EPS = 1e-5
ROPE_BASE = 10_000.0
IGNORED = -100
"""A label that counts neither in the loss nor in its mean."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of statistics, losses and gradient sums beside this compute dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """x / rms(x) * weight."""
    y = x.to(wide(x.dtype))
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)
    return (y * weight).to(x.dtype)


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(input gradient, weight gradient in the wide dtype)."""
    g, y = grad.to(wide(x.dtype)), x.to(wide(x.dtype))
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)
    y = y * scale
    gw = g * weight
    dx = scale * (gw - y * (gw * y).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * y).sum(0)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """(x - mean) / std * weight + bias."""
    return F.layer_norm(x, x.shape[-1:], weight.to(x.dtype), bias.to(x.dtype), NORM_EPS)


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(input, weight and bias gradients); the last two in the wide dtype."""
    g, y = grad.to(wide(x.dtype)), x.to(wide(x.dtype))
    y = y - y.mean(-1, keepdim=True)
    scale = torch.rsqrt(y.square().mean(-1, keepdim=True) + NORM_EPS)
    y = y * scale
    gw = g * weight
    dx = scale * (gw - gw.mean(-1, keepdim=True) - y * (gw * y).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * y).sum(0), g.sum(0)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T (+ bias)."""
    return F.linear(x, weight, bias)


def add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """total += grad.T @ x, in the gradient buffer's dtype."""
    if total.dtype == x.dtype:
        total.addmm_(grad.t(), x)
    else:
        total.add_(grad.t() @ x)


def rope_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin) of every row's position: rows x head_dim / 2."""
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.to(torch.float64)[:, None] * ROPE_BASE**-powers
    return angles.cos().to(wide(dtype)), angles.sin().to(wide(dtype))


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotate each head's (first half, second half) pairs; the inverse is the backward."""
    rows, half = x.shape[0], cos.shape[-1]
    pairs = x.view(rows, -1, 2, half).to(cos.dtype)
    a, b = pairs[:, :, 0], pairs[:, :, 1]
    c, s = cos[:, None], -sin[:, None] if inverse else sin[:, None]
    return torch.stack((a * c - b * s, b * c + a * s), 2).view(rows, -1).to(x.dtype)


def activation(gate: Tensor, kind: str) -> Tensor:
    """SiLU for swiglu, GELU for geglu and gelu."""
    return F.silu(gate) if kind == "swiglu" else F.gelu(gate)


def activation_backward(grad: Tensor, gate: Tensor, kind: str) -> Tensor:
    """The gradient before the activation function."""
    if kind == "swiglu":
        return torch.ops.aten.silu_backward(grad, gate)  # type: ignore[no-any-return]
    return torch.ops.aten.gelu_backward(grad, gate)  # type: ignore[no-any-return]


def embed(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Rows of a vocabulary shard that starts at `first`; zero for tokens of other shards."""
    local = ids - first
    mine = (local >= 0) & (local < table.shape[0])
    rows = table[local.clamp(0, table.shape[0] - 1)]
    return rows * mine[:, None]


def embed_backward(total: Tensor, grad: Tensor, ids: Tensor, first: int) -> None:
    """Add each token's gradient to its row, if this shard holds it.  No shape depends on data (a
    boolean index would), so that fake tensors run it too."""
    local = ids - first
    mine = (local >= 0) & (local < total.shape[0])
    rows = local.clamp(0, total.shape[0] - 1)
    total.index_add_(0, rows, (grad * mine[:, None]).to(total.dtype))


def shard_labels(labels: Tensor, first: int, width: int) -> tuple[Tensor, Tensor]:
    """(column inside the shard, whether the shard holds the label)."""
    local = labels - first
    mine = (local >= 0) & (local < width)
    return local.clamp(0, width - 1), mine


def cross_entropy_backward(
    probs: Tensor, labels: Tensor, first: int, scale: float, dtype: torch.dtype
) -> Tensor:
    """(softmax - one-hot) x scale for the rows that count."""
    column, mine = shard_labels(labels, first, probs.shape[-1])
    grad = probs.clone()
    grad.scatter_add_(1, column[:, None], -mine[:, None].to(grad.dtype))
    grad.mul_(scale).masked_fill_((labels == IGNORED)[:, None], 0.0)
    return grad.to(dtype)
