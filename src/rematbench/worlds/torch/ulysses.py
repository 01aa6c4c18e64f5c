"""Ulysses' all-to-all between two orders of a tensor (DeepSpeed-Ulysses, arXiv 2309.14509).

In the order of rows a rank has its part of every sequence with all heads: rows x (heads head_dim).
In the order of heads it has all rows with its part of the heads: (ranks rows) x (heads of a rank
head_dim), the rows of rank 0 first. So a rank's row stands for the same row of every peer, and
shares of rows mean the same in both orders. With fewer KV heads than ranks, each head goes to
several ranks, and the gradients of its copies are summed.
"""

import torch
from torch import Tensor

from rematbench.worlds.torch.groups import Group


def to_heads(out: Tensor, rows: Tensor, group: Group, head_dim: int) -> None:
    """Fill `out` in the order of heads from `rows` in the order of rows."""
    split = rows.view(rows.shape[0], -1, head_dim)
    if split.shape[1] < group.size:
        split = split.repeat_interleave(group.size // split.shape[1], 1)
    parts = split.reshape(rows.shape[0], group.size, -1).transpose(0, 1)
    group.all_to_all(out, parts.contiguous())


def to_rows(out: Tensor, heads: Tensor, group: Group, head_dim: int) -> None:
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


def whole_sequences(heads: Tensor, ranks: int, batch: int) -> Tensor:
    """(ranks batch part) x columns -> (batch sequence) x columns."""
    parts = heads.view(ranks, batch, -1, heads.shape[-1])
    return parts.transpose(0, 1).reshape(-1, heads.shape[-1])


def by_rank(sequences: Tensor, ranks: int, batch: int) -> Tensor:
    """(batch sequence) x columns -> (ranks batch part) x columns."""
    return whole_sequences(sequences, batch, ranks)
