"""The page as HTML: one template without scripts, fonts or other files."""

import base64
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.table import GIB, LONG, TableText, repeats
from rematbench.paper.matrix.sweep import TABLES
from rematbench.paper.page import Page, what_is_not_modelled
from rematbench.paper.tables.matrix import NAMES

Row = Mapping[str, str]


Cell = tuple[str, str]
"""A cell's text and its class: n (in a column of numbers), t (prose), ditto, or empty."""


class Shown(Struct, frozen=True):
    """A table in the form that the template needs. `heads` are the visible columns, and `hidden`
    the columns that a click shows. Each line has the visible cells and the hidden (heading, text)
    pairs."""

    heads: tuple[Cell, ...]
    hidden: tuple[str, ...]
    lines: tuple[tuple[tuple[Cell, ...], tuple[tuple[str, str], ...]], ...]


class Grid(Struct, frozen=True, kw_only=True):
    """The matrix of one model and cluster. Each arm has its name, its command-line name, and a row
    with its command for each length (None: not run)."""

    table: str
    name: str
    lengths: tuple[int, ...]
    arms: tuple[tuple[str, str, tuple[tuple[Row, str] | None, ...]], ...]


# Why: docs/decisions/paper.md, Is the page made from Markdown that is parsed back?
def page_html(page: Page, grids: Sequence[Grid] = ()) -> str:
    from jinja2 import (  # noqa: PLC0415 (slow to load)
        Environment,
        FileSystemLoader,
        StrictUndefined,
    )

    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters["picture"] = picture
    template = templates.get_template("page.html.jinja")
    return template.render(
        page=page, grids=grids, shown=shown, GIB=GIB, not_modelled=what_is_not_modelled(page.config)
    )


def picture(path: Path) -> str:
    """A PNG file as a data URL, so that the page is self-contained."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"data:image/png;base64,{data}"


def shown(table: TableText, folded: Sequence[str]) -> Shown:
    """A table in the form that the template needs; a click shows the columns in `folded`."""
    heads = list(enumerate(table.heads))
    open_, hidden = ([i for i, h in heads if (h in folded) is behind] for behind in (False, True))
    numbers = {i for i in open_ if any(_is_number(row[i]) for row in table.rows)}
    before: Sequence[Sequence[str]] = [(), *table.rows]
    return Shown(
        tuple((table.heads[i], "n" if i in numbers else "") for i in open_),
        tuple(table.heads[i] for i in hidden),
        tuple(
            (
                tuple((row[i], _kind(row, above, i, numbers)) for i in open_),
                tuple((table.heads[i], row[i]) for i in hidden if row[i]),
            )
            for row, above in zip(table.rows, before, strict=False)
        ),
    )


def _kind(row: Sequence[str], above: Sequence[str], column: int, numbers: Collection[int]) -> str:
    """The class of a cell; `ditto`: prose that repeats the line above, with all cells to its
    left."""
    if len(row[column]) > LONG:
        return "ditto" if repeats(row, above, column) else "t"
    absent = row[column] == "-" and column in numbers
    return "n" if absent or _is_number(row[column]) else ""


def _is_number(text: str) -> bool:
    plain = text.replace(",", "").replace("%", "").strip()
    return plain.lstrip("+-").replace(".", "", 1).isdigit()


def matrix_grids(tables: Path, names: Mapping[str, str]) -> list[Grid]:
    """One grid per model and cluster of each matrix; the two matrices are never mixed.  `names`:
    the text of each arm's method."""
    made = []
    for table in TABLES[::-1]:
        path = tables / f"{NAMES[table]}.csv"
        rows = read_sheet(path) if path.is_file() else []
        for model, cluster in dict.fromkeys((row["model"], row["cluster"]) for row in rows):
            own = [row for row in rows if (row["model"], row["cluster"]) == (model, cluster)]
            made.append(_grid(own, names, table, f"{model}, {cluster}, {table}"))
    return made


def _grid(rows: Sequence[Row], names: Mapping[str, str], table: str, name: str) -> Grid:
    lengths = sorted({int(row["seq_len"]) for row in rows})
    at = {(row["arm"], int(row["seq_len"])): (row, row["run_with"]) for row in rows}
    arms = dict.fromkeys(row["arm"] for row in rows)
    return Grid(
        table=table,
        name=name,
        lengths=tuple(lengths),
        arms=tuple(
            (arm, names.get(arm, arm), tuple(at.get((arm, n)) for n in lengths)) for arm in arms
        ),
    )
