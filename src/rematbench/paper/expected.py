"""Check the artifact's claims against results/expected: PASS or FAIL, with the reason."""

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import Struct

from rematbench.host.console import CommandError
from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir

Cells = list[list[str]]

NOTHING = 1e-12
"""Absolute tolerance: the rounding error of a difference of two equal shares."""

ROUNDING = 1e-9
"""Largest difference between two searches with the same answer, because they may add numbers in
different orders: relative for seconds, absolute for shares."""


METHOD_COLUMNS = ("arm", "label", "any_name")
"""Columns of the claims' tables that name a method of `methods/`."""

TIES = "ties"
"""The column that names the methods tied with the fastest."""


class Bound(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A statistic of a column's absolute values, and the largest value that it may have."""

    table: str
    column: str
    statistic: Literal["mean", "largest"]
    most: float


class Find(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An expected count of rows in a table.

    `rows` maps columns to texts. `of` rows have a non-empty cell in each of these columns, and
    `count` of them have the texts of `rows`. With `same`, `count` is the number of rows with the
    texts of `rows` that agree, in the columns of `same`, with some row that has the texts of
    `beside`.
    """

    says: str
    table: str
    rows: dict[str, str]
    count: int
    of: int
    same: tuple[str, ...] = ()
    beside: dict[str, str] = {}


class TableClaim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One claim: tables that must be as expected, row counts, and a bound on a statistic. A claim
    with neither `finds` nor `bound` only states that a table has not changed."""

    id: str
    text: str
    place: str
    tables: tuple[str, ...]
    bound: Bound | None = None
    finds: tuple[Find, ...] = ()


class Artifact(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/artifact.yaml."""

    claims: tuple[TableClaim, ...]
    tolerance: float


class ClaimFinding(Struct, frozen=True, kw_only=True):
    """The result of checking one claim: its problems, whether its tables exist, and how many rows
    of the user's own methods are left out of its tables."""

    claim: TableClaim
    problems: tuple[str, ...]
    tables_exist: bool = True
    not_compared: int = 0

    @property
    def line(self) -> str:
        """PASS, FAIL or NOT MADE, the claim, the counts of its tables, and why it failed."""
        word = ("FAIL" if self.tables_exist else "NOT MADE") if self.problems else "PASS"
        found = "; ".join(f"{one.says}: {one.count} of {one.of}" for one in self.claim.finds)
        says = f" Found: {found}." if found and not self.problems else ""
        why = f" [{'; '.join(self.problems)}]" if self.problems else ""
        own = f" {self.not_compared} rows of your own methods were not compared."
        rest = own if self.not_compared else ""
        return f"{word} {self.claim.id} {self.claim.text}{says}{why}{rest}"


def load_artifact() -> Artifact:
    label = "config/artifact.yaml"
    return convert(read_mapping(data_dir("config") / "artifact.yaml", label), Artifact, label)


class Pair(NamedTuple):
    """A table as made here (`ours`) and as expected (`theirs`); None if there is no such file.
    `yours`: the number of rows left out because they name a method of the user."""

    ours: Cells | None
    theirs: Cells | None
    yours: int = 0


def check(artifact: Artifact, tables: Path, expected: Path) -> list[ClaimFinding]:
    """Return the findings of all claims, in the order of the claims.  Each table is read once."""

    @cache
    def pair(name: str) -> Pair:
        return pair_of(read_cells(tables / f"{name}.csv"), read_cells(expected / f"{name}.csv"))

    found = []
    for claim in artifact.claims:
        if lacking := [name for name in claim.tables if pair(name).ours is None]:
            problems = [f"{name}.csv is missing in {tables}" for name in lacking]
        else:
            problems = _problems(claim, artifact.tolerance, pair, expected)
        found.append(
            ClaimFinding(
                claim=claim,
                problems=tuple(problems),
                tables_exist=not lacking,
                not_compared=sum(pair(name).yours for name in claim.tables),
            )
        )
    return found


def pair_of(ours: Cells | None, theirs: Cells | None) -> Pair:
    """Both tables without the rows of a method that no expected row names. Such a method is also
    removed from the ties."""
    if not ours or not theirs or ours[0] != theirs[0]:
        return Pair(ours, theirs)
    columns = [index for index, column in enumerate(ours[0]) if column in METHOD_COLUMNS]
    shipped = {row[index] for row in theirs for index in columns}
    names = {row[index] for row in ours for index in columns} - shipped
    own = {at for at, row in enumerate(ours) if names & {row[index] for index in columns}}
    if own and len(ours) == len(theirs):  # the user's method won these cells
        theirs = [row for at, row in enumerate(theirs) if at not in own]
    kept = [[*row] for at, row in enumerate(ours) if at not in own]
    for row in kept[1:] if own and TIES in ours[0] else ():
        ties = row[at := ours[0].index(TIES)].split(", ")
        row[at] = ", ".join(name for name in ties if name not in names)
    return Pair(kept, theirs, len(own))


def _problems(
    claim: TableClaim, tolerance: float, pair: Callable[[str], Pair], expected: Path
) -> list[str]:
    found = []
    for name in claim.tables:
        ours, theirs, _ = pair(name)
        if theirs is None:
            found.append(f"{name}.csv is missing in {expected}")
        else:
            found += [f"{name}: {text}" for text in differences(ours or [], theirs, tolerance)[:1]]
    if claim.bound is not None and not found:
        value = measured(claim.bound, pair(claim.bound.table).ours or [])
        if value is None or not value <= claim.bound.most:
            shown = "nothing to measure" if value is None else f"{value:.4g}"
            bound = claim.bound
            found.append(f"{bound.statistic} {bound.column} is {shown}, allowed {bound.most:.4g}")
    for find in claim.finds if not found else ():
        if pair(find.table).yours:
            continue
        count, of = counted(find, pair(find.table).ours or [])
        if (count, of) != (find.count, find.of):
            found.append(f"{find.says}: {count} of {of}, claimed {find.count} of {find.of}")
    return found


def counted(find: Find, cells: Cells) -> tuple[int, int]:
    """The number of a table's rows that agree with a finding, and the number of rows compared."""
    head, *lines = cells or [[]]
    rows = [dict(zip(head, line, strict=False)) for line in lines]
    if not find.same:
        asked = [row for row in rows if all(row.get(column) for column in find.rows)]
        return sum(_has(row, find.rows) for row in asked), len(asked)
    among = {_key(row, find.same) for row in rows if _has(row, find.beside)}
    asked = [row for row in rows if _has(row, find.rows)]
    return sum(_key(row, find.same) in among for row in asked), len(asked)


def _has(row: Mapping[str, str], cells: Mapping[str, str]) -> bool:
    return all(row.get(column) == text for column, text in cells.items())


def _key(row: Mapping[str, str], columns: Iterable[str]) -> tuple[str | None, ...]:
    return tuple(row.get(column) for column in columns)


def read_cells(path: Path) -> Cells | None:
    """The lines of a CSV file, header first; None if the file does not exist."""
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def differences(
    ours: Cells, theirs: Cells, tolerance: float, nothing: float = NOTHING
) -> list[str]:
    """The differences between two tables that exceed both a relative tolerance and `nothing`; texts
    must be equal."""
    if len(ours) != len(theirs):
        return [f"{len(ours) - 1} rows, expected {len(theirs) - 1}"]
    found = []
    for number, (row, other) in enumerate(zip(ours, theirs, strict=True)):
        if len(row) != len(other):
            return [f"row {number}: {len(row)} columns, expected {len(other)}"]
        for index, (cell, wanted) in enumerate(zip(row, other, strict=True)):
            if cell != wanted and not _near(cell, wanted, tolerance, nothing):
                where = f"row {number}, {ours[0][index]}"
                found.append(f"{where}: {cell!r}, expected {wanted!r}")
    return found


def compare_folders(actual: Path, committed: Path) -> list[str]:
    """A line for each committed CSV file. The new file of the same name must agree up to ROUNDING;
    CommandError if it is missing or differs."""
    said = []
    for path in sorted(committed.glob("*.csv")):
        ours, theirs = read_cells(actual / path.name), read_cells(path)
        if ours is None or theirs is None:
            raise CommandError(f"{actual / path.name}: no such file; it is needed to check {path}")
        if found := differences(ours, theirs, ROUNDING, ROUNDING):
            raise CommandError(
                f"{actual / path.name}: {len(found)} cells differ; the first: {found[0]}"
            )
        said.append(f"{path.name}: {len(theirs) - 1} rows as committed")
    if not said:
        raise CommandError(f"{committed}: the folder has no committed searches (*.csv)")
    return said


def _near(cell: str, wanted: str, tolerance: float, nothing: float) -> bool:
    try:
        return math.isclose(float(cell), float(wanted), rel_tol=tolerance, abs_tol=nothing)
    except ValueError:
        return False


def measured(bound: Bound, cells: Cells) -> float | None:
    """The statistic of a table's cells that a bound limits; None if no cell has a value."""
    if not cells or bound.column not in cells[0]:
        return None
    at = cells[0].index(bound.column)
    values = [abs(float(row[at])) for row in cells[1:] if row[at]]
    if not values:
        return None
    return max(values) if bound.statistic == "largest" else statistics.fmean(values)
