"""The table of plans that `compare` and `search` print, and the lines that both print below it."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from rich.console import Console, JustifyMethod
from rich.table import Table

from rematbench.costs.flops import over_peak
from rematbench.evaluate.result import Result
from rematbench.host.console import align_left, grid, plain, print_uncut

WIDE = 150
"""Terminal width in columns from which names and parts of the step are on one line."""

LONGEST = 48
"""The most characters of a name on one line."""


class Head(Struct, frozen=True):
    """A column: its heading, whether it holds words, and its place in the order in which columns
    are dropped for room (the highest first; 0: never)."""

    text: str
    words: bool = False
    given_up: int = 0


def kept(heads: Sequence[Head], widths: Sequence[int], room: int, gap: int) -> list[int]:
    """Indices of the columns that stay: droppable columns go in order until the rest fits."""
    stay = list(range(len(heads)))
    early = sorted((i for i in stay if heads[i].given_up), key=lambda i: heads[i].given_up)
    while early and sum(widths[i] + gap for i in stay) - gap > room:
        stay.remove(early.pop())
    return stay


class PlanTable:
    """A table of plans, whose columns are those that fit next to its first rows; no cell is cut.
    `gap`: spaces between columns.  A `framed` table has a frame if there is room for one."""

    def __init__(
        self, out: Console, heads: Sequence[Head], *, gap: int = 1, framed: bool = False
    ) -> None:
        self.out, self.heads, self.gap, self.framed = out, heads, gap, framed
        self.kept: list[int] = []
        self._widths: list[int] = []

    def rows(self, rows: Sequence[Sequence[str]]) -> None:
        """Print rows; the first ones under their headings."""
        first, gap = not self.kept, self.gap
        texts = [[head.text for head in self.heads], *rows] if first else rows
        widths = [max(map(len, "\n".join(each).split("\n"))) for each in zip(*texts, strict=True)]
        if first:
            self.kept = kept(self.heads, widths, self.out.width, gap)
            self._widths = [widths[index] for index in self.kept]
        heads = [self.heads[index] for index in self.kept]
        if self.framed:
            table = align_left(
                grid(*(head.text for head in heads)),
                *(at for at, head in enumerate(heads) if head.words),
            )
        else:
            table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=first)
            for head, width in zip(heads, self._widths, strict=True):
                justify: JustifyMethod = "left" if head.words else "right"
                table.add_column(head.text, justify=justify, no_wrap=True, min_width=width)
        for row in rows:
            table.add_row(*(plain(row[index]) for index in self.kept))
        if self.framed:
            print_uncut(self.out, table)
            return
        taken = (max(w, widths[i]) for i, w in zip(self.kept, self._widths, strict=True))
        room = self.out.width
        self.out.width = max(room, sum(taken) + gap * (len(self.kept) - 1))
        self.out.print(table, crop=False)
        self.out.width = room

    @property
    def missing(self) -> list[str]:
        """The headings of the columns that are not shown."""
        return [head.text for i, head in enumerate(self.heads) if i not in self.kept]

    def say_missing(self, instead: str) -> None:
        """Print the columns that had no room; `instead`: the options that show them."""
        if self.kept and self.missing:
            names = ", ".join(text.replace("\n", " ") for text in self.missing)
            self.out.print(plain(f"columns not shown: {names} (use {instead})"))


def folded_name(text: str, methods: Iterable[str]) -> str:
    """A composition's name, a line per method and setting; a plus inside a value stays."""
    names = "|".join(re.escape(name) for name in methods)
    lines = re.split(rf"\+(?=(?:{names})(?:[:+]|$))", text)
    return "\n+".join(lines).replace(":", ":\n  ").replace(",", ",\n  ")


def initials(result: Result) -> str:
    """The engines that run a plan, a letter each."""
    return " ".join(engine[0].upper() for engine in result.runs_on) or "-"


def over_peaks(results: Iterable[Result]) -> list[str]:
    """A line for each reason why an MFU of the results is over 100 %."""
    shares = (result.evaluation for result in results if result.evaluation is not None)
    reasons = dict.fromkeys(over_peak(each.mfu_causal, each.mfu_dense) for each in shares)
    return [f"MFU {why}" for why in reasons if why]


def outside_line(results: Iterable[Result]) -> list[str]:
    """A line on the properties of the results that no published row has, if there are any."""
    words = dict.fromkeys(word for result in results for word in result.outside)
    return [f"outside of the published range: {'; '.join(words)}"] if words else []


def as_cells(row: dict[str, Any]) -> dict[str, Any]:
    """A row as in the CSV file: empty for None, yes and no for booleans."""
    words = {True: "yes", False: "no"}
    return {
        key: "" if value is None else words[value] if isinstance(value, bool) else value
        for key, value in row.items()
    }
