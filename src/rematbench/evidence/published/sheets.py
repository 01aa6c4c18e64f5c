"""Sheets of cells to predict: published rows, and rows derived from published rows for tables.

A sheet has the columns of runs.csv and `cell`, the purpose of the row.  The rows that one composed
method plans form one bundle, so that editing a method's file reruns only the bundles of the method.
"""

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product, zip_longest
from pathlib import Path

from rematbench.evidence.published.rows import RowError, recompute_method, text, whole
from rematbench.plugins.registry import Registry
from rematbench.spec.configfile import ConfigError, require_unique

Cell = dict[str, str]
PUBLISHED, PAPER_ALPHA, LEDGER_ALPHA = "published", "alpha: paper", "alpha: ledger"
WATERFALL = ("engine", "layout", "checkpointing", "offload")
LAYOUTS = "layouts that fit"
NOBODY = "unplanned"
OURS = "rematbench, derived from: "
DEGREES = (1, 2, 4, 8)
TP_CP, PP, CHUNK_LAYERS = (4, 8), (4, 8, 16), (1, 2, 4)
POLICIES = ("full", "balanced")
CONFIGURATION = ("model", "cluster", "system", "seq_len", "global_batch", "tp", "pp")
"""Columns that a prediction needs, beside dp or gpus.  Their cells may be empty; the row's status
then says so."""
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
    *("gpus", "layers", "seq_len", "global_batch", "micro_batch", "tp", "cp", "pp", "vpp", "dp"),
}
"""Columns, published or predicted, whose cells are empty or numbers above 0."""
SHARES = {"offload_fraction", "peak_host_bytes"}
"""Columns, published or predicted, whose cells are empty or numbers of at least 0."""


class Sheet(list[Cell]):
    """The rows of a CSV file as texts, and the columns of its first line."""

    columns: tuple[str, ...] = ()


def read_sheet(path: Path, needed: Iterable[str] = ()) -> Sheet:
    """The rows of a CSV file.  ConfigError where the file cannot be read, lacks a needed column,
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
    missing = [column for column in needed if column not in columns]
    if missing:
        raise ConfigError(label, "", f"is no such sheet: it has no column {', '.join(missing)}")
    require_unique(columns, label, "columns")
    for number, line in lines:
        if len(line) > len(columns):
            problem = f"{len(line)} cells under {len(columns)} columns"
            raise ConfigError(label, f"line {number}", problem)
    sheet = Sheet(dict(zip_longest(columns, line, fillvalue="")) for _, line in lines)
    sheet.columns = tuple(columns)
    return sheet


def check_numbers(sheet: Sheet, label: str) -> None:
    """ConfigError for a cell of NUMBERS or SHARES that is neither empty nor a number in range."""
    for column in sheet.columns:
        plain = column.removeprefix("pred_")
        if plain not in NUMBERS | SHARES:
            continue
        for index, row in enumerate(sheet, start=1):
            if row[column] and not _is_number(row[column], positive=plain in NUMBERS):
                least = "above 0" if plain in NUMBERS else "of at least 0"
                problem = f"{row[column]!r} is no number {least}"
                raise ConfigError(label, f"row {index}, {column}", problem)


def _is_number(cell: str, *, positive: bool) -> bool:
    try:
        value = float(cell)
    except ValueError:
        return False
    return 0.0 <= value < math.inf and (value > 0.0 or not positive)


def all_cells(rows: Sequence[Mapping[str, str]]) -> list[Cell]:
    """The published rows, then the derived rows, each with its purpose in `cell`."""
    return [
        *({**row, "cell": PUBLISHED} for row in rows),
        *alpha_cells(rows),
        *waterfall_cells(rows),
        *layout_cells(rows),
    ]


def bundle_of(row: Mapping[str, str], registry: Registry) -> str:
    """The name of the composed method that plans a row, which is the name of the row's bundle."""
    try:
        name, _ = recompute_method(text(row, "recompute"), registry)
    except RowError:
        return NOBODY
    alone = text(row, "offload_fraction") in ("0", "0.0") or "pp_offload" in name
    return name if alone else f"{name}+pp_offload"


def bundles(cells: Iterable[Cell], registry: Registry) -> dict[str, list[Cell]]:
    """Cells by bundle."""
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(bundle_of(cell, registry), []).append(cell)
    return found


def alpha_cells(rows: Iterable[Mapping[str, str]]) -> list[Cell]:
    """Rows of Figure 9 with a predicted alpha: by the paper's estimate, and by the ledger."""
    cells = []
    for row in rows:
        if row["table"] != "Figure 9":
            continue
        name = "keep_all" if row["recompute"] == "none" else "balanced_checkpointing"
        ledger = {"recompute": f"{name}+pp_offload", "offload_fraction": "0"}
        cells.append(derived(row, PAPER_ALPHA, offload_fraction=""))
        cells.append(derived(row, LEDGER_ALPHA, **ledger))
    return cells


def waterfall_cells(rows: Iterable[Mapping[str, str]]) -> list[Cell]:
    """Rows between the published rows of Table 8 at 8,192 tokens, one change at a time: engine,
    layout, checkpointing, offload."""
    table = [row for row in rows if row["table"].startswith("Table 8") and row["status"] == "ok"]
    origin = [row for row in table if row["system"] != "megatron-kwai"]
    ours = [row for row in table if row["recompute"] == "balanced"]
    if len(origin) != 1 or len(ours) != 1:
        return []
    before, after = origin[0], ours[0]
    return [
        derived(before, "waterfall: start"),
        derived(before, "waterfall: engine", system=after["system"]),
        derived(after, "waterfall: layout", recompute="full", offload_fraction="0"),
        derived(after, "waterfall: checkpointing", offload_fraction="0"),
        derived(after, "waterfall: offload"),
    ]


def derived(row: Mapping[str, str], cell: str, **changes: str) -> Cell:
    """A published configuration with purpose `cell`, some columns changed, and no results."""
    results = (
        "tokens_per_s_per_gpu",
        "tflops_per_gpu_as_published",
        "mfu_pct_as_published",
        "peak_device_bytes",
        "status",
        "note",
    )
    return {
        **row,
        **dict.fromkeys(results, ""),
        **changes,
        "cell": cell,
        "source": OURS + row["source"],
    }


def layout_cells(rows: Iterable[Mapping[str, str]]) -> list[Cell]:
    """Rows for the abstract's result at 32,768 tokens, whose layout is not published: every layout
    of `layouts` with the batch of Table 8, under full recomputation without offload and under the
    paper's method."""
    rows = list(rows)
    abstract = [row for row in rows if row["table"].startswith("abstract")]
    table = [row for row in rows if row["table"].startswith("Table 8")]
    if not abstract or not table:
        return []
    batch = whole(table[0], "global_batch")
    row = {**abstract[0], "global_batch": str(batch), "micro_batch": "1", "zero_stage": "1"}
    cells = []
    for degrees in layouts(whole(row, "gpus"), whole(row, "layers"), batch):
        for policy in POLICIES:
            offload = "0" if policy == "full" else ""
            shape = {key: str(value) for key, value in degrees.items()}
            extra = {"recompute": policy, "offload_fraction": offload, "sp": "yes"}
            cells.append(derived(row, LAYOUTS, **shape, **extra))
    return cells


def layouts(gpus: int, num_layers: int, global_batch: int) -> list[dict[str, int]]:
    """Degrees of the interleaved layouts to try: tp x cp is 4 or 8 (half a node or a node), a chunk
    has 1, 2 or 4 layers, and pp divides the number of micro-batches."""
    found = []
    for tp, cp, pp in product(DEGREES, DEGREES, PP):
        dp, rest = divmod(gpus, tp * cp * pp)
        if tp * cp not in TP_CP or rest or not dp or (global_batch // dp) % pp:
            continue
        found += [
            {"tp": tp, "cp": cp, "pp": pp, "vpp": num_layers // (pp * layers), "dp": dp}
            for layers in CHUNK_LAYERS
            if num_layers % (pp * layers) == 0 and num_layers > pp * layers
        ]
    return found
