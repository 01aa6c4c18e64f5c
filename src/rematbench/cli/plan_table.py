"""The table of plans that `compare` and `search` print, and the lines that both print below it."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from rich.console import Console, JustifyMethod
from rich.table import Table

from rematbench.costs.flops import over_peak
from rematbench.evaluate.result import Result
from rematbench.host.console import gib, plain, rounded
from rematbench.host.table import GIB

WIDE = 150
"""The number of columns from which a terminal has room for long names."""

LONGEST, SHORT = 48, 36
"""The most characters of a name on one line: on a wide terminal, and on a narrower one."""


class Head(Struct, frozen=True):
    """A column: its heading, and whether it holds words.  `given_up`: its rank among the columns
    that are dropped if there is no room (the highest is dropped first; 0: never)."""

    text: str
    words: bool = False
    given_up: int = 0


def kept(heads: Sequence[Head], widths: Sequence[int], room: int, gap: int) -> list[int]:
    """Indices of the columns that stay: columns are dropped by rank until the rest fits."""
    stay = list(range(len(heads)))
    early = sorted((i for i in stay if heads[i].given_up), key=lambda i: heads[i].given_up)
    while early and sum(widths[i] + gap for i in stay) - gap > room:
        stay.remove(early.pop())
    return stay


class PlanTable:
    """A table of plans, whose columns are those that fit next to its first rows; no cell is cut.
    `gap`: spaces between columns."""

    def __init__(self, out: Console, heads: Sequence[Head], *, gap: int = 1) -> None:
        self.out, self.heads, self.gap = out, heads, gap
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
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=first)
        for head, width in zip(heads, self._widths, strict=True):
            justify: JustifyMethod = "left" if head.words else "right"
            table.add_column(head.text, justify=justify, no_wrap=True, min_width=width)
        for row in rows:
            table.add_row(*(plain(row[index]) for index in self.kept))
        taken = (max(w, widths[i]) for i, w in zip(self.kept, self._widths, strict=True))
        room = self.out.width
        self.out.width = max(room, sum(taken) + gap * (len(self.kept) - 1))
        self.out.print(table, crop=False)
        self.out.width = room

    @property
    def missing(self) -> list[str]:
        return [head.text for i, head in enumerate(self.heads) if i not in self.kept]

    def not_shown(self, instead: str) -> str:
        """A sentence that names the columns without room; `instead`: the options that show them."""
        if not self.kept or not self.missing:
            return ""
        names = ", ".join(text.replace("\n", " ") for text in self.missing)
        return f"columns not shown: {names} (use {instead})"


def folded_name(text: str, methods: Iterable[str], out: Console) -> str:
    """A name on one line, or broken into two where a method or a setting begins, as near to the
    middle as possible; a plus inside a value does not break it."""
    if len(text) <= (LONGEST if out.width >= WIDE else SHORT):
        return text
    names = "|".join(re.escape(name) for name in methods)
    parts = re.finditer(rf"\+(?=(?:{names})(?:[:+]|$))|(?<=[:,;])", text)
    middle = [part.start() for part in parts]
    at = min(middle, key=lambda place: abs(2 * place - len(text)), default=len(text))
    return f"{text[:at]}\n  {text[at:].strip()}".rstrip()


def summary(result: Result, layout: str = "") -> str:
    """A plan in a line: method, layout (if given), speed with its band, free device bytes, and the
    host memory of a node."""
    name = f"{result.method} at {layout}" if layout else result.method
    room = f"{gib(result.headroom_bytes or 0)} GiB left{', tight' if result.fit == 'tight' else ''}"
    host = (result.host_node_bytes or 0) / GIB if layout else 0.0
    room += f", {host:.0f} GiB of a node's host memory" if host else ""
    if result.not_timed:
        return f"{name}, {room}"
    low, high = result.band or (0.0, 0.0)
    speed = rounded(result.tokens_per_s_per_gpu or 0.0)
    return f"{name}, {speed} tokens/s/GPU ({rounded(low)} to {rounded(high)}), {room}"


def initials(result: Result) -> str:
    """One letter for each engine that runs a plan."""
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
