"""A lowered plan: for each rank, blocks of actions, and the order in which micro-batches run them.

A rank's program is the list of its actions in the host's issue order, stored compressed: a step
names a block (actions shared by all micro-batches of one kind) and the micro-batch and chunk that
the block runs for; `actions()` expands the steps.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, repeat
from operator import itemgetter
from typing import NamedTuple

from msgspec import Struct

from rematbench.program.action import Action, from_text, to_text
from rematbench.program.late import Late
from rematbench.program.template import Shift


class Step(NamedTuple):
    """Run one block for one (micro-batch, chunk)."""

    block: int
    micro_batch: int
    chunk: int


class Periods(NamedTuple):
    """Equal periods inside a block, each of one or a few equal layers: `times` periods of `length`
    actions from `start`.  Periods take equally long and need equal bytes; numbers of events are
    higher by `events` than those of the period before, and numbers of the layers between those of
    `near` by `layers`."""

    start: int
    length: int
    times: int
    events: int
    layers: int
    near: tuple[int, int]

    def shift(self, number: int) -> Shift:
        """The names of period `number`, from those of period 0."""
        return Shift(number * self.layers, number * self.events, *self.near, 0)


class Block(Struct, frozen=True, dict=True):
    """Actions issued together; `label` names their purpose (F, B, D2H, RECV, ...).  `written`: all
    actions, or, where `periods` repeat, those before, in the first and behind the last of them."""

    label: str
    written: tuple[Action, ...]
    periods: Periods | None = None

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions in issue order."""
        if self.periods is None:
            return self.written
        head, period, tail = self.parts
        again = (self.periods.shift(number).of(period) for number in range(self.periods.times))
        return (*head, *chain.from_iterable(again), *tail)

    @property
    def parts(self) -> tuple[tuple[Action, ...], ...]:
        """The actions before periods, of the first period, and behind all periods; without periods
        the first part has all actions."""
        start, end = len(self.written), len(self.written)
        if self.periods is not None:
            start, end = self.periods.start, self.periods.start + self.periods.length
        return self.written[:start], self.written[start:end], self.written[end:]

    @property
    def count(self) -> int:
        """The number of actions."""
        return sum(times for _, times in self.counted())

    def counted(self) -> Iterator[tuple[Action, int]]:
        """The block's actions, and how often each occurs but for the numbers in its names: of
        periods that repeat, the first period's."""
        head, period, tail = self.parts
        yield from zip(head, repeat(1))
        yield from zip(period, repeat(self.periods.times if self.periods else 1))
        yield from zip(tail, repeat(1))


class RankProgram(Struct, frozen=True, kw_only=True, dict=True):
    """All actions of one pipeline rank in issue order.  `late`: the tensors that the rank makes
    between its activations, where the stack says so."""

    rank: int
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    late: Late | None = None

    @cached_property
    def runs(self) -> list[int]:
        """How often each block runs."""
        counts = Counter(map(itemgetter(0), self.steps))
        return [counts[index] for index in range(len(self.blocks))]

    def actions(self) -> Iterator[tuple[Action, int, int]]:
        """Yield (action, micro-batch, chunk) in the host's issue order."""
        for step in self.steps:
            for action in self.blocks[step.block].actions:
                yield action, step.micro_batch, step.chunk

    def text(self) -> str:
        """The rank's program as lines (to compare and to parse): `block F`, then its actions."""
        lines: list[str] = []
        for index, micro_batch, chunk in self.steps:
            block = self.blocks[index]
            lines.append(f"block {block.label}")
            lines += [to_text(action, micro_batch, chunk) for action in block.actions]
        return "\n".join(lines) + "\n"


class Program(Struct, frozen=True, kw_only=True, dict=True):
    """One program per pipeline rank; `virtual(rank, chunk)` = chunk x pp + rank.  Activation
    addresses are planned before the step (`planned`), or chosen by the framework's allocator, with
    expandable segments (`expandable`) or without."""

    ranks: tuple[RankProgram, ...]
    planned: bool = False
    expandable: bool = False

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def actions(self) -> int:
        """The actions of all distinct blocks."""
        return sum(block.count for block, _ in self.block_runs)

    @property
    def written(self) -> int:
        """The actions that are in memory."""
        return sum(len(block.written) for block, _ in self.block_runs)

    @cached_property
    def block_runs(self) -> tuple[tuple[Block, int], ...]:
        """Every distinct block of all ranks, and how often the ranks run it."""
        found: dict[int, tuple[Block, int]] = {}
        for rank in self.ranks:
            for block, runs in zip(rank.blocks, rank.runs, strict=True):
                found[id(block)] = (block, runs + found.get(id(block), (block, 0))[1])
        return tuple(found.values())

    def text(self) -> str:
        """The programs of all ranks, each after a line `rank N`."""
        return "".join(f"rank {r.rank}\n{r.text()}" for r in self.ranks)


def parse_program(text: str) -> Program:
    """The program of a text of `Program.text`; equal blocks become one block, as in `lower`."""
    return Program(
        ranks=tuple(
            _parse_rank(number, re.split(r"^block ", words, flags=re.M)[1:])
            for number, words in enumerate(re.split(r"^rank \d+\n", text, flags=re.M)[1:])
        )
    )


def _parse_rank(rank: int, texts: list[str]) -> RankProgram:
    blocks: dict[Block, int] = {}
    steps: list[Step] = []
    for text in texts:
        label, *lines = text.splitlines()
        items = [from_text(line) for line in lines]
        if len({item[1:] for item in items}) != 1:
            raise ValueError(f"block {label} must hold actions of one (micro-batch, chunk)")
        block = Block(label, tuple(action for action, _, _ in items))
        steps.append(Step(blocks.setdefault(block, len(blocks)), *items[0][1:]))
    return RankProgram(rank=rank, blocks=tuple(blocks), steps=tuple(steps))
