"""Seconds that the pieces of a head add, beside layers that may be in pieces or not."""

from typing import NamedTuple

from rematbench.advise.search.passes import ChunkCost, PassCost
from rematbench.advise.search.probe import Facts, Line

NEAR = 0.99
"""Factor on these seconds: those of a chunk are not exactly linear in its layers, since the first
kernel of a kind may wait for its launch."""


class More(NamedTuple):
    """Seconds that the pieces of a head add to the forward and the backward of the last chunk."""

    forward_s: float
    backward_s: float


def in_pieces(cut: Line, whole: Line) -> More:
    """What pieces of the head add, from the last chunk with a head in pieces (`cut`) and without.
    Layers are in pieces in `cut` or not: what they take is left out of both."""

    def head_s(line: Line) -> list[float]:
        passes = zip(line.base[:2], line.slope[:2], strict=True)
        return [base.compute_s - line.layers * slope.compute_s for base, slope in passes]

    both = zip(head_s(cut), head_s(whole), strict=True)
    return More._make(NEAR * max(0.0, one - other) for one, other in both)


def with_head(facts: Facts, more: More, *, single: bool) -> Facts:
    """Facts of a plan whose head is in pieces, from those of the same plan with a whole head.
    `single`: of one rank, whose chunk is first and last."""
    last = facts.last._replace(base=_longer(facts.last.base, more))
    return Facts(last, last, last) if single else facts._replace(last=last)


def _longer(chunk: ChunkCost, more: More) -> ChunkCost:
    def longer(cost: PassCost, seconds: float) -> PassCost:
        return cost._replace(compute_s=cost.compute_s + seconds, kernel_s=cost.kernel_s + seconds)

    return chunk._replace(
        forward=longer(chunk.forward, more.forward_s),
        backward=longer(chunk.backward, more.backward_s),
    )
