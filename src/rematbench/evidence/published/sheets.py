"""Read sheets of published cells (results/published/runs.csv, or a user's sheet): CSV files whose
cells are texts, and the numbers, words and switches in cells.

A missing or wrong cell raises a one-line RowError, or a ConfigError for a whole sheet.
"""

import csv
import math
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final, Literal, get_args

from msgspec import Struct, ValidationError, convert
from msgspec.structs import FieldInfo

from rematbench.host.declared import facts, limits, plain_type
from rematbench.host.errors import UserError
from rematbench.inputs.configfile import ConfigError, require_unique
from rematbench.inputs.job import Job

Row = Mapping[str, Any]
"""A row of a sheet: texts as they are read, and numbers of predictions."""
Cell = dict[str, str]
YES, NO = {"yes", "y", "true", "1", "on"}, {"no", "n", "false", "0", "off"}


Quantity = Literal["allocated", "reserved", "device"]
"""Device bytes of the fullest GPU, each a part of the next: torch's max_memory_allocated, its
max_memory_reserved, and the device total, which nvidia-smi shows."""
PeakKind = Literal["allocated", "reserved", "device", "computed", "unstated"]
"""What a row's `peak_device_bytes` counts: a Quantity; `computed`, by formulas and not measured
(states of the first stage's layers, and their kept activations times the micro-batches in flight);
or `unstated`: the source does not say, so nothing is compared with it."""


PeakRank = Literal["fullest", "first", "last"]
"""The pipeline rank whose bytes a row prints."""


class RowError(ValueError):
    """A row that cannot be predicted: the row's status and a one-line reason."""

    def __init__(self, status: Literal["failed", "unsupported"], reason: str) -> None:
        super().__init__(reason)
        self.status = status


# -- cells ------------------------------------------------------------------------------------


def text(row: Row, column: str) -> str:
    """The stripped text of a cell; empty if the column is missing."""
    return str(row.get(column) or "").strip()


def whole(row: Row, column: str, default: int | None = None, least: float = 1) -> int:
    """The whole number of at least `least` in a cell, or `default` if the cell is empty.  RowError
    for any other text, or for an empty cell without a default."""
    cell = text(row, column)
    if not cell:
        if default is None:
            raise RowError("failed", f"column {column} is missing or empty")
        return default
    value = _number(column, cell)
    if value != int(value) or value < least:
        raise RowError("failed", f"column {column}: {cell!r} is not a whole number >= {least:g}")
    return int(value)


THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+(\.\d+)?")
"""A number with commas between thousands."""


def read_number(cell: str) -> float:
    """The number in a cell; commas are allowed only between thousands (`8,192`). ValueError for
    other texts, also for a decimal comma (`0,1`); its message continues a sentence about the
    cell."""
    plain = cell.replace(",", "") if THOUSANDS.fullmatch(cell) else cell
    try:
        value = float(plain)
    except ValueError:
        dot = cell.replace(",", ".")
        decimal = f" (a decimal comma? write {dot})" if re.fullmatch(r"\d+,\d+", cell) else ""
        raise ValueError(f"is not a number{decimal}") from None
    if not math.isfinite(value):
        raise ValueError("is not a number")
    return value


def _number(column: str, cell: str) -> float:
    try:
        return read_number(cell)
    except ValueError as error:
        raise RowError("failed", f"column {column}: {cell!r} {error}") from None


def fraction(row: Row, column: str) -> float | None:
    cell = text(row, column)
    if not cell:
        return None
    value = _number(column, cell)
    if not 0.0 <= value <= 1.0:
        raise RowError("failed", f"column {column}: {cell!r} is not between 0 and 1")
    return value


def flag(row: Row, column: str, default: bool) -> bool:
    cell = text(row, column).lower()
    if not cell:
        return default
    if cell not in YES | NO:
        raise RowError("failed", f"column {column}: {cell!r} is neither yes nor no")
    return cell in YES


def read_choice(row: Row, column: str, default: str, kind: Any) -> Any:
    """The word in a cell, which must be a value of the Literal type `kind`; otherwise RowError."""
    cell = text(row, column).lower() or default
    allowed = get_args(kind)
    if cell not in allowed:
        known = ", ".join(map(str, allowed))
        raise RowError("unsupported", f"{column} {cell!r} is not modelled (known: {known})")
    return cell


def given_facts(row: Row, kind: type[Struct], own: Collection[str] = ()) -> dict[str, Any]:
    """The facts of a struct that a row has in columns of their names, without those in `own`;
    RowError for a value of a wrong type."""
    known = facts(kind)
    return {
        name: _fact(row, name, field)
        for name, field in known.items()
        if name not in own and text(row, name)
    }


def _fact(row: Row, column: str, field: FieldInfo) -> Any:
    kind = plain_type(field)
    if kind is bool:
        return flag(row, column, False)
    if kind is int:
        return whole(row, column, least=limits(field)[0] or 0)
    if kind is str:
        try:
            return convert(text(row, column).replace(" ", ""), field.type)
        except ValidationError:
            raise RowError("unsupported", f"{column} {row[column]!r} is not modelled") from None
    return (
        _number(column, text(row, column)) if kind is float else read_choice(row, column, "", kind)
    )


UNSTATED = re.compile(r"not said whether peak|at oom")
"""Words for bytes that may not be a peak."""
KINDS: dict[str, PeakKind] = {
    "allocated": "allocated",
    "computed": "computed",
    "reserved": "reserved",
    "device": "device",
    "nvidia-smi": "device",
}
"""The kind of peak by the word that a source uses for it; of several, the first here decides."""


def read_peak_kind(row: Row) -> PeakKind:
    """The kind of a row's peak, from the words of its source; `unstated` for unknown words."""
    cell = text(row, "peak_kind").lower() or "allocated"
    if UNSTATED.search(cell):
        return "unstated"
    return next((kind for word, kind in KINDS.items() if word in cell), "unstated")


def printed_bytes(row: Row) -> dict[Quantity, float]:
    """The bytes of the fullest GPU that a row prints, by quantity: its peak, reserved bytes in a
    column of their own, and what its note says (`reserved_mib`, `device_mib`)."""
    kind, found = read_peak_kind(row), {"reserved": number(row, "peak_reserved_bytes")}
    for each in ("reserved", "device"):
        mib = number(row, f"{each}_mib")
        found[each] = mib * 2**20 if mib else found.get(each)
    found[kind] = number(row, "peak_device_bytes") or found.get(kind)
    return {each: nbytes for each in get_args(Quantity) if (nbytes := found.get(each))}


def read_peak_rank(row: Row) -> PeakRank:
    """The pipeline rank of a row's peak, by the words of its source."""
    cell = text(row, "peak_kind").lower()
    if "last rank" in cell:
        return "last"
    return "first" if cell.startswith("rank 0") else "fullest"


# -- sheets ---------------------------------------------------------------------------------------

NOBODY = "unplanned"
CONFIGURATION = ("model", "cluster", "system", "seq_len", "global_batch", "tp", "pp")
"""Columns that a prediction needs, besides dp or gpus.  Their cells may be empty; the row's status
then says so."""
SPEED: Final = "tokens_per_s_per_gpu"
STEP: Final = "step_s"
SCORED = ("source", "status")
"""Further columns that scoring a row needs."""
TABLED = ("table", "recompute", "gpus", "layers")
"""Further columns that the papers' tables need."""
NUMBERS = {
    *(
        "low",
        "high",
        "tokens_per_s_per_gpu",
        "peak_device_bytes",
        "step_s",
        "mfu_causal",
        "mfu_pct_as_published",
    ),
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "head_dim", "dp"),
    *(name for name, field in facts(Job).items() if (limits(field)[0] or 0) >= 1),
}
"""Columns, published or predicted, whose cells are empty or numbers above 0."""
SHARES = {
    *("offload_fraction", "peak_host_bytes"),
    *(name for name, field in facts(Job).items() if limits(field)[0] == 0),
}
"""Columns, published or predicted, whose cells are empty or numbers of at least 0."""


class Sheet(list[Cell]):
    """The rows of a CSV file as texts, and the columns of its first line."""

    columns: tuple[str, ...] = ()


def read_sheet(path: Path, needed: Iterable[str] = ()) -> Sheet:
    """The rows of a CSV file.  ConfigError if the file cannot be read, lacks a needed column,
    repeats a column, or has a line with too many cells."""
    label = str(path)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            columns = next(reader, [])
            lines = [(reader.line_num, line) for line in reader if line]
    except OSError as error:
        raise ConfigError(label, "", f"cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise ConfigError(label, "", f"cannot be read ({reason})") from error
    if missing := [column for column in needed if column not in columns]:
        raise ConfigError(label, "", _why_missing(missing, columns))
    require_unique(columns, label, "columns")
    for number, line in lines:
        if len(line) > len(columns):
            problem = f"the row has {len(line)} cells, but the sheet has {len(columns)} columns"
            raise ConfigError(label, f"line {number}", problem)
    sheet = Sheet(dict(zip_longest(columns, line, fillvalue="")) for _, line in lines)
    sheet.columns = tuple(columns)
    return sheet


def _why_missing(missing: list[str], columns: list[str]) -> str:
    """Why columns are missing: another separator, names in another form, or neither."""
    first = columns[0] if len(columns) == 1 else ""
    if separator := next((mark for mark in (";", "\t", "|") if mark in first), ""):
        return f"its cells are separated by {separator!r}; a sheet has commas between cells"
    forms = {column.strip().lower(): column for column in columns}
    if other := [name for name in missing if name in forms]:
        return f"column {forms[other[0]]!r} must be written {other[0]!r}"
    return f"the sheet lacks the columns {', '.join(missing)}"


def read_cells(
    path: Path,
    option: str,
    *needed: str,
    checked: bool = False,
) -> Sheet:
    """Read a sheet with the columns of CONFIGURATION and, for published or predicted cells,
    `needed`. UserError with the option's name if a column is missing or if a number is wrong
    (numbers are checked with `needed` or `checked`)."""
    try:
        sheet = read_sheet(
            path, dict.fromkeys([*CONFIGURATION, *(SCORED if needed else ()), *needed])
        )
        if needed or checked:
            check_numbers(sheet, str(path))
            fill_speed(sheet)
    except ConfigError as error:
        raise UserError(f"{option}: {error}") from error
    return sheet


def read_predicted(path: Path) -> Sheet:
    """The predicted rows of a sheet; raises the UserError of `read_cells`."""
    return read_cells(path, str(path.parent), *TABLED, "pred_status")


def check_numbers(sheet: Sheet, label: str) -> None:
    """Write the numbers in the columns of NUMBERS and SHARES without thousands separators.
    ConfigError for a cell that is neither empty nor a number in range."""
    for column in sheet.columns:
        plain = column.removeprefix("pred_")
        if plain not in NUMBERS | SHARES:
            continue
        for index, row in enumerate(sheet, start=1):
            if row[column]:
                try:
                    row[column] = _in_range(plain, row[column])
                except ValueError as error:
                    problem = f"{row[column]!r} {error}"
                    raise ConfigError(label, f"row {index}, {column}", problem) from None


def fill_speed(sheet: Sheet) -> None:
    """Compute the tokens/s/GPU of rows that have only a step time, from tokens and GPUs."""
    if STEP not in sheet.columns:
        return
    for row in sheet:
        gpus = row.get("gpus") or _ranks(row)
        terms = [row.get(key) or "" for key in ("seq_len", "global_batch", STEP)]
        if not row.get(SPEED) and gpus and all(terms):
            tokens, batch, step_s = map(float, terms)
            row[SPEED] = repr(tokens * batch / step_s / float(gpus))
    if SPEED not in sheet.columns:
        sheet.columns = (*sheet.columns, SPEED)


def _ranks(row: Cell) -> str:
    """tp x cp x pp x dp of a row; empty if a degree is empty."""
    degrees = [row.get(key) or "" for key in ("tp", "pp", "dp")]
    if not all(degrees):
        return ""
    return str(math.prod(map(float, [*degrees, row.get("cp") or "1"])))


FEWEST_BYTES = 1 << 20
"""A peak of fewer bytes was written in another unit."""


def _in_range(column: str, cell: str) -> str:
    """The number in a cell as `float` reads it; ValueError if it is out of the column's range."""
    value = read_number(cell)
    if value < 0.0 or (value == 0.0 and column in NUMBERS):
        raise ValueError(f"is not a number {'above 0' if column in NUMBERS else 'of at least 0'}")
    if column.endswith("_bytes") and 0.0 < value < FEWEST_BYTES:
        raise ValueError(f"is too small for bytes (if it is in GiB, write {value * 2**30:.0f})")
    return cell.replace(",", "")


SWEEP = (
    *("source", "system", "cluster", "model", "layers", "hidden"),
    *("gpus", "seq_len", "global_batch"),
)
"""Columns with equal values in all rows of a sweep: the source, stack, cluster and job."""
LAYOUT = ("tp", "cp", "pp", "vpp", "dp", "zero_stage")


def number(row: Row, key: str) -> float | None:
    """The number in a column of a row; None if the column is missing or empty."""
    value = row.get(key)
    return None if value in ("", None) else float(str(value))


def is_scored(row: Row) -> bool:
    """Whether a published cell can be scored: its status is ok or oom, its note does not call it
    SUSPECT, and its layout is published."""
    known = row["status"] in ("ok", "oom") and "SUSPECT" not in str(row.get("note", ""))
    return known and number(row, "tp") is not None
