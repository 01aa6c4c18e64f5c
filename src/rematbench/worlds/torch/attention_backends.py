"""Causal attention through torch's flash operators, and the tensors that each backend saves.

| backend | operator | dtypes | lse dtype |
|---|---|---|---|
| cpu | _scaled_dot_product_flash_attention_for_cpu | fp64, fp32, bf16 | fp32; fp64 for fp64 |
| cuda | _scaled_dot_product_flash_attention | bf16, fp16; head_dim % 8 = 0, <= 256 | fp32 |
| cudnn (cuda) | _scaled_dot_product_cudnn_attention | bf16, fp16; head_dim % 8 = 0, <= 128 | fp32 |
| efficient (cuda) | _scaled_dot_product_efficient_attention | fp32; head_dim % 4 = 0 | fp32 |
| unequal (cpu) | a custom operator of plain matrix products | all | fp32; fp64 for fp64 |
| exact (any other) | plain matrix products | all | fp32; fp64 for fp64 |

Traced (meta) tensors use the CPU's backends. The operator of `cpu` requires values with as many
columns as keys. Latent attention, whose values have fewer columns, uses `unequal`, which saves the
same tensors: queries, keys, values, output and lse (padded values would have to be saved, too). On
CUDA the problem's kernel selects the backend of 16-bit types: `cudnn` if the problem asks for it
and head_dim allows it, otherwise `cuda`, whose operator is FlashAttention-2 or, after
`choose_flash`, FlashAttention-3. All three save the same tensors.

Every backend returns lse as batch x heads x rows. The CPU's operator stores lse with heads
innermost, so that its bytes are rows x heads as in the operator table; the lse of the other
backends is brought to that order. Only the efficient operator pads lse (rows to a multiple of 32,
with inf): the saved lse has no padding, and the backward pads it again. cuDNN's lse has one more
dimension, of one column. Random state is not saved, because dropout is refused. KV heads may be
fewer than query heads; only the efficient operator needs them repeated, and the gradients of the
copies are summed.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rematbench.inputs.system import AttentionBackend
from rematbench.worlds.torch.arithmetic import wide

LSE_ALIGN = 32
"""The efficient operator pads lse to a multiple of this many rows (kAlignLSE in torch)."""

Heads = Tensor
"""batch x heads x rows x head_dim, with any strides."""


class Shape(NamedTuple):
    batch: int
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    v_dim: int


class Block(NamedTuple):
    """Query rows [q0, q1) against key rows [k0, k1); a diagonal block is causal."""

    q0: int
    q1: int
    k0: int
    k1: int
    causal: bool


def choose_flash(kernel: AttentionBackend) -> None:
    """Make torch's flash operators run a kernel. ImportError, RuntimeError or AttributeError if
    this is impossible: the kernel's package is missing, the kernel does not run on this GPU, or
    this torch has only one kernel."""
    from torch.nn import attention as choices  # noqa: PLC0415  # torch 2.10 has one kernel

    wanted = {"fa3": "FA3"}.get(kernel)
    current = getattr(choices, "current_flash_attention_impl", lambda: None)()
    if wanted and wanted != current:
        choices.activate_flash_attention_impl(wanted)
    elif current and not wanted:
        choices.restore_flash_attention_impl()


def backend(x: Tensor, v_dim: int, kernel: AttentionBackend = "fa2") -> str:
    """The backend (the table of this module) for queries of this device and dtype, values of
    `v_dim` columns and a problem's kernel."""
    if x.device.type in ("cpu", "meta") and hasattr(
        torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu"
    ):
        return "cpu" if x.shape[-1] == v_dim else "unequal"
    if x.device.type == "cuda" and x.shape[-1] == v_dim:
        head_dim = x.shape[-1]
        if x.dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0 and head_dim <= 256:
            return "cudnn" if kernel == "cudnn" and head_dim <= 128 else "cuda"
        if x.dtype == torch.float32 and head_dim % 4 == 0:
            return "efficient"
    return "exact"


def repeat(kv: Heads, heads: int) -> Heads:
    return kv.repeat_interleave(heads // kv.shape[1], 1)


def _scores(q: Heads, k: Heads, causal: bool) -> Tensor:
    s: Tensor = q @ repeat(k, q.shape[1]).transpose(-1, -2)
    s = s.to(wide(q.dtype)) / float(q.shape[-1]) ** 0.5
    if causal:
        keep = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril()
        s = s.masked_fill(~keep, float("-inf"))
    return s


def flash(
    q: Heads, k: Heads, v: Heads, causal: bool, kernel: AttentionBackend = "fa2"
) -> tuple[Heads, Tensor]:
    """(output, lse) of one block."""
    match backend(q, v.shape[-1], kernel):
        case "unequal":
            return _unequal(q, k, v, causal)  # type: ignore[no-any-return]
        case "cpu":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal
            )
            return out, lse
        case "cuda":
            found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
            return found[0], found[1]
        case "cudnn":
            found = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal
            )
            return found[0], found[1].squeeze(-1)
        case "efficient":
            k, v = repeat(k, q.shape[1]), repeat(v, q.shape[1])
            found = torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, causal
            )
            return found[0], found[1][:, :, : q.shape[2]]
    return _exact(q, k, v, causal)


def _exact(q: Heads, k: Heads, v: Heads, causal: bool) -> tuple[Heads, Tensor]:
    s = _scores(q, k, causal)
    lse = s.logsumexp(-1)
    probs = (s - lse[..., None]).exp().to(q.dtype)
    return probs @ repeat(v, q.shape[1]), lse


def flash_backward(
    grad: Heads,
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    lse: Tensor,
    causal: bool,
    kernel: AttentionBackend = "fa2",
) -> tuple[Heads, Heads, Heads]:
    """(dq, dk, dv) of one block; `out` and `lse` may be those of several blocks of keys, merged."""
    match backend(q, v.shape[-1], kernel):
        case "unequal":
            return _unequal_backward(grad, q, k, v, out, lse, causal)  # type: ignore[no-any-return]
        case "cpu":
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
                grad, q, k, v, out, lse, 0.0, causal
            )
        case "cuda":
            # None, because tensors of lengths mean sequences of unequal length to torch.
            seed = torch.empty(2, dtype=torch.uint64, device=q.device)
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
                grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2],
                0.0, causal, seed, seed[0],
            )  # fmt: skip
        case "cudnn":
            seed = torch.empty((), dtype=torch.int64, device=q.device)
            return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
                grad, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None,
                q.shape[2], k.shape[2], 0.0, causal,
            )  # fmt: skip
        case "efficient":
            return _efficient_backward(grad, q, k, v, out, lse, causal)
    return _exact_backward(grad, q, k, v, out, lse, causal)


def _exact_backward(
    grad: Heads, q: Heads, k: Heads, v: Heads, out: Heads, lse: Tensor, causal: bool
) -> tuple[Heads, Heads, Heads]:
    probs = (_scores(q, k, causal) - lse[..., None]).exp()
    full_v = repeat(v, q.shape[1])
    dp = (grad @ full_v.transpose(-1, -2)).to(probs.dtype)
    delta = (grad * out).sum(-1, keepdim=True).to(probs.dtype)
    ds = (probs * (dp - delta) / q.shape[-1] ** 0.5).to(q.dtype)
    dk = _summed(ds.transpose(-1, -2) @ q, k)
    dv = _summed(probs.to(q.dtype).transpose(-1, -2) @ grad, v)
    return ds @ repeat(k, q.shape[1]), dk, dv


def _by_rows(x: Tensor) -> Tensor:
    """The same tensor, stored in the order batch, rows, heads."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@torch.library.custom_op("rematbench::unequal_attention", mutates_args=())
def _unequal(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """(output, lse) as one operator, so that the tracker does not count the temporaries inside."""
    out, lse = _exact(q, k, v, causal)
    return _by_rows(out), _by_rows(lse)


@_unequal.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return _by_rows(out), _by_rows(q.new_empty(q.shape[:-1], dtype=wide(q.dtype)))


@torch.library.custom_op("rematbench::unequal_attention_backward", mutates_args=())
def _unequal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _exact_backward(grad, q, k, v, out, lse, causal)
    return _by_rows(dq), _by_rows(dk), _by_rows(dv)


@_unequal_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (_by_rows(x.new_empty(x.shape)) for x in (q, k, v))
    return dq, dk, dv


def _summed(gradients: Heads, kv: Heads) -> Heads:
    return gradients.view(kv.shape[0], kv.shape[1], -1, *kv.shape[2:]).sum(2)


def _efficient_backward(
    grad: Heads, q: Heads, k: Heads, v: Heads, out: Heads, lse: Tensor, causal: bool
) -> tuple[Heads, Heads, Heads]:
    extra = -lse.shape[2] % LSE_ALIGN
    padded = F.pad(lse, (0, extra), value=float("inf")).contiguous()
    seed = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, q, repeat(k, q.shape[1]), repeat(v, q.shape[1]), None, out, padded, seed, seed,
        0.0, [True, True, True, False], causal,
    )  # fmt: skip
    if k.shape[1] == q.shape[1]:
        return dq, dk, dv
    return dq, _summed(dk.contiguous(), k), _summed(dv.contiguous(), v)


def blocks(rows: int, slices: tuple[int, ...], keys: int) -> list[list[Block]]:
    """The blocks of each query slice: the whole prefix, then the causal diagonal. `slices`: the
    positions in the sequence of the slices that a rank holds, in order. A single slice holds the
    last rows of the `keys`."""
    size = rows // len(slices)
    found: list[list[Block]] = []
    for place, position in enumerate(slices):
        q0, k0 = place * size, position * size
        if len(slices) == 1:
            k0 = keys - rows
        diagonal = Block(q0, q0 + size, k0, k0 + size, True)
        prefix = [Block(q0, q0 + size, 0, k0, False)] if k0 else []
        found.append([*prefix, diagonal])
    return found


def attend(
    q: Heads, k: Heads, v: Heads, slices: tuple[int, ...], kernel: AttentionBackend = "fa2"
) -> tuple[Heads, Tensor]:
    """(output, lse) of a rank's query rows over the keys and values of whole sequences."""
    outs, lses = [], []
    for group in blocks(q.shape[2], slices, k.shape[2]):
        parts = [
            flash(
                q[:, :, b.q0 : b.q1], k[:, :, b.k0 : b.k1], v[:, :, b.k0 : b.k1], b.causal, kernel
            )
            for b in group
        ]
        out, lse = parts[0]
        for other, other_lse in parts[1:]:
            total = torch.logaddexp(lse, other_lse)
            a, c = (lse - total).exp()[..., None], (other_lse - total).exp()[..., None]
            out, lse = (out * a + other * c).to(q.dtype), total
        outs.append(out)
        lses.append(lse)
    return (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, 2), torch.cat(lses, 2))


def attend_backward(
    grad: Heads,
    q: Heads,
    k: Heads,
    v: Heads,
    out: Heads,
    lse: Tensor,
    slices: tuple[int, ...],
    kernel: AttentionBackend = "fa2",
) -> tuple[Heads, Heads, Heads]:
    """(dq, dk, dv) of `attend`: the sums over blocks, each with the merged output and lse."""
    groups = blocks(q.shape[2], slices, k.shape[2])
    if len(groups) == 1 and len(groups[0]) == 1:
        return flash_backward(grad, q, k, v, out, lse, True, kernel)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for b in (block for group in groups for block in group):
        rows, keys = slice(b.q0, b.q1), slice(b.k0, b.k1)
        parts = flash_backward(
            grad[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys],
            out[:, :, rows], lse[:, :, rows], b.causal, kernel,
        )  # fmt: skip
        dq[:, :, rows] += parts[0]
        dk[:, :, keys] += parts[1]
        dv[:, :, keys] += parts[2]
    return dq, dk, dv


def probabilities(q: Heads, k: Heads) -> Tensor:
    """Causal probabilities of unfused attention, stored whole: batch x heads x rows x keys."""
    return _scores(q, k, True).softmax(-1).to(q.dtype)


def unfused_backward(
    grad: Heads, q: Heads, k: Heads, v: Heads, probs: Tensor
) -> tuple[Heads, Heads, Heads]:
    """(dq, dk, dv) of probabilities @ v, from the saved probabilities."""
    dp = (grad @ repeat(v, q.shape[1]).transpose(-1, -2)).to(wide(q.dtype))
    p = probs.to(wide(q.dtype))
    ds = (p * (dp - (p * dp).sum(-1, keepdim=True)) / q.shape[-1] ** 0.5).to(q.dtype)
    dk = _summed(ds.transpose(-1, -2) @ q, k)
    dv = _summed(probs.transpose(-1, -2) @ grad, v)
    return ds @ repeat(k, q.shape[1]), dk, dv
