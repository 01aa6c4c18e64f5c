"""Tables as texts for a terminal or a page, and rows as CSV files."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

Key = TypeVar("Key")
Item = TypeVar("Item")
GIB = 2**30
SUFFIXES = (".csv", ".json", ".md", ".tex")
"""The suffixes of a table's files."""
LONG = 40
"""A cell with more characters than this is prose and gets a wide column."""


class TableText(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table as formatted text: headings and rows."""

    title: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def grouped(pairs: Iterable[tuple[Key, Item]]) -> dict[Key, list[Item]]:
    """The second items of pairs as lists, by their first items, in order."""
    found: dict[Key, list[Item]] = {}
    for key, item in pairs:
        found.setdefault(key, []).append(item)
    return found


def repeats(row: Sequence[str], above: Sequence[str], column: int) -> bool:
    """Whether a cell is prose, and this cell and all cells to its left equal those above them."""
    return len(row[column]) > LONG and row[: column + 1] == above[: column + 1]


def write_sheet(
    path: Path, rows: Sequence[Mapping[str, object]], columns: Iterable[str] = ()
) -> None:
    """Write rows as CSV: first `columns`, then every other column that a row has.  The file is
    replaced atomically."""
    columns = list(dict.fromkeys([*columns, *(column for row in rows for column in row)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)
