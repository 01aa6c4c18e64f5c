"""RMSNorm that saves the same tensors on a CPU as on a GPU.

On a CPU torch computes RMSNorm by several operators, which keep fp32 tensors of the input's size
alive. CUDA's kernels, one forward and one backward, save the input and 1/rms of each row.
"""

from typing import Any

import torch


@torch.library.custom_op("rematbench::rms_norm", mutates_args=())
def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the norm, 1/rms of each row). As one operator, its temporaries are not counted."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype), scale


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("rematbench::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    y, wide = x.float() * scale, grad.float()
    inner = wide * weight
    dx = scale * (inner - y * (inner * y).mean(-1, keepdim=True))
    return dx.to(x.dtype), (wide * y).flatten(0, -2).sum(0).to(weight.dtype)


@_rms_norm_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        y: torch.Tensor
        y, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *_rms_norm_backward(grads[0], *ctx.saved_tensors), None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension."""
    normed: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed
