"""Tables of the paper: rows as a pandas DataFrame under columns with a heading, unit and format.

A column that several tables have stands once, in SHEET.  pandas writes the raw values as CSV, and
the formatted cells as Markdown and LaTeX; the page reads them as JSON.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
from msgspec import Struct

from rematbench.costs.flops import over_peak
from rematbench.host.files import write_atomically
from rematbench.host.table import GIB, SUFFIXES, TableText

Cells = Mapping[str, Any]
Show = Callable[[Any], str]


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
    """Bytes in GiB with two decimals; less than 0.1 GiB as MiB, with the unit."""
    amount = float(value) / GIB
    return f"{1024 * amount:.3g} MiB" if 0 < abs(amount) < 0.1 else f"{amount:.2f}"


def mib(value: Any) -> str:
    """Bytes in MiB with three decimals."""
    return f"{float(value) / 2**20:,.3f}"


def seconds(value: Any) -> str:
    """Seconds with four digits, because steps take milliseconds or minutes."""
    return f"{float(value):.4g}"


def exponent(value: Any) -> str:
    """A small number with an exponent and two digits."""
    return f"{float(value):.1e}"


SHEET: dict[str, tuple[str, Show]] = {
    "binds": ("what binds", str),
    "cluster": ("cluster", str),
    "error": ("error %", signed_percent),
    "fits": ("fits", str),
    "gap": ("gap %", percent),
    "gpus": ("GPUs", whole),
    "headroom_bytes": ("headroom GiB", gib),
    "high": ("high", fixed(1)),
    "host_node_bytes": ("pinned GiB/node", gib),
    "job": ("job", str),
    "layout": ("layout", str),
    "layouts": ("layouts", whole),
    "left_out": ("left out %", percent),
    "low": ("low", fixed(1)),
    "memory_gib": ("memory GiB", fixed(0)),
    "method": ("method", str),
    "mfu_causal": ("MFU causal %", percent),
    "mfu_dense": ("MFU dense %", percent),
    "model": ("model", str),
    "n": ("n", whole),
    "outside": ("outside", str),
    "peak_device_bytes": ("peak GiB", gib),
    "point": ("point", str),
    "predicted_s": ("predicted s", seconds),
    "predicted_step_s": ("predicted", seconds),
    "problem": ("problem", str),
    "published": ("published", str),
    "reason": ("why not", str),
    "recompute": ("recompute", str),
    "remark": ("remark", str),
    "reserved_bytes": ("reserved GiB", gib),
    "rows": ("rows", whole),
    "seq_len": ("tokens", whole),
    "source": ("source", str),
    "status": ("status", str),
    "step_s": ("step s", seconds),
    "system": ("system", str),
    "tokens_per_s_per_gpu": ("tokens/s/GPU", fixed(1)),
    "world": ("world", str),
}
"""The heading (with its unit) and the format of each column that more than one table has."""


class Column(Struct, frozen=True):
    """One column: its key in the data and the CSV, its heading with the unit, and the function that
    formats a value.  A column without a heading is only in the CSV, for figures."""

    key: str
    heading: str
    show: Show = str


def columns(keys: str) -> tuple[Column, ...]:
    """The columns of SHEET with these keys (words of one text); the heading of another key is the
    key itself."""
    return tuple(Column(key, *SHEET.get(key, (key,))) for key in keys.split())


def hidden(keys: str) -> tuple[Column, ...]:
    """Columns that only the CSV has."""
    return tuple(Column(key, "") for key in keys.split())


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
        """Write NAME.csv, NAME.json, NAME.md and NAME.tex into a folder; without a heading, only
        the CSV."""
        folder.mkdir(parents=True, exist_ok=True)
        texts = [self.csv()]
        if any(column.heading for column in self.columns):
            shown = msgspec.json.format(msgspec.json.encode(self.printed())).decode()
            texts += [shown + "\n", self.markdown(), self.latex()]
        for suffix, text in zip(SUFFIXES, texts, strict=False):
            write_atomically(folder / f"{self.name}{suffix}", text.encode())


def sheet(name: str, rows: Sequence[Cells]) -> Table:
    """A table that is written as CSV only: all columns of the rows."""
    keys = dict.fromkeys(key for row in rows for key in row)
    return Table(name=name, title="", columns=hidden(" ".join(keys)), rows=tuple(rows))


def _shown(column: Column, value: Any) -> str:
    return "-" if value is None or value == "" else column.show(value)


_LATEX = {"%": r"\%", "_": r"\_", "&": r"\&", "#": r"\#", "<": r"$<$", ">": r"$>$"}


def _escape(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in text)
