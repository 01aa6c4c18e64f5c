"""A lowered plan: per rank, blocks of actions and the order in which micro-batches go through them.

A rank's program is the list of its actions in host issue order.  It is stored compressed: a step
names a block (a list of actions shared by all micro-batches of the same kind) and the micro-batch
and chunk it is run for; `actions()` expands it.
"""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec import Struct

from rematbench.action import Action, from_text, to_text


class Step(NamedTuple):
    """Run one block for one (micro-batch, chunk)."""

    block: int
    micro_batch: int
    chunk: int


class Block(Struct, frozen=True):
    """Actions issued together; `label` says what they are (F, B, D2H, RECV, ...)."""

    label: str
    actions: tuple[Action, ...]


class RankProgram(Struct, frozen=True, kw_only=True):
    """All actions of one pipeline rank in issue order."""

    rank: int
    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]

    def actions(self) -> Iterator[tuple[Action, int, int]]:
        """(action, micro-batch, chunk) in host issue order."""
        for step in self.steps:
            for action in self.blocks[step.block].actions:
                yield action, step.micro_batch, step.chunk

    def text(self) -> str:
        """The rank's program as lines that diff (and parse back)."""
        return "\n".join(to_text(*item) for item in self.actions()) + "\n"


class Program(Struct, frozen=True, kw_only=True):
    """One program per pipeline rank; `virtual(rank, chunk)` = chunk x pp + rank."""

    ranks: tuple[RankProgram, ...]

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    def num_actions(self) -> int:
        """Actions in all, expanded."""
        return sum(
            len(rank.blocks[step.block].actions) for rank in self.ranks for step in rank.steps
        )

    def text(self) -> str:
        """All ranks, each under a `rank N` line."""
        return "".join(f"rank {r.rank}\n{r.text()}" for r in self.ranks)


def parse_program(text: str) -> Program:
    """Read `Program.text` back: every action becomes a block of its own."""
    ranks: list[RankProgram] = []
    blocks: list[Block] = []
    steps: list[Step] = []
    for line in text.splitlines():
        if line.startswith("rank "):
            if blocks:
                ranks.append(_close(len(ranks), blocks, steps))
            blocks, steps = [], []
            continue
        action, micro_batch, chunk = from_text(line)
        steps.append(Step(len(blocks), micro_batch, chunk))
        blocks.append(Block(action.kind.value, (action,)))
    ranks.append(_close(len(ranks), blocks, steps))
    return Program(ranks=tuple(ranks))


def _close(rank: int, blocks: list[Block], steps: list[Step]) -> RankProgram:
    return RankProgram(rank=rank, blocks=tuple(blocks), steps=tuple(steps))
