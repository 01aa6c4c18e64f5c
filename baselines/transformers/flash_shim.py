"""The shim: stand-ins for a GPU and for tensor values while a Transformers model is traced.

| part | what it replaces |
|---|---|
| flash | scaled_dot_product_attention: the kernel that a GPU would choose, not a CPU's kernel |
| flash_attn | flash_attention_2: a function in place of flash_attn_func, which needs a GPU |
| unpacked | a test of the mask's values, which fake tensors lack: each row is one sequence |

torch's scaled_dot_product_attention (SDPA) chooses a kernel by the device. On an Ampere or newer
GPU, in 16 bits, causal and without a mask, it runs a flash kernel, which saves q, k, v, the output
and the log-sum-exp of each row in fp32 (torch 2.13, `_scaled_dot_product_flash_attention`; the
cuDNN kernel saves the same). A CPU's kernel saves other layouts, and where a CPU has no kernel, it
computes all scores as a tensor. So one autograd function replaces the call: it saves the tensors of
the flash kernel, in the kernel's layouts. On real tensors the function also computes values, by
torch's own SDPA (the log-sum-exp stays empty, because nothing reads it).

A call with a mask runs another kernel; the mask has seq_len x seq_len elements.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.utils._pytree import tree_iter
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as flash_utils

from baselines.common.interface import NotRunnable
from baselines.common.meter import Meter
from baselines.transformers.saved import operator
from rematbench.worlds.torch.dispatch import DispatchMode

FLASH = "flash_attention_2"
_sdpa: Any = functional.scaled_dot_product_attention  # torch's own: `attend` replaces the name
LARGEST_HEAD = 256
"""Largest head_dim of torch's flash kernels, in elements."""


class Flash(torch.autograd.Function):
    """Causal attention of q (batch, heads, rows, head_dim); k and v may have fewer heads."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The output, stored as (batch, rows, heads, head_dim) like the kernel's output."""
        batch, heads, rows, _ = q.shape
        out = q.new_empty(batch, rows, heads, v.shape[-1]).transpose(1, 2)
        lse = q.new_empty(batch, heads, rows, dtype=torch.float32)
        if not isinstance(q, FakeTensor):
            _inside(_compute)(scale, (q, k, v), out)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of q, k and v. If k and v have fewer heads than q, their gradients are made
        for every query head and then summed, as in torch's kernel for grouped queries."""
        q, k, v, *_ = ctx.saved_tensors
        heads, groups = q.shape[1], k.shape[1]
        dq = torch.empty_like(q)
        dk, dv = _made(q, k.shape[-1]), _made(q, v.shape[-1])
        if not isinstance(q, FakeTensor):
            _inside(_compute_backward)(ctx.scale, (q, k, v), gradients[0], (dq, dk, dv))
        if heads > groups:
            dk, dv = _summed(dk, groups), _summed(dv, groups)
        return dq, dk, dv, None


def _made(q: Tensor, width: int) -> Tensor:
    """An empty gradient for every query head, in the kernel's memory layout."""
    batch, heads, rows, _ = q.shape
    return q.new_empty(batch, rows, heads, width).transpose(1, 2)


def _summed(part: Tensor, groups: int) -> Tensor:
    batch, heads, rows, width = part.shape
    return part.view(batch, groups, heads // groups, rows, width).sum(2)


def _inside(call: Callable[..., None]) -> Callable[..., None]:
    """A function that calls `call` without counting its storages, as if it were inside a kernel."""
    return call if Meter.counting is None else Meter.counting.without(call)


def _compute(scale: float, given: tuple[Tensor, ...], out: Tensor) -> None:
    out.copy_(_sdpa(*given, is_causal=True, scale=scale, enable_gqa=True))


def _compute_backward(
    scale: float, given: tuple[Tensor, ...], gradient: Tensor, into: tuple[Tensor, ...]
) -> None:
    """Fill the gradients of q, k and v; all three have as many heads as q."""
    heads = given[0].shape[1]
    with torch.enable_grad():
        full = [x.detach().repeat_interleave(heads // x.shape[1], 1) for x in given]
        leaves = [x.requires_grad_() for x in full]
        out = _sdpa(*leaves, is_causal=True, scale=scale)
    for target, found in zip(into, torch.autograd.grad(out, leaves, gradient), strict=True):
        target.copy_(found)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A replacement for torch.nn.functional.scaled_dot_product_attention that acts like a GPU's
    flash kernel. NotRunnable if a GPU would choose another kernel."""
    if attn_mask is not None:
        shape = " x ".join(str(n) for n in attn_mask.shape)
        raise NotRunnable(f"SDPA is given a mask of {shape}: no flash kernel takes one")
    if not is_causal:
        raise NotRunnable("SDPA is called without is_causal")
    if dropout_p:
        raise NotRunnable(f"attention with dropout {dropout_p:g} is not modelled")
    if max(query.shape[-1], value.shape[-1]) > LARGEST_HEAD:
        raise NotRunnable(f"head_dim {query.shape[-1]}: a flash kernel has {LARGEST_HEAD} at most")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise NotRunnable("SDPA is given fewer heads of keys than of queries, without enable_gqa")
    with operator("flash"):
        scaled = scale or query.shape[-1] ** -0.5
        found: Tensor = Flash.apply(query, key, value, scaled)  # type: ignore[no-untyped-call]
    return found


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    dropout_p: float = 0.0,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """A replacement for flash_attn_func of flash_attn 2.x, on (batch, rows, heads, head_dim). A
    window and a soft cap save no further tensors in the kernel. The values are wrong with either,
    because both arguments are ignored; the bytes are right."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return attend(q, k, v, None, dropout_p, causal, softmax_scale, True).transpose(1, 2)


_package = flash_utils._lazy_define_process_function(flash_attn_func)
_PARTS: dict[str, tuple[tuple[Any, str, Callable[..., Any]], ...]] = {
    "flash": ((functional, "scaled_dot_product_attention", attend),),
    "flash_attn": (
        (
            flash_utils,
            "lazy_import_flash_attention",
            lambda _: ((flash_attn_func, *[None] * 4), (_package, dict)),
        ),
    ),
    "unpacked": (
        (masking_utils, "find_packed_sequence_indices", lambda _: None),
        (flash_utils, "_is_packed_sequence", lambda *_: False),
    ),
}


@contextmanager
def installed(kernel: str, *, fake: bool) -> Iterator[tuple[str, ...]]:
    names = {"sdpa": ("flash",), FLASH: ("flash_attn",)}.get(kernel, ())
    parts = (*names, "unpacked") if fake else names
    with ExitStack() as stack:
        for owner, name, answer in (entry for part in parts for entry in _PARTS[part]):
            stack.enter_context(patch.object(owner, name, answer))
        yield parts


class NoSquares(DispatchMode):
    """Raise NotRunnable at the first tensor with two dimensions of size `rows`, the traced sequence
    length.  No other dimension of the model may have this size."""

    def __init__(self, rows: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows = rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, Tensor) and tuple(item.shape).count(self.rows) > 1:
                shape = " x ".join("seq_len" if n == self.rows else str(n) for n in item.shape)
                raise NotRunnable(f"{func} makes a tensor of {shape} beside a flash kernel")
        return result
