"""Tables of the paper: rows as a pandas DataFrame under columns with a heading, unit and format.

config/tables.yaml declares the titles, columns and notes.  pandas writes the raw values as CSV, and
the formatted cells as Markdown and LaTeX; the page reads them as JSON.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from msgspec import Struct

from rematbench.costs.flops import over_peak
from rematbench.host.files import write_atomically
from rematbench.host.table import GIB, SUFFIXES, TableText
from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir

Cells = Mapping[str, Any]
Show = Callable[[Any], str]
Heading = str | tuple[str, str]
"""A heading, or a heading and the format of its column."""


def _spec(spec: str) -> Show:
    return lambda value: format(float(value), spec)


def whole(value: Any) -> str:
    """A number without decimals."""
    return f"{float(value):,.0f}"


def percent(value: Any) -> str:
    """A fraction in percent with one decimal; the heading has the percent sign."""
    return f"{100 * float(value):.1f}"


def signed_percent(value: Any) -> str:
    """A fraction in percent with its sign and one decimal."""
    return f"{100 * float(value):+.1f}"


def gib(value: Any) -> str:
    """Bytes in GiB with two decimals; less than 0.1 GiB as MiB, with the unit."""
    amount = float(value) / GIB
    return f"{1024 * amount:.3g} MiB" if 0 < abs(amount) < 0.1 else f"{amount:.2f}"


def mib(value: Any) -> str:
    """Bytes in MiB with three decimals."""
    return f"{float(value) / 2**20:,.3f}"


FORMATS: dict[str, Show] = {
    "percent": percent,
    "signed_percent": signed_percent,
    "gib": gib,
    "mib": mib,
    "whole": whole,
    "seconds": _spec(".4g"),  # steps take milliseconds or minutes
    "exponent": _spec(".1e"),
}


class Column(Struct, frozen=True):
    """One column: its key in the data and the CSV, its heading with the unit, and the function that
    formats a value.  A column without a heading is only in the CSV, for figures."""

    key: str
    heading: str
    show: Show = str


class Declared(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of config/tables.yaml, which says what the fields mean."""

    title: str
    columns: tuple[str | dict[str, Heading], ...]
    note: str = ""
    shown: int = 0


class TablesFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of config/tables.yaml."""

    columns: dict[str, Heading]
    tables: dict[str, Declared]


@cache
def declared() -> TablesFile:
    """The tables of config/tables.yaml, and the columns that several of them share."""
    path = data_dir("config") / "tables.yaml"
    return convert(read_mapping(path, str(path)), TablesFile, str(path))


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

    @property
    def raw(self) -> pd.DataFrame:
        """All rows as they are, with the columns' keys."""
        keys = [column.key for column in self.columns]
        return pd.DataFrame(
            [[row.get(key) for key in keys] for row in self.rows], columns=keys, dtype=object
        )

    @property
    def texts(self) -> pd.DataFrame:
        """The formatted cells of the rows to show, under the headings."""
        headed = [column for column in self.columns if column.heading]
        rows = self.rows[: self.shown] if self.shown else self.rows
        cells = [[_shown(column, row.get(column.key)) for column in headed] for row in rows]
        return pd.DataFrame(cells, columns=[column.heading for column in headed], dtype=object)

    @property
    def full_note(self) -> str:
        """The note, why an MFU is over 100 %, and the number of omitted rows."""
        cut = len(self.rows) - self.shown if self.shown else 0
        more = f"{cut} more rows in {self.name}.csv." if cut > 0 else ""
        return " ".join(part for part in (self.note, self._over_peak, more) if part)

    @property
    def _over_peak(self) -> str:
        """Why a shown MFU is over 100 %; empty if none is."""
        shown = {column.key for column in self.columns if column.heading}
        causal, dense = (
            max((float(row.get(key) or 0.0) for row in self.rows if key in shown), default=0.0)
            for key in ("mfu_causal", "mfu_dense")
        )
        why = over_peak(causal, dense)
        return f"MFU {why}." if why else ""

    def printed(self) -> TableText:
        texts = self.texts
        heads, rows = map(str, texts.columns), map(tuple, texts.to_numpy())
        return TableText(
            title=self.title, heads=tuple(heads), rows=tuple(rows), note=self.full_note
        )

    def csv(self) -> str:
        """The CSV: raw values under the columns' keys."""
        return self.raw.to_csv(index=False, lineterminator="\n")

    def markdown(self) -> str:
        """A Markdown table with its title and note."""
        texts = self.texts.map(lambda cell: cell.replace("|", "\\|"))
        body = texts.to_markdown(index=False, tablefmt="github", disable_numparse=True)
        note = f"\n{self.full_note}\n" if self.full_note else ""
        return f"### {self.title}\n\n{body}\n{note}"

    def latex(self) -> str:
        """A LaTeX tabular (booktabs) in a table environment."""
        texts = self.texts.rename(columns=_escape).map(_escape)
        return texts.to_latex(
            index=False,
            escape=False,
            caption=_escape(f"{self.title}. {self.full_note}".strip()),
            label=f"tab:{self.name}",
            column_format=f"l{'r' * (texts.shape[1] - 1)}",
        )

    def write(self, folder: Path) -> None:
        """Write NAME.csv, NAME.json, NAME.md and NAME.tex into a folder; a table without headings
        is written only as CSV."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = [self.csv()]
        if any(column.heading for column in self.columns):
            shown = msgspec.json.format(msgspec.json.encode(self.printed())).decode()
            texts += [shown + "\n", self.markdown(), self.latex()]
        for suffix, text in zip(SUFFIXES, texts, strict=False):
            write_atomically(folder / f"{self.name}{suffix}", text.encode())


def table_of(
    name: str, rows: Iterable[Cells], shows: Mapping[str, Show] | None = None, **words: object
) -> Table:
    """The table `name` of config/tables.yaml.  `shows`: functions that format the columns for which
    the file declares no format; `words` replace `{word}` in its title, headings and note."""
    own = declared().tables[name]
    return Table(
        name=name,
        title=own.title.format(**words),
        columns=tuple(
            Column(key, heading.format(**words), (shows or {}).get(key, show))
            for key, heading, show in _columns(own)
        ),
        rows=tuple(rows),
        note=own.note.format(**words).strip(),
        shown=own.shown,
    )


def _columns(own: Declared) -> Iterator[tuple[str, str, Show]]:
    usual = declared().columns
    for item in own.columns:
        given = {k: usual.get(k, k) for k in item.split()} if isinstance(item, str) else item
        for key, said in given.items():
            if key == "hidden" and isinstance(said, str):
                yield from ((one, "", str) for one in said.split())
            elif isinstance(said, str):
                yield key, said, str
            else:
                yield key, said[0], FORMATS.get(said[1]) or _spec(said[1])


def sheet(name: str, rows: Sequence[Cells]) -> Table:
    """A table that is written as CSV only: all columns of the rows."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return Table(
        name=name, title="", columns=tuple(Column(key, "") for key in keys), rows=tuple(rows)
    )


def _shown(column: Column, value: Any) -> str:
    return "-" if value is None or value == "" else column.show(value)


_LATEX = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "<": r"$<$", ">": r"$>$"}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
