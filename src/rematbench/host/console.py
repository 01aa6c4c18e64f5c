"""Output of the command line: one-line errors, tables that are plain when piped, human units."""

import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rematbench.host.errors import UserError
from rematbench.host.table import GIB, TableText, repeats

PIPED_WIDTH = 160
NUMBER = re.compile(r"[-+]?[\d,.]+(e[-+]?\d+)?")


class CommandError(UserError):
    """A request that cannot be carried out; the message is one line with the allowed values."""


def console(*, error: bool = False) -> Console:
    """A console on stdout or stderr.  If the output is not a terminal, the console writes ASCII
    without colour, COLUMNS (else PIPED_WIDTH) characters wide."""
    stream = sys.stderr if error else sys.stdout
    if stream.isatty():
        return Console(file=stream, highlight=False)
    width = shutil.get_terminal_size((PIPED_WIDTH, 0)).columns
    return Console(file=stream, highlight=False, width=width, no_color=True)


def grid(*columns: str, title: str = "") -> Table:
    """An empty table: the first column (names) aligned left, the others (numbers) right."""
    table = Table(title=title or None, title_justify="left", box=box.ASCII2, pad_edge=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def align_left(table: Table, *indices: int) -> Table:
    """The table with the columns at `indices`, which hold text, aligned to the left."""
    for index in indices:
        table.columns[index].justify = "left"
    return table


def print_uncut(out: Console, table: Table) -> None:
    """Print a `grid` of numbers without cutting a cell.  A table that is wider than the console
    loses its frame; if it is still too wide, it exceeds the console.  Headings are wrapped."""
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
    """The text as rich prints it literally: square brackets are not read as markup."""
    return Text(text)


def gib(nbytes: float) -> str:
    """Bytes as GiB with two decimals (four below 0.1 GiB)."""
    value = nbytes / GIB
    return f"{value:.4f}" if 0 < abs(value) < 0.1 else f"{value:.2f}"


def percent(fraction: float | None) -> str:
    """A fraction as percent with one decimal; a dash for None."""
    return "-" if fraction is None else f"{100 * fraction:.1f} %"


def seconds(value: float) -> str:
    """Seconds with four significant digits."""
    return f"{value:.4g} s"


def rounded(value: float) -> str:
    """A rate without an exponent: four significant digits, or a whole number from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def worded(value: object) -> str:
    """A setting's value as text: floats with six significant digits, lists in brackets."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return f"[{','.join(map(worded, value))}]"
    return str(value)


def rich_table(table: TableText) -> Table:
    """A table for the terminal, with the same cells as its Markdown form.  Columns of words are
    aligned to the left, and a long text that repeats the row above becomes a ditto mark."""
    cells = [{row[at] for row in table.rows} - {"-"} for at in range(len(table.heads))]
    words = [at for at, texts in enumerate(cells) if not all(map(NUMBER.fullmatch, texts))]
    shown = align_left(grid(*table.heads, title=table.title), *words)
    above: tuple[str, ...] = ()
    for row in table.rows:
        shown.add_row(
            *(plain('"' if repeats(row, above, at) else text) for at, text in enumerate(row))
        )
        above = row
    return shown


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr if that is a terminal, and yield the function of (done, total)
    that moves it."""
    from rich import progress  # noqa: PLC0415  # most commands have no such bar

    err = console(error=True)
    columns = (
        progress.TextColumn(label),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(
        *columns, console=err, transient=True, disable=not err.is_terminal
    ) as bar:
        task = bar.add_task(label, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
