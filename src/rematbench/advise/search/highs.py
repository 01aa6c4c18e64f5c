"""The bytes that passes need above what chunks keep, for bounds of many plans at once."""

from rematbench.advise.search.kernels import compute_cost
from rematbench.advise.search.passes import ChunkCost
from rematbench.advise.search.probe import Line


def chord(two: Line, four: Line, beyond: float) -> Line:
    """Line `four` (in more pieces than `two`) with its highest points extrapolated to still more
    pieces: `beyond` is the further distance over the distance between the two lines."""

    def chunk(a: ChunkCost, b: ChunkCost) -> ChunkCost:
        forward, backward = (
            y._replace(high_bytes=max(0.0, y.high_bytes - beyond * (x.high_bytes - y.high_bytes)))
            for x, y in ((a.forward, b.forward), (a.backward, b.backward))
        )
        return b._replace(forward=forward, backward=backward)

    return Line(four.layers, chunk(two.base, four.base), four.slope)


def height(cost: ChunkCost) -> float:
    """Bytes that a pass needs above the kept bytes of its chunk."""
    forward, backward = cost.forward, cost.backward
    return max(backward.high_bytes, forward.high_bytes - forward.net_bytes)


def only_kept(cost: ChunkCost, high: float) -> ChunkCost:
    """The bytes that a chunk keeps, and `high` above them.  Copies and staging pools are left out:
    a plan that copies less has less of both."""
    found = compute_cost(0.0, 0.0)
    forward = found.forward._replace(net_bytes=cost.kept_bytes)
    return found._replace(forward=forward, backward=found.backward._replace(high_bytes=high))


def no_cost() -> ChunkCost:
    """A chunk that takes no seconds and no bytes."""
    return compute_cost(0.0, 0.0)
