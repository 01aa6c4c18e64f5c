"""Tables as data: typed columns, written as CSV (raw) and as rounded texts.

The rounded forms are JSON (which the page shows), Markdown and LaTeX.
"""

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

Cells = Mapping[str, Any]
Show = Callable[[Any], str]
GIB = 2**30
SUFFIXES = (".csv", ".json", ".md", ".tex")
"""The suffixes of a table's files."""


LONG = 40
"""A cell with more letters than this is prose and gets a wide column."""


class Column(Struct, frozen=True):
    """One column: its key in the data and the CSV, its heading with the unit, and the function that
    formats a value.  A column without a heading is only in the CSV, for figures."""

    key: str
    heading: str
    show: Show = str


class TableText(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table as formatted text: headings and rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str


class Table(Struct, frozen=True, kw_only=True):
    """A named table.  `title` names its content and the world; `note` explains how to read it.
    Markdown and LaTeX show the first `shown` rows (0: all rows) and the number of omitted rows; the
    CSV has all rows."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[Cells, ...]
    note: str = ""
    shown: int = 0

    def csv(self) -> str:
        """The CSV: raw values under the columns' keys."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        for row in self.rows:
            writer.writerow([row.get(column.key, "") for column in self.columns])
        return out.getvalue()

    @property
    def headed(self) -> list[Column]:
        """The columns with a heading."""
        return [column for column in self.columns if column.heading]

    def texts(self) -> tuple[tuple[str, ...], ...]:
        """The texts of the rows to show."""
        rows = self.rows[: self.shown] if self.shown else self.rows
        return tuple(tuple(_shown(c, row.get(c.key)) for c in self.headed) for row in rows)

    @property
    def full_note(self) -> str:
        """The note, and the number of omitted rows."""
        cut = len(self.rows) - self.shown if self.shown else 0
        more = f"{cut} more rows in {self.name}.csv." if cut > 0 else ""
        return " ".join(part for part in (self.note, more) if part)

    def printed(self) -> TableText:
        """The table as formatted text."""
        heads = tuple(column.heading for column in self.headed)
        return TableText(title=self.title, heads=heads, rows=self.texts(), note=self.full_note)

    def markdown(self) -> str:
        """A Markdown table with its title and note."""
        heads = [column.heading for column in self.headed]
        body = [[cell.replace("|", "\\|") for cell in row] for row in self.texts()]
        widths = [max(len(row[i]) for row in [heads, *body]) for i in range(len(heads))]
        lines = [_pipe(heads, widths), _pipe(["-" * width for width in widths], widths)]
        lines += [_pipe(row, widths) for row in body]
        note = f"\n{self.full_note}\n" if self.full_note else ""
        return f"### {self.title}\n\n" + "\n".join(lines) + f"\n{note}"

    def latex(self) -> str:
        """A LaTeX tabular (booktabs) in a table environment."""
        heads = [column.heading for column in self.headed]
        body = [_ampersands(row) for row in self.texts()]
        lines = [
            r"\begin{table}",
            rf"\caption{{{_escape(f'{self.title}. {self.full_note}'.strip())}}}",
            rf"\label{{tab:{self.name}}}",
            rf"\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
            *(r"\toprule", _ampersands(heads), r"\midrule", *body, r"\bottomrule"),
            r"\end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Write NAME.csv, NAME.json, NAME.md and NAME.tex into a folder; without a heading, only
        the CSV."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = [self.csv()]
        if self.headed:
            shown = msgspec.json.format(msgspec.json.encode(self.printed())).decode()
            texts += [shown + "\n", self.markdown(), self.latex()]
        for suffix, text in zip(SUFFIXES, texts, strict=False):
            path = folder / f"{self.name}{suffix}"
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)


def sheet(name: str, rows: Sequence[Cells]) -> Table:
    """A table that is written as CSV only: all columns of the rows."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = tuple(Column(key, "") for key in keys)
    return Table(name=name, title="", columns=columns, rows=tuple(rows))


def repeats(row: Sequence[str], above: Sequence[str], column: int) -> bool:
    """Whether a cell is prose and it and all cells to its left equal the cells above."""
    return len(row[column]) > LONG and row[: column + 1] == above[: column + 1]


def _pipe(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(padded)} |"


def _ampersands(cells: Sequence[str]) -> str:
    return " & ".join(_escape(cell) for cell in cells) + r" \\"


def _shown(column: Column, value: Any) -> str:
    return "-" if value is None or value == "" else column.show(value)


_LATEX = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "<": r"$<$", ">": r"$>$"}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)


def whole(value: Any) -> str:
    """A number without decimals."""
    return f"{float(value):,.0f}"


def fixed(digits: int) -> Show:
    """A function that shows a number with `digits` decimals."""
    return lambda value: f"{float(value):,.{digits}f}"


def percent(value: Any) -> str:
    """A fraction in percent with one decimal; the heading has the percent sign."""
    return f"{100 * float(value):.1f}"


def signed_percent(value: Any) -> str:
    """A fraction in percent with its sign and one decimal."""
    return f"{100 * float(value):+.1f}"


def gib(value: Any) -> str:
    """Bytes in GiB with two decimals."""
    return f"{float(value) / GIB:.2f}"


def seconds(value: Any) -> str:
    """Seconds with four digits, because steps take milliseconds or minutes."""
    return f"{float(value):.4g}"


def exponent(value: Any) -> str:
    """A small number with an exponent and two digits."""
    return f"{float(value):.1e}"


def write_sheet(
    path: Path, rows: Sequence[Mapping[str, object]], columns: Iterable[str] = ()
) -> None:
    """Write rows as CSV, with `columns` first and then all further columns of the rows.  The file
    is replaced atomically."""
    columns = list(dict.fromkeys([*columns, *(column for row in rows for column in row)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)
