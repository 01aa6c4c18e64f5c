"""Long chunks of equal layers: the emitters write a short chunk, and its middle layer is repeated.

Deep in a chunk of equal layers, every layer has the same actions as the layer before, with the next
layer number in each storage and later events. So the emitters write a chunk without most of the
equal layers, and the actions of one *period* in its middle are repeated. A period is one layer, or
as many layers as there are rounding buffers, because layers take the buffers in turn. Three
neighbouring periods must be alike. Only storages at the chunk's ends, such as the residual's
gradient, may be used on both sides of the missing layers. Otherwise the whole chunk is written.
Tests compare the result with the block of the whole chunk.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import Fates
from rematbench.engine.lowering.blocks.repeated_pieces import Position
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.program.action import Action
from rematbench.engine.program.program import Block, Periods
from rematbench.engine.program.storage import Storage, part_of
from rematbench.engine.program.template import LayerPeriods, LayerShift, waits_before
from rematbench.plan import Group, Transfers

MIN_SHARE = 0.5
"""The smallest share of a chunk's layers whose omission is worth the checks of a repetition."""


class Emitter(Protocol):
    w: BlockWriter

    def block(self) -> Block: ...


class Short(NamedTuple):
    """A chunk without most of its equal layers, and its fates. `first`: the number of the period's
    first layer; `period`: the layers of a period; `margin`: the equal layers on each side of the
    period; `reach`: by how many layers copies and gathers run ahead or lag; `dropped`: how many
    layers are missing, a multiple of `period`."""

    chunk: ChunkOps
    fates: Fates
    first: int
    period: int
    margin: int
    reach: int
    dropped: int

    @property
    def low(self) -> int:
        """The last layer below the period and its margin."""
        return self.first - self.margin

    @property
    def high(self) -> int:
        """The first layer above the period and its margin."""
        return self.first + self.period + self.margin

    def shift(self, layers: int, events: int, above: int) -> LayerShift:
        """Return a renaming that adds `layers` to the numbers of layers in the period and its
        margin, and `above` to the numbers of layers above them."""
        return LayerShift(layers, events, self.low, self.high, above)


def block_of(
    chunk: ChunkOps,
    fates: Fates,
    transfers: Transfers,
    ahead: int,
    emitter: Callable[[ChunkOps, Fates], Emitter],
    *,
    forward: bool,
) -> Block:
    """Return a chunk's block as its emitter writes it. If possible the emitter writes a short
    chunk, and one period is repeated. `ahead`: by how many layers parameter gathers run ahead."""
    short = short_chunk(chunk, fates, transfers, ahead)
    if short is not None:
        writer = emitter(short.chunk, short.fates)
        found = repeat_period(short, writer.block(), writer.w.unit_starts, forward=forward)
        if found is not None:
            return found
    return emitter(chunk, fates).block()


def short_chunk(chunk: ChunkOps, fates: Fates, transfers: Transfers, ahead: int) -> Short | None:
    slots = transfers.reload_slots if transfers.granularity == "layer" else 0
    period = max(1, slots)
    reach = 1 + max(transfers.release_lag, transfers.prefetch_layers, slots, ahead)
    margin = max(reach + 2, 2 * period)  # Layers just beyond the reach must be equal, too.
    around, least = 2 * margin + period, MIN_SHARE * len(chunk.layers)
    if len(chunk.layers) - around < least:  # Even with equal layers, too few could be dropped.
        return None
    start, stop = _longest_equal(chunk, fates)
    dropped = (stop - start - around) // period * period
    if dropped < least:
        return None
    cut = start + around
    left = [*range(cut), *range(cut + dropped, len(chunk.layers))]
    place = {number: index for index, number in enumerate(left)}
    kept = {
        (part, place[number] if part == "layer" else number, name): fate
        for (part, number, name), fate in fates.items()
        if part != "layer" or number in place
    }
    return Short(chunk.of_layers(left), kept, start + margin, period, margin, reach, dropped)


def _longest_equal(chunk: ChunkOps, fates: Fates) -> tuple[int, int]:
    """The longest run [first, last + 1) of layers with one operator table and equal fates. A layer
    that is rebuilt with a group, or in a window, differs from all others."""
    kinds: list[object] = []
    for unit in chunk.layer_unit.values():
        own = [fates[site] for _, _, site in chunk.saved(unit)]
        alone = any(f.window is not None or isinstance(f.scope, Group) for f in own)
        kinds.append(unit.prefix if alone else (unit.variant, own))
    best = start = stop = 0
    for index, kind in enumerate(kinds):
        start = start if index and kind == kinds[index - 1] else index
        if index + 1 - start > best:
            best, stop = index + 1 - start, index + 1
    return stop - best, stop


def repeat_period(
    short: Short, block: Block, unit_starts: Sequence[Position], *, forward: bool
) -> Block | None:
    """Return the whole chunk's block, made from the short chunk's block; None if the periods are
    not alike or refer to distant layers. `unit_starts`: where each unit's actions begin, in the
    order of the block."""
    units = [unit.prefix for unit in short.chunk.units]
    order = units if forward else units[::-1]
    at = order.index(part_of("L", short.first if forward else short.first + short.period - 1))
    edges = [unit_starts[at + k * short.period] for k in (-1, 0, 1, 2)]
    layers = short.period if forward else -short.period
    if not _alike(block, edges, short.shift(layers, edges[2].event - edges[1].event, 0)):
        return None
    start, end = edges[1].action, edges[2].action
    head, here, tail = block.written[:start], block.written[start:end], block.written[end:]
    lower, upper = (head, tail) if forward else (tail, head)
    oldest = unit_starts[at - short.reach].event
    if _crossing(short, [*lower, *here], [*upper, *here]) or waits_before([*here, *tail], oldest):
        return None
    return _longer(short, block, edges, forward=forward)


def _alike(block: Block, edges: Sequence[Position], shift: LayerShift) -> bool:
    """Whether each period between the edges equals the previous one, renamed by `shift`."""
    written = [block.written[a.action : b.action] for a, b in pairwise(edges)]
    inside = [_inside(block, a, b) for a, b in pairwise(edges)]
    return all(shift.of(one) == [*other] for one, other in pairwise(written)) and all(
        [each.later(shift.events) for each in one] == other for one, other in pairwise(inside)
    )


def _longer(short: Short, block: Block, edges: Sequence[Position], *, forward: bool) -> Block:
    """The whole chunk's block: the second of the three periods between the edges is repeated."""
    _, start, end, _ = edges
    times, gap = short.dropped // short.period + 1, short.dropped
    first, events = 0 if forward else gap, end.event - start.event
    layers = short.period if forward else -short.period
    near = (short.low + first, short.high + first)
    up = [*block.written[: end.action]]
    if not forward:  # A backward begins with the layers above the gap, whose numbers change.
        up = short.shift(first, 0, gap).of(up)
    tail = short.shift(gap - first, (times - 1) * events, gap).of(block.written[end.action :])
    periods = Periods(
        start=start.action,
        length=end.action - start.action,
        times=times,
        event=start.event,
        events=events,
        naming=LayerPeriods(layers, near),
        inside=tuple(_inside(block, start, end)),
    )
    ahead = [each for each in block.periods if each.start < start.action]
    behind = [
        each.later((times - 1) * events) for each in block.periods if each.start >= end.action
    ]
    return Block(block.label, (*up, *tail), (*ahead, periods, *behind))


def _inside(block: Block, start: Position, end: Position) -> list[Periods]:
    there = [each for each in block.periods if start.action <= each.start < end.action]
    return [each._replace(start=each.start - start.action) for each in there]


def _crossing(short: Short, lower: Iterable[Action], upper: Iterable[Action]) -> bool:
    """Whether actions below the missing layers use storages just above them, or the reverse."""
    near = range(short.first - short.reach, short.first + short.period + short.reach + 1)
    return any(short.high > number >= near.stop for number in _layers(lower)) or any(
        short.low < number < near.start for number in _layers(upper)
    )


def _layers(actions: Iterable[Action]) -> set[int]:
    storages: set[Storage] = set()
    for action in actions:
        storages.update(action.reads, action.frees, [alloc.storage for alloc in action.allocs])
    return {each.part.number for each in storages if each.part.letter == "L"}
