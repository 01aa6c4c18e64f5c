"""Weights of 4 and 8 bits that do not train: codes, scales and zeros in the bytes of their format.

A weight is cut into blocks along its rows, as bitsandbytes and AutoGPTQ cut it (functional.py,
quantize_4bit; qlinear_cuda_old.py). For each product the whole weight is widened into a matrix of
the compute precision. Values are rounded to the nearest code. Deviations: scales of 8 bits have no
offset (bitsandbytes subtracts their mean), and codes of GPTQ are not fitted to data.
"""

from math import ceil

import torch
from torch import Tensor

from rematbench.workload import PACKINGS, Packing

NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314, appendix E)."""
PIECES = 32
"""A weight is widened in this many pieces, so that temporaries stay small."""
BYTE = 255


def nbytes(count: int, packing: Packing) -> int:
    """Bytes of `count` packed weights."""
    return sum(_sizes(count, packing))


def _sizes(count: int, packing: Packing) -> tuple[int, int, int, int]:
    """Bytes of the fp32 scales of scales, the scales, the zeros and the codes, which lie in this
    order, so that each begins at a multiple of its width."""
    blocks = ceil(count / packing.block)
    nested = 4 * ceil(blocks / packing.nested) if packing.nested else 0
    zeros = ceil(blocks * packing.bits / 8) if packing.zeros else 0
    return nested, blocks * packing.scale_bytes, zeros, ceil(count * packing.bits / 8)


def packed(weight: Tensor, name: str) -> Tensor:
    """The bytes of a weight in a format of `PACKINGS`."""
    packing, count = PACKINGS[name], weight.numel()
    if weight.is_meta:
        return torch.empty(nbytes(count, packing), dtype=torch.uint8, device="meta")
    x = _blocks(weight.reshape(-1).float(), packing.block)
    steps, zeros = (1 << packing.bits) - 1, None
    if packing.zeros:  # codes cover all values, and 0 has a code
        low, high = (x.amin(1).clamp(max=0), x.amax(1).clamp(min=0))
        scales = (high - low) / steps
    else:
        scales = x.abs().amax(1) / (1 if name.startswith("nf4") else steps // 2)
    scales = torch.where(scales > 0, scales, 1.0)
    parts, scales = _packed_scales(scales, packing)
    if name.startswith("nf4"):
        table = torch.tensor(NF4, device=x.device)
        codes = torch.bucketize(x / scales[:, None], (table[1:] + table[:-1]) / 2)
    else:
        middle = torch.full_like(scales, steps // 2 + 1)
        if packing.zeros:
            middle = (-low / scales).round().clamp(0, steps)
            zeros = middle.to(torch.uint8)
        codes = ((x / scales[:, None]).round() + middle[:, None]).clamp(0, steps)
    found = codes.to(torch.uint8).view(-1)[:count]
    parts += [_together(each, packing.bits) for each in (zeros, found) if each is not None]
    return torch.cat(parts)


def _blocks(x: Tensor, size: int) -> Tensor:
    """blocks x size elements; the last block is filled up with zeros."""
    if x.numel() % size == 0:
        return x.view(-1, size)
    whole = x.new_zeros(ceil(x.numel() / size) * size)
    whole[: x.numel()] = x
    return whole.view(-1, size)


def _packed_scales(scales: Tensor, packing: Packing) -> tuple[list[Tensor], Tensor]:
    """(the bytes of scales, the scales as these bytes round them)."""
    if packing.nested:
        groups = _blocks(scales, packing.nested)
        tops = groups.amax(1)
        codes = (groups / tops[:, None] * BYTE).round().clamp(1, BYTE).to(torch.uint8)
        codes = codes.view(-1)[: scales.numel()]
        return [tops.view(torch.uint8), codes], _nested(codes, tops, packing)
    kept = scales.to(torch.float16 if packing.scale_bytes == 2 else torch.float32)
    return [kept.view(torch.uint8)], kept.float()


def _nested(codes: Tensor, tops: Tensor, packing: Packing) -> Tensor:
    each = tops.repeat_interleave(packing.nested)[: codes.numel()]
    return codes.float() / BYTE * each


def _together(codes: Tensor, bits: int) -> Tensor:
    """Codes as bytes; two codes of 4 bits share a byte."""
    if bits == 8:
        return codes
    pairs = _blocks(codes, 2)
    return pairs[:, 0] | pairs[:, 1] << 4


def _values(name: str, packing: Packing, device: torch.device) -> Tensor:
    """256 x (1 or 2): values of the codes that a byte holds, before their zero is subtracted."""
    if name.startswith("nf4"):
        table = torch.tensor(NF4, device=device)
    else:
        middle = 0.0 if packing.zeros else float(1 << packing.bits - 1)
        table = torch.arange(-middle, (1 << packing.bits) - middle, device=device)
    if packing.bits == 8:
        return table[:, None]
    return torch.stack([table.repeat(16), table.repeat_interleave(16)], 1)


def widen(data: Tensor, name: str, out: Tensor) -> Tensor:
    """Write the values of a packed weight into `out`, piece by piece."""
    packing, flat = PACKINGS[name], out.view(-1)
    sizes = _sizes(flat.numel(), packing)
    tops, scales, zeros, codes = torch.split(data, list(sizes))
    if packing.nested:
        wide = _nested(scales, tops.view(torch.float32), packing)
    else:
        wide = scales.view(torch.float16 if packing.scale_bytes == 2 else torch.float32).float()
    table = _values(name, packing, data.device)
    middles = table[zeros.int()].view(-1, 1)[: wide.numel()] if packing.zeros else None
    each = max(1, wide.numel() // PIECES)
    for first in range(0, wide.numel(), each):
        blocks = slice(first, first + each)
        own = wide[blocks, None]
        start, stop = first * packing.block, (first + own.shape[0]) * packing.block
        some = table[codes[start * packing.bits // 8 : stop * packing.bits // 8].int()]
        values = _blocks(some.view(-1), packing.block)
        if middles is not None:
            values.sub_(middles[blocks])
        room = flat[start:stop]
        room.copy_(values.mul_(own).view(-1)[: room.numel()])
    return out
