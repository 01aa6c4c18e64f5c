"""Seconds that the pieces of a head add, beside layers that may be in pieces or not."""

from collections.abc import Callable
from typing import NamedTuple

from rematbench.search.passes import ChunkCost, PassCost
from rematbench.search.probe import Facts, Line

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

    def head_s(line: Line, of: Callable[[ChunkCost], PassCost]) -> float:
        return of(line.base).compute_s - line.layers * of(line.slope).compute_s

    passes: list[Callable[[ChunkCost], PassCost]] = [lambda c: c.forward, lambda c: c.backward]
    forward_s, backward_s = (NEAR * max(0.0, head_s(cut, of) - head_s(whole, of)) for of in passes)
    return More(forward_s, backward_s)


def with_head(facts: Facts, more: More, *, single: bool) -> Facts:
    """Facts of a plan whose head is in pieces, from those of the same plan with a whole head.
    `single`: of one rank, whose chunk is first and last."""
    last = facts.last._replace(base=_longer(facts.last.base, more))
    return Facts(last, last, last) if single else facts._replace(last=last)


def _longer(chunk: ChunkCost, more: More) -> ChunkCost:
    def longer(cost: PassCost, seconds: float) -> PassCost:
        names = ("compute_s", "kernel_s")
        return cost._replace(**{name: getattr(cost, name) + seconds for name in names})

    return chunk._replace(
        forward=longer(chunk.forward, more.forward_s),
        backward=longer(chunk.backward, more.backward_s),
    )
