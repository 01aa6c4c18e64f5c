"""How the command line speaks: one-line errors, plain tables when piped, human units."""

import sys

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPED_WIDTH = 160
GIB = 2**30


class CommandError(ValueError):
    """A person's request cannot be done; the message is one line: what, where, allowed."""


def console(*, error: bool = False) -> Console:
    """A console that writes ASCII without colour, at a fixed width, when it is not a terminal."""
    stream = sys.stderr if error else sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    return Console(file=stream, highlight=False, width=PIPED_WIDTH, no_color=True)


def grid(*columns: str, title: str = "") -> Table:
    """A compact table: the first column to the left, numbers to the right."""
    table = Table(title=title or None, title_justify="left", box=box.ASCII2, pad_edge=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def left(table: Table, *indices: int) -> Table:
    """Align some columns to the left (texts)."""
    for index in indices:
        table.columns[index].justify = "left"
    return table


def show_whole(out: Console, table: Table) -> None:
    """Print a `grid` of numbers so that no cell is cut: without its frame where that has no room,
    and beyond the width where nothing else helps.  Headings fold."""
    numbers = [
        max((len(line) for cell in column.cells for line in str(cell).split("\n")), default=0)
        for column in table.columns
    ]
    for column, width in zip(table.columns, numbers, strict=True):
        column.min_width = width
    framed, bare = sum(numbers) + 3 * len(numbers) + 1, sum(numbers) + len(numbers)
    if framed > out.width:
        table.box, table.pad_edge, table.padding = None, False, (0, 1, 0, 0)
    width = out.width
    out.width = max(width, bare)
    out.print(table, crop=False)
    out.width = width


def plain(text: str) -> Text:
    """Text with no markup (brackets in reasons stay brackets)."""
    return Text(text)


def gib(nbytes: float) -> str:
    """Bytes in GiB with two decimals (four below a tenth)."""
    value = nbytes / GIB
    return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def percent(fraction: float | None) -> str:
    """A fraction in percent with one decimal; a dash when there is none."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def seconds(value: float) -> str:
    """Seconds with four significant digits."""
    return f"{value:.4g} s"


def rounded(value: float) -> str:
    """A rate with four significant digits and no exponent."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
