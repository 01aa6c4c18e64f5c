"""Lower bounds of the step and of the peak bytes of many layouts at once, in closed form.

For each rank of a 1F1B or interleaved pipeline, a step takes at least the seconds before the rank's
first pass, plus those of the rank's passes, plus those after its last pass (Narayanan et al. 2021,
arXiv 2104.04473, section 2.2, with stages of different length).  A device holds at least its states
and, before a backward, the activations kept by all passes in flight."""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.bounds.columns import AS_PROBED, Array, Columns, Wider
from rematbench.advise.bounds.lines import Facts, Line
from rematbench.plan import Transfers

ROUNDING_BYTES = 1 << 20
"""A chunk's share of bytes is rounded up to a multiple of this."""


ROUNDED_BYTES = 64
"""An allowance for rounding: shards of states are whole numbers, so equal layers may add slightly
different numbers of bytes."""


class Total:
    """The summed costs of `count` chunks with `layers` layers in all: seconds and bytes, as arrays
    over layouts and shares.  Each array is computed when it is first read."""

    def __init__(self, line: Line, layers: Array | NDArray[np.int64], count: Any = 1) -> None:
        self.base, self.slope, self.count = line.base, line.slope, count
        self.more = layers - count * line.layers

    def _at(self, value: Any, step: Any) -> Array:
        return np.asarray(self.count * value + self.more * step, dtype=float)

    @cached_property
    def passes_s(self) -> Array:
        """Seconds of compute in a forward and a backward."""
        base, slope = self.base, self.slope
        return self._at(
            base.forward.compute_s + base.backward.compute_s,
            slope.forward.compute_s + slope.backward.compute_s,
        )

    @cached_property
    def host_s(self) -> Array:
        """Seconds of the host in a forward and a backward."""
        base, slope = self.base, self.slope
        return self._at(
            base.forward.host_s + base.backward.host_s, slope.forward.host_s + slope.backward.host_s
        )

    @cached_property
    def kept_bytes(self) -> Array:
        """Device bytes that the chunks keep between forward and backward."""
        return self._at(self.base.kept_bytes, self.slope.kept_bytes)

    @cached_property
    def copied_bytes(self) -> Array:
        """Device bytes that are freed after their copy to the host."""
        return self._at(self.base.released_bytes, self.slope.released_bytes)

    @cached_property
    def host_bytes(self) -> Array:
        """Bytes that the chunks keep in host memory."""
        return self._at(self.base.host_bytes, self.slope.host_bytes)

    @cached_property
    def pool_bytes(self) -> Array:
        """Bytes of the staging pools of the chunk's rank."""
        return self._at(self.base.pool_bytes, self.slope.pool_bytes)

    @cached_property
    def high_bytes(self) -> Array:
        """Peak bytes of a backward above the bytes at its entry.  A further layer may lower this,
        because the peak may come at the end, after that layer's bytes were freed."""
        fall = np.minimum(0.0, self.slope.backward.high_bytes)
        found = self._at(self.base.backward.high_bytes, fall)
        return np.where(self.more < 0, 0.0, found)

    @cached_property
    def forward_high_bytes(self) -> Array:
        """Peak bytes of a forward above the bytes at its entry.  A further layer raises the peak by
        at least 0 and at least the lower of two slopes: of the peak, and of the bytes that the
        forward leaves."""
        forward = self.slope.forward
        growth = np.maximum(0.0, np.minimum(forward.net_bytes, forward.high_bytes))
        found = self._at(self.base.forward.high_bytes, growth)
        return np.where(self.more < 0, 0.0, found)


def step_bound(
    columns: Columns,
    facts: Facts,
    send_s: Array,
    more: Wider = AS_PROBED,
    *,
    any_order: bool = False,
) -> Array:
    """Lower bound of each layout's step in seconds: the largest of the bounds of the first rank, an
    inner rank and the last rank.  `more`: seconds that layers of other kinds than a probe's add.
    `any_order`: passes may run in another order than in 1F1B, so only their sum counts."""
    c, m, v = columns, columns.count, columns.vpp
    first, middle, last = facts
    opening = Total(first, c.opening)
    ending = Total(last, c.ending)
    several = c.pp > 1
    rest_first = Total(middle, c.first - c.opening, v - 1)
    rest_last = Total(middle, c.last - c.ending, v - 1)
    inner = Total(middle, c.inner_work, v)

    def work(one: Total, other: Total | None, more_s: Any) -> Array:
        passes_s, host_s = one.passes_s + more_s, one.host_s
        if other is not None:
            passes_s, host_s = passes_s + other.passes_s, host_s + other.host_s
        return np.asarray(np.maximum(m * passes_s, m * host_s))

    def around(layers: Any, ranks: Any) -> Array:
        """Seconds before a rank's first pass and after its last: the passes and messages of the
        ranks before it."""
        between = Total(middle, layers - c.opening, np.maximum(ranks - 1, 0))
        passes_s = opening.passes_s + between.passes_s
        return np.where((ranks > 0) & (not any_order), passes_s + 2 * ranks * send_s, 0.0)

    at_first = work(opening, rest_first, more.first)
    at_inner = work(inner, None, more.inner) + around(c.inner_before, c.inner_rank)
    at_last = work(ending, rest_last, more.last) + around(c.before_last, c.pp - 1)
    found = np.where(c.pp > 2, np.maximum(at_first, at_inner), at_first)
    return np.where(several, np.maximum(found, at_last), at_first)


class Waiting(NamedTuple):
    """The bytes that each pass of the model's last chunk holds if its backward does not follow at
    once: bytes kept on the device, and bytes copied to the host."""

    kept_bytes: Any
    copied_bytes: Any


MOVES = Transfers()
"""The transfers of a plan without copies."""


def peak_bound(
    columns: Columns, facts: Facts, moves: Transfers = MOVES, waiting: Waiting | None = None
) -> Array:
    """Lower bound of each layout's device bytes: the largest of the first, second and last rank's
    bytes, during the pass that brings the most passes in flight and the backward after it. The
    device holds the copied tensors of a forward until `moves` releases them, and staging pools.
    Pools of whole chunks count from two micro-batches on; pools of layers count if a chunk fills
    all slots that a probe's chunk fills. `waiting`: the last chunk's bytes in layouts that have all
    its passes in flight at once (None: they are no less than those of the smallest other chunk)."""
    c = columns
    flights, states, holding = c.in_flight, c.state_bytes, c.copying(moves.release_lag)
    first, middle, last = facts
    opening, inner, ending = Total(first, c.opening), Total(middle, c.inner), Total(last, c.ending)
    rest = Total(middle, c.fewest)
    floor = np.maximum(rest.kept_bytes, 0.0)
    waiting = waiting or Waiting(np.minimum(floor, ending.kept_bytes), 0.0)
    final, more_bytes = _of_last(c, ending.kept_bytes, waiting.kept_bytes, floor)
    others, still = np.minimum(floor, final), _still(facts)
    lower = np.where(c.vpp > 1, np.minimum(floor, opening.kept_bytes), opening.kept_bytes)

    def peak(rank: int, chunk: Total, others: Array, backward_bytes: Array) -> Array:
        """Bytes of a rank: states, pools, activations that the other passes in flight keep or that
        are being copied, and the highest point of the running pass."""
        high = np.minimum(chunk.high_bytes, inner.high_bytes) if rank == 0 else chunk.high_bytes
        inside = (
            states[rank] + still * c.sum_bytes[rank] + (flights[rank] - 1) * np.maximum(others, 0.0)
        )
        if still:
            backward = backward_bytes + np.maximum(0.0, high)
            return np.asarray(inside + np.maximum(backward, chunk.forward_high_bytes))
        copying = holding[rank]
        each = (
            np.minimum(chunk.copied_bytes, inner.copied_bytes) if rank < 2 else inner.copied_bytes
        )
        copied = np.where(c.count > c.pp, chunk.copied_bytes, 0.0)
        if rank < 2:  # the last rank's last forward copies nothing
            copied = np.where(c.count > c.pp, np.maximum(copied, copying * each), 0.0)
        pools = np.where(c.count > 1, np.maximum(0.0, chunk.pool_bytes), 0.0)
        by_layer = moves.granularity == "layer"
        if by_layer:
            pools = np.where(_fills_slots(c, chunk), chunk.base.pool_bytes, 0.0)
        if rank == 2 and c.waits.any():
            filled = np.minimum(moves.reload_slots, c.count)
            copying = np.where(c.waits, np.minimum(copying, c.count - filled), copying)
            each = np.where(c.waits, waiting.copied_bytes, each)
            copied = np.where(c.waits, _passes_in_copy(c, copying) * each, copied)
            slots = _rest_pool_bytes(rest) if by_layer else filled * waiting.copied_bytes
            pools = np.where(c.waits, slots, pools)
            high = high - np.where(c.waits & by_layer, chunk.base.pool_bytes, 0.0)
        if rank == 1:  # with pp 3 it has two passes in flight; the probe's middle rank has three
            high = np.where((c.pp == 3) & (chunk.copied_bytes > 0), 0.0, high)
        backward = backward_bytes + copied + np.maximum(0.0, high)
        passing = np.maximum(backward, copying * each + chunk.forward_high_bytes)
        return np.asarray(inside + pools + passing)

    ends = np.maximum(peak(0, opening, lower, lower), peak(2, ending, others, final) + more_bytes)
    most = np.maximum(ends, peak(1, inner, inner.kept_bytes, inner.kept_bytes))
    return np.where(c.pp > 2, most, ends) - ROUNDED_BYTES


def _of_last(columns: Columns, kept: Any, waiting: Any, floor: Array) -> tuple[Array, Array]:
    """Bytes that a pass of the model's last chunk keeps, and the bytes by which all its other
    passes exceed `floor` (0 where they do not wait). `kept`: bytes by its probe; `waiting`: bytes
    where it waits."""
    c = columns
    if not c.waits.any():
        return kept, 0.0 * c.count
    final = np.where(c.waits, np.maximum(0.0, waiting), kept)
    return final, np.where(c.waits, (c.count - 1) * np.maximum(0.0, final - floor), 0.0)


def _still(facts: Facts) -> bool:
    """Whether no device bytes are freed by copies to the host, and staging pools are empty."""
    costs = [cost for line in facts for cost in (line.base, line.slope)]
    numbers = [number for cost in costs for number in (cost.released_bytes, cost.pool_bytes)]
    return not any(isinstance(number, np.ndarray) or number for number in numbers)


def _fills_slots(columns: Columns, chunk: Total) -> NDArray[np.bool_]:
    """Whether a chunk fills at least the pool slots that a probe's chunk fills: it has no fewer
    layers, and there is a second micro-batch or only one rank."""
    known: NDArray[np.bool_] = (chunk.more >= 0) & ((columns.count > 1) | (columns.pp == 1))
    return known


def _passes_in_copy(columns: Columns, copying: NDArray[np.int64]) -> NDArray[np.int64]:
    """Passes of the model's waiting last chunk that are still being copied during the first
    backward: not the pass of that backward and not the next pass, whose copies come back."""
    found: NDArray[np.int64] = np.minimum(copying, np.maximum(0, columns.count - 2))
    return found


def _rest_pool_bytes(rest: Total) -> Array:
    """Bytes of the slots that layers of the smallest chunk use.  The model's last layers stay in
    slots only where their backward comes at once."""
    return np.where(rest.more >= 0, rest.base.pool_bytes, 0.0)


def host_bound(columns: Columns, facts: Facts) -> Array:
    """Lower bound of the host bytes that the ranks of the first node, or of the first node without
    the first stage, pin for passes in flight."""
    c = columns
    nothing = np.zeros(len(c.layouts))
    if not any(np.any(cost.host_bytes) for line in facts for cost in (line.base, line.slope)):
        return nothing
    opening, alike = Total(facts.first, c.opening), Total(facts.middle, c.opening)
    each = np.minimum(opening.host_bytes, np.where(c.vpp > 1, alike.host_bytes, np.inf))
    found = []
    pinned: dict[int, Array] = {}  # the key is the stage
    for node in c.nodes:
        total = nothing
        for stage, passes in node.items():
            if stage not in pinned:
                layers = c.layers_of(stage) if stage else c.opening
                chunk_bytes = Total(facts.middle, layers).host_bytes if stage else each
                pinned[stage] = np.maximum(0.0, chunk_bytes)
            total = total + passes * pinned[stage]
        found.append(total)
    # The model's last layers may stay on the device; with two ranks the first rank may have some.
    moving = np.where((c.vpp > 1) & (c.pp < 3), 1.0 - 1.0 / c.vpp, 1.0)
    return np.asarray(moving * np.maximum(*found))
