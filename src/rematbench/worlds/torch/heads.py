"""Heads of attention: pieces of a rank's heads, and the order of heads under Ulysses.

Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509) moves a tensor between two orders by all-to-all. In
the order of rows a rank has its part of every sequence with all heads: rows x (heads head_dim). In
the order of heads a rank has all rows with its part of the heads: (ranks rows) x (heads of a rank
head_dim), the rows of rank 0 first. So a row of a rank stands for the same row of every peer, and a
share of rows means the same in both orders. With fewer KV heads than ranks, each head goes to
several ranks, and the gradients of its copies are summed.

Attention over slices of heads (Untied Ulysses, arXiv 2602.21196) works on one piece at a time.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rematbench.worlds.torch.groups import Group

SPLIT = ("q", "k", "v")
"""The weights (and biases) whose rows are split into pieces of heads."""


class Heads(NamedTuple):
    """Piece `number` of a rank's heads: each of the `ranks` of Ulysses cuts its query heads into
    `slices` pieces and its KV heads into `keys`. With fewer KV pieces, several pieces share one."""

    number: int
    slices: int
    keys: int
    ranks: int

    def pieces(self, name: str) -> int:
        return self.keys if name[0] in "kv" else self.slices

    def parts(self, name: str, whole: Tensor, dim: int) -> list[Tensor]:
        """Views of the piece's heads, one for each rank, in a tensor with all heads along `dim`."""
        pieces = self.pieces(name)
        if pieces == 1:
            return [whole]
        every = whole.chunk(self.ranks * pieces, dim)
        at = self.number * pieces // self.slices
        return [every[rank * pieces + at] for rank in range(self.ranks)]

    def of(self, name: str, whole: Tensor, dim: int) -> Tensor:
        parts = self.parts(name, whole, dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def put(target: Tensor, made: Tensor, heads: Heads | None) -> None:
    """Copy a result into a tensor. With `heads`, the result has the columns of one piece of heads,
    and only these columns of the tensor are filled."""
    parts = heads.parts("attn_out", target, -1) if heads else [target]
    for part, some in zip(parts, made.chunk(len(parts), -1), strict=True):
        part.copy_(some.reshape(part.shape))


def rows_to_heads(out: Tensor, rows: Tensor, group: Group, head_dim: int) -> None:
    """Fill `out` in the order of heads from `rows` in the order of rows."""
    split = rows.view(rows.shape[0], -1, head_dim)
    if split.shape[1] < group.size:
        split = split.repeat_interleave(group.size // split.shape[1], 1)
    parts = split.reshape(rows.shape[0], group.size, -1).transpose(0, 1)
    group.all_to_all(out, parts.contiguous())


def heads_to_rows(out: Tensor, heads: Tensor, group: Group, head_dim: int) -> None:
    """Fill `out` in the order of rows from `heads` in the order of heads; sum copies of heads."""
    parts = torch.empty_like(heads)
    group.all_to_all(parts, heads)
    rows = parts.view(group.size, out.shape[0], -1).transpose(0, 1)
    kept = out.shape[1] // head_dim
    if kept < group.size:
        summed = rows.reshape(out.shape[0], kept, -1, head_dim).sum(2)
        out.copy_(summed.view(out.shape))
    else:
        out.view(rows.shape).copy_(rows)
