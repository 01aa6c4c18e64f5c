"""Tensors in FP8 on a device: elements of torch.float8_e4m3fn and their scales.

A row of a quantised copy is the bytes of its elements, then the bytes of its scales: fp32 numbers,
or exponents of 8 bits. If the whole tensor has one scale, this scale is kept outside, as
TransformerEngine keeps it in the module. Products run in 16 bits on the values that the bytes stand
for, because torch._scaled_mm needs instructions that the runtime forbids oneDNN to use
(devices.py). Deviation: one copy, quantised by rows, serves the forward and the backward, where
TransformerEngine has a second copy, quantised by columns.
"""

import torch
from torch import Tensor

from rematbench.inputs.recipes import Recipe

F8 = torch.float8_e4m3fn
LARGEST = torch.finfo(F8).max
BIAS = 127
"""The bias of the exponents of torch.float8_e8m0fnu."""
Scales = Tensor
"""fp32 numbers, one for each tile of rows and columns."""


def scales_of(x: Tensor, recipe: Recipe, *, weight: bool = False) -> Scales:
    """The scales of x (rows x columns): one for the whole tensor, or one for every `block` columns
    of each row. In a recipe with fp32 scales, a weight has one for each tile of `block` x
    `block`."""
    if not recipe.block:
        amax = x.abs().amax().float().view(1, 1)
    else:
        tall = recipe.block if weight and recipe.scale_bytes > 1 else 1
        rows, columns = (
            -(-n // size) for n, size in zip(x.shape, (tall, recipe.block), strict=True)
        )
        padded = x.new_zeros(rows * tall, columns * recipe.block)
        padded[: x.shape[0], : x.shape[1]] = x.abs()
        amax = padded.view(rows, tall, columns, recipe.block).amax((1, 3)).float()
    scales = torch.where(amax > 0, amax / LARGEST, 1.0)
    return torch.exp2(torch.ceil(torch.log2(scales))) if recipe.scale_bytes == 1 else scales


def spread(scales: Scales, shape: torch.Size, recipe: Recipe) -> Tensor:
    """The scale of each element: rows x columns."""
    if not recipe.block:
        return scales.expand(shape)
    tall = 1 if scales.shape[0] == shape[0] else recipe.block
    whole = scales.repeat_interleave(tall, 0).repeat_interleave(recipe.block, 1)
    return whole[: shape[0], : shape[1]]


def elements(x: Tensor, scales: Scales, recipe: Recipe) -> Tensor:
    return (x.float() / spread(scales, x.shape, recipe)).to(F8)


def narrowed(x: Tensor, recipe: Recipe, *, weight: bool = False) -> Tensor:
    """x rounded to its quantised form, in its own dtype."""
    scales = scales_of(x, recipe, weight=weight)
    return (elements(x, scales, recipe).float() * spread(scales, x.shape, recipe)).to(x.dtype)


def packed(x: Tensor, recipe: Recipe) -> tuple[Tensor, float]:
    """(the bytes of the quantised copy of x, rows x row bytes; the scale of the whole tensor, 1.0
    if rows have scales)."""
    scales = scales_of(x, recipe)
    data = elements(x, scales, recipe).view(torch.uint8)
    if not recipe.block:  # a trace's tensors have no values
        return data, 1.0 if scales.is_meta else float(scales)
    own = scales.view(torch.uint8)
    if recipe.scale_bytes == 1:
        own = (torch.log2(scales) + BIAS).to(torch.uint8)
    return torch.cat([data, own], 1), 1.0


def widened(data: Tensor, recipe: Recipe, columns: int, scale: float, dtype: torch.dtype) -> Tensor:
    """The values of a quantised copy with this many columns: rows x columns."""
    found, own = (part.clone() for part in (data[:, :columns], data[:, columns:]))
    if not recipe.block:
        scales = torch.full((1, 1), scale, device=data.device)
    elif recipe.scale_bytes == 1:
        scales = torch.exp2(own.float() - BIAS)
    else:
        scales = own.view(-1).view(torch.float32).view(data.shape[0], -1)
    return (found.view(F8).float() * spread(scales, found.shape, recipe)).to(dtype)
