"""A lowered plan: for each rank, blocks of actions, and the order in which micro-batches run them.

A rank's program lists its actions in the host's issue order, in compressed form. A step names a
block, and the micro-batch and chunk for which the block runs. Equal passes of all micro-batches
share a block. `actions()` expands the steps.
"""

from collections.abc import Iterator
from functools import cached_property
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from rematbench.engine.program.action import Action, Kind, to_text
from rematbench.engine.program.storage import Event, ModelPart, event_of
from rematbench.engine.program.template import LayerPeriods, LayerShift, PiecePeriods, PieceShift


class Step(NamedTuple):
    """A run of a block for a (micro-batch, chunk)."""

    block: int
    micro_batch: int
    chunk: int


class Periods(NamedTuple):
    """Equal periods inside a block: `times` periods of `length` actions from action `start` on. All
    periods have the same seconds and bytes. The first period records events from number `event` on.
    Each further period raises the numbers of events by `events`, and the numbers of layers or
    pieces as `naming` says. `inside`: shorter periods inside the first period, counted from its
    start."""

    start: int
    length: int
    times: int
    event: int
    events: int
    naming: LayerPeriods | PiecePeriods
    inside: tuple["Periods", ...] = ()

    def later(self, events: int) -> "Periods":
        inside = tuple([each.later(events) for each in self.inside])
        return self._replace(event=self.event + events, inside=inside)

    def shift(self, number: int) -> LayerShift | PieceShift:
        return self.naming.shift(number, number * self.events)

    @property
    def shifts(self) -> list[LayerShift | PieceShift]:
        return [self.shift(number) for number in range(1, self.times)]


class Part(NamedTuple):
    """Some actions of a block in issue order.  If the part has `periods`, `written` has only the
    actions of the first period."""

    written: tuple[Action, ...]
    periods: Periods | None

    @property
    def times(self) -> int:
        """How often the actions occur, each time with other numbers in their names."""
        return self.periods.times if self.periods else 1

    @property
    def shifts(self) -> list[LayerShift | PieceShift]:
        return self.periods.shifts if self.periods else []

    @property
    def inside(self) -> tuple["Part", ...]:
        return parted(self.written, self.periods.inside) if self.periods else ()


def parted(written: tuple[Action, ...], periods: tuple[Periods, ...]) -> tuple[Part, ...]:
    """Split a block into the first period of each of `periods`, and the actions around them."""
    found, done = [], 0
    for each in periods:
        end = each.start + each.length
        found += [Part(written[done : each.start], None), Part(written[each.start : end], each)]
        done = end
    return tuple([part for part in (*found, Part(written[done:], None)) if part.written])


def _expanded(parts: tuple[Part, ...]) -> list[Action]:
    found: list[Action] = []
    for part in parts:
        first = _expanded(part.inside) if part.periods else part.written
        found += first
        for shift in part.shifts:
            found += shift.of(first)
    return found


def _counted(parts: tuple[Part, ...], times: int) -> Iterator[tuple[Action, int]]:
    for part in parts:
        if part.periods:
            yield from _counted(part.inside, times * part.times)
        else:
            yield from zip(part.written, repeat(times))


# Why: docs/decisions/engine.md, Does a step of a few micro-batches extrapolate to all?
class Block(Struct, frozen=True, dict=True):
    """Actions issued together. `label`: their purpose (F, B, D2H, RECV, ...). `written`: all
    actions, with only the first of equal `periods`."""

    label: str
    written: tuple[Action, ...]
    periods: tuple[Periods, ...] = ()

    @cached_property
    def copies(self) -> tuple[tuple[Action, int], ...]:
        """(copy, how often it occurs) for each copy of activations (not of states)."""
        moved = (pair for pair in self.counted() if pair[0].kind in (Kind.D2H, Kind.H2D))
        return tuple(pair for pair in moved if pair[0].part.letter not in ("", "P"))

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        return tuple(_expanded(self.parts)) if self.periods else self.written

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return parted(self.written, self.periods)

    def counted(self) -> Iterator[tuple[Action, int]]:
        """Return (written action, how often it occurs under names with other numbers)."""
        return _counted(self.parts, 1) if self.periods else zip(self.written, repeat(1))


class LateUnit(Struct, frozen=True, kw_only=True, gc=False):
    """Bytes of a unit's tensors that are allocated between activations. `states`: optimizer states,
    allocated by the unit's first update and never freed. `gradients`, by operator: allocated in
    each step by the first weight-gradient kernel of the operator (or of the unit, if the operator
    has none), and freed after the step. `scratch`: alive only during an update of the unit."""

    states: tuple[int, ...] = ()
    gradients: dict[str, tuple[int, ...]] = {}
    scratch: tuple[int, ...] = ()


# Why: docs/decisions/engine.md, Do Megatron-core's optimizer moments come late?
class Late(Struct, frozen=True, kw_only=True):
    """The tensors of a rank, by (chunk, unit), that are allocated between activations, wherever the
    allocator has room. A unit is E, L<i> or H. `beside`: gradients are allocated on the stream of
    reductions, so no activation can reuse their memory."""

    units: dict[tuple[int, ModelPart], LateUnit]
    beside: bool = False

    @property
    def state_bytes(self) -> int:
        """Bytes of the states that the first updates allocate."""
        return sum(sum(unit.states) for unit in self.units.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that each step allocates."""
        kept = (unit.gradients.values() for unit in self.units.values())
        return sum(sum(tensors) for unit in kept for tensors in unit)


class Samples(Struct, frozen=True, kw_only=True):
    """Micro-batches of differing lengths, in tokens. `at`: three lengths; the rank's program has
    the blocks for the first, and `shorter` those for the other two. `drawn`: the lengths of
    successive micro-batches."""

    at: tuple[int, int, int]
    drawn: tuple[int, ...]
    shorter: tuple[tuple[Block, ...], ...]


# Why: docs/decisions/engine.md, Is a program an event graph without issue order?
class RankProgram(Struct, frozen=True, kw_only=True, dict=True):
    """All actions of a pipeline rank in issue order. `late`: the tensors that the rank allocates
    between activations, if the stack does so. `samples`: the lengths of micro-batches, if they
    differ. `waiting_frees`: the stack's fact of this name (`Zero`)."""

    rank: int
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    late: Late | None = None
    samples: Samples | None = None
    waiting_frees: int = 0

    @cached_property
    def block_of_step(self) -> NDArray[np.intp]:
        return np.fromiter(map(itemgetter(0), self.steps), np.intp, len(self.steps))

    @cached_property
    def runs(self) -> list[int]:
        counts: list[int] = np.bincount(self.block_of_step, minlength=len(self.blocks)).tolist()
        return counts

    @cached_property
    def first_steps(self) -> list[Step]:
        _, first = np.unique(self.block_of_step, return_index=True)
        return [self.steps[at] for at in first.tolist()]

    def actions(self) -> Iterator[tuple[Action, int, int]]:
        """Yield (action, micro-batch, chunk) in the host's issue order."""
        for step in self.steps:
            for action in self.blocks[step.block].actions:
                yield action, step.micro_batch, step.chunk

    def text(self) -> str:
        """Return the rank's program as text: for each step `block LABEL`, then a line per
        action."""
        lines: list[str] = []
        for index, micro_batch, chunk in self.steps:
            block = self.blocks[index]
            lines.append(f"block {block.label}")
            lines += [to_text(action, micro_batch, chunk) for action in block.actions]
        return "\n".join(lines) + "\n"


class Program(Struct, frozen=True, kw_only=True, dict=True):
    """A program for each pipeline rank; the chunk `chunk` of `rank` is virtual stage chunk x pp +
    rank. `planned`: the addresses of activations are planned before the step; otherwise the
    framework's allocator chooses them, with expandable segments if `expandable`. `embedding`: the
    ranks that exchange the gradient of the token embedding, if any do. `slices`: tokens of the
    slices of a sequence that run as separate passes."""

    ranks: tuple[RankProgram, ...]
    planned: bool = False
    expandable: bool = False
    embedding: tuple[int, int] = (0, 0)
    slices: tuple[int, ...] = ()

    @property
    def pp(self) -> int:
        return len(self.ranks)

    @property
    def written(self) -> int:
        """The number of actions that the program stores."""
        return sum(len(block.written) for block, _ in self.block_runs)

    @cached_property
    def block_runs(self) -> tuple[tuple[Block, int], ...]:
        """(block, how often all ranks run it) for every distinct block."""
        found: dict[int, tuple[Block, int]] = {}
        for rank in self.ranks:
            for block, runs in zip(rank.blocks, rank.runs, strict=True):
                found[id(block)] = (block, runs + found.get(id(block), (block, 0))[1])
        return tuple(found.values())

    def text(self) -> str:
        return "".join(f"rank {r.rank}\n{r.text()}" for r in self.ranks)


def without_neighbours(program: Program) -> Program:
    """Return the program of the first rank alone, as a single GPU can run it: messages take no
    time. Use it only for seconds. Take bytes from the whole program, as no memory for messages is
    allocated here."""
    first = program.ranks[0]
    blocks = [replace(each, written=tuple(map(_instant, each.written))) for each in first.blocks]
    return replace(program, ranks=(replace(first, blocks=tuple(blocks)),))


def _instant(action: Action) -> Action:
    """The action; for a message, an event on its stream whose name no receive has."""
    if action.kind in (Kind.SEND, Kind.RECV):
        return Action(kind=Kind.EVENT, stream=action.stream, event=_there(action.event))
    wait = _there(action.wait)
    return action if wait is action.wait else replace(action, wait=wait)


def _there(event: Event | None) -> Event | None:
    return event_of(f"there_{event.message}") if event is not None and event.message else event
