"""Rows derived from published rows, for tables of the paper.

A derived row has the columns of runs.csv and `cell`, its purpose.  All rows planned by one composed
method form a bundle, so editing a method's file reruns only the bundles of that method.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

from rematbench.evidence.published.row_cases import bundle_of
from rematbench.evidence.published.sheets import Cell, whole
from rematbench.evidence.published.words import committed, sheets
from rematbench.host.table import grouped
from rematbench.plugins.registry import Registry

PUBLISHED, PAPER_ALPHA, LEDGER_ALPHA = "published", "alpha: paper", "alpha: ledger"
BESIDE = "published beside"
"""The purpose (column `cell`) of published rows that are not from runs.csv."""
WATERFALL = ("engine", "layout", "checkpointing", "offload")
LAYOUTS = "layouts that fit"
OURS = "rematbench, derived from: "
DEGREES = (1, 2, 4, 8)
TP_CP, PP, CHUNK_LAYERS = (4, 8), (4, 8, 16), (1, 2, 4)
POLICIES = ("full", "balanced")


def all_cells(rows: Sequence[Mapping[str, str]]) -> list[Cell]:
    """The published rows, then the derived rows, each with its purpose in `cell`."""
    return [
        *({**row, "cell": PUBLISHED} for row in rows),
        *alpha_cells(rows),
        *waterfall_cells(rows),
        *layout_cells(rows),
    ]


def every_cell() -> list[Cell]:
    """The rows of all committed sheets: those of runs.csv with the rows derived from them, then
    those of the other sheets."""
    first, *others = sheets()
    beside = [{**row, "cell": BESIDE} for name in others for row in committed(name)]
    return [*all_cells(committed(first)), *beside]


def bundles(cells: Iterable[Cell], registry: Registry) -> dict[str, list[Cell]]:
    """The cells of each bundle, by its name."""
    return grouped((bundle_of(cell, registry), cell) for cell in cells)


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
        "peak_kind",
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
    of `layouts` with the batch of Table 8, once with full recomputation and no offload, and once
    with the paper's method."""
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
