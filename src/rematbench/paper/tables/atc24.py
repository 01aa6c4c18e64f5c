"""ATC'24 tables from predicted cells: Table 8, Figures 7 and 9, and the rows of the abstract."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rematbench.evidence.published.derived import (
    LAYOUTS,
    LEDGER_ALPHA,
    PAPER_ALPHA,
    PUBLISHED,
    WATERFALL,
)
from rematbench.evidence.published.sheets import number, read_predicted
from rematbench.paper.sheet.table import (
    Column,
    Table,
    columns,
    fixed,
    gib,
    percent,
    signed_percent,
    whole,
)

INPUTS = {"predictions": "results/paper/tables/predictions.csv"}
TABLES = (
    "atc24_abstract_layouts",
    "atc24_figure7_memory",
    "atc24_figure9_scaling",
    "atc24_table8_waterfall",
)
Row = Mapping[str, Any]
Line = dict[str, Any]
SPEED, PEAK = "tokens_per_s_per_gpu", "peak_device_bytes"
LAYOUT = ("tp", "cp", "pp", "vpp", "dp")
LAYOUT_COLUMNS = tuple(Column(key, key, whole) for key in LAYOUT)
ALPHA = Column("alpha", "alpha", fixed(3))
OURS_SPEED = Column("predicted", "ours tokens/s/GPU", fixed(1))
OURS_PEAK = Column("peak_device_bytes", "ours peak GiB", gib)
ERROR = Column("error", "error %", signed_percent)
STATUS = Column("pred_status", "ours")


def build(predictions: Path) -> list[Table]:
    cells = read_predicted(predictions)
    return [waterfall(cells), figure7(cells), figure9(cells), abstract(cells)]


def of_kind(cells: Iterable[Row], kind: str) -> list[Row]:
    """The cells with the purpose `kind` (column `cell`)."""
    return [cell for cell in cells if cell["cell"] == kind]


def line(cell: Row, metric: str = SPEED) -> Line:
    """The columns of a cell that the tables share: layout, alpha, published and predicted value of
    a metric, and the relative error."""
    published, predicted = number(cell, metric), number(cell, f"pred_{metric}")
    known = published is not None and predicted is not None
    return {
        **{key: cell.get(key, "") for key in ("model", "gpus", "seq_len", "recompute", *LAYOUT)},
        "alpha": number(cell, "pred_offload_fraction"),
        "published": published,
        "predicted": predicted,
        "error": predicted / published - 1 if known and published and predicted else None,
        "mfu_causal": number(cell, "pred_mfu_causal"),
        "peak_device_bytes": number(cell, "pred_peak_device_bytes"),
        "status": cell["status"],
        "pred_status": cell["pred_status"],
    }


def waterfall(cells: Sequence[Row]) -> Table:
    """Table 8 at 8,192 tokens: the published 278 -> 299 -> 387 tokens/s/GPU, divided into the
    effects of engine, layout, checkpointing and offload."""
    published = {
        (cell["system"], cell["recompute"]): cell
        for cell in of_kind(cells, PUBLISHED)
        if cell["table"].startswith("Table 8") and cell["status"] == "ok"
    }
    known = {"start": 0, "engine": 0, "offload": 0}
    rows: list[Line] = []
    for step in ("start", *WATERFALL):
        for cell in of_kind(cells, f"waterfall: {step}"):
            told = published.get((cell["system"], cell["recompute"])) if step in known else None
            rows.append(_step(step, cell, told, rows))
    return Table(
        name="atc24_table8_waterfall",
        title="ATC'24 Table 8 at 8,192 tokens (llama-175b, 256 H800): one change at a time",
        columns=(
            *columns("step"),
            *LAYOUT_COLUMNS,
            *columns("recompute"),
            ALPHA,
            Column("published", "published tokens/s/GPU", whole),
            OURS_SPEED,
            ERROR,
            Column("published_gain", "published gain %", signed_percent),
            Column("gain", "ours: gain of the step %", signed_percent),
            Column("gain_of_gap", "ours: gain since the published row above %", signed_percent),
            Column("mfu_causal", "ours MFU (causal) %", percent),
            OURS_PEAK,
            STATUS,
        ),
        rows=tuple(rows),
        note="World: simulated against published. If a step does not fit, the table shows its "
        "speed with enough memory.",
    )


def _step(step: str, cell: Row, published_row: Row | None, before: Sequence[Line]) -> Line:
    published = number(published_row, SPEED) if published_row else None
    row = line({**cell, SPEED: "" if published is None else published})
    row["step"] = step
    if before and row["predicted"] and before[-1]["predicted"]:
        row["gain"] = row["predicted"] / before[-1]["predicted"] - 1
    anchor = next((r for r in reversed(before) if r["published"]), None)
    if published and anchor and row["predicted"]:
        row["published_gain"] = published / anchor["published"] - 1
        row["gain_of_gap"] = row["predicted"] / anchor["predicted"] - 1
    return row


def figure7(cells: Sequence[Row]) -> Table:
    """Figure 7: peak device memory against alpha, with published and predicted verdicts."""
    own = [cell for cell in of_kind(cells, PUBLISHED) if cell["table"] == "Figure 7"]
    rows = [{**line(cell, PEAK), "alpha": number(cell, "offload_fraction")} for cell in own]
    return Table(
        name="atc24_figure7_memory",
        title="ATC'24 Figure 7: peak device memory (llama-65b, 8,192 tokens, 256 H800)",
        columns=(
            *columns("recompute"),
            ALPHA,
            Column("published", "published peak GiB", gib),
            OURS_PEAK,
            ERROR,
            Column("status", "published"),
            STATUS,
        ),
        rows=tuple(rows),
        note="World: simulated (issue-order ledger) against published (max_memory_allocated).",
    )


def figure9(cells: Sequence[Row]) -> Table:
    """Figure 9: speed of the searched optimum over GPUs, and alpha by the paper's fit and by the
    ledger."""
    fits: dict[str, dict[tuple[Any, ...], float | None]] = {}
    for kind in (PAPER_ALPHA, LEDGER_ALPHA):
        found = of_kind(cells, kind)
        fits[kind] = {_key(cell): number(cell, "pred_offload_fraction") for cell in found}
    rows = []
    for cell in of_kind(cells, PUBLISHED):
        if cell["table"] == "Figure 9":
            alphas = {kind: fits[kind].get(_key(cell)) for kind in fits}
            rows.append({**line(cell), "alpha": number(cell, "offload_fraction"), **alphas})
    rows.sort(key=lambda row: (row["model"], -float(row["gpus"] or 0)))
    return Table(
        name="atc24_figure9_scaling",
        title="ATC'24 Figure 9: tokens/s per GPU of the published layouts (4,096 tokens, H800)",
        columns=(
            *columns("model gpus"),
            *LAYOUT_COLUMNS,
            *columns("recompute"),
            Column("alpha", "alpha published", fixed(3)),
            Column(PAPER_ALPHA, "alpha, paper's fit", fixed(3)),
            Column(LEDGER_ALPHA, "alpha, our ledger", fixed(3)),
            Column("published", "published tokens/s/GPU", fixed(1)),
            OURS_SPEED,
            ERROR,
            OURS_PEAK,
            STATUS,
        ),
        rows=tuple(rows),
        note="World: simulated against published. The paper's fit is a check of its formula, not "
        "a prediction. Our ledger's alpha is the smallest alpha that fits the usable bytes of "
        "this cluster.",
    )


def _key(cell: Row) -> tuple[Any, ...]:
    return (cell["model"], cell["gpus"])


def abstract(cells: Sequence[Row]) -> Table:
    """The abstract's 32.3 -> 42.7 % MFU at 32,768 tokens, whose layouts were not published: the
    candidate layouts that fit."""
    rows = [line(cell) for cell in of_kind(cells, LAYOUTS) if cell["pred_status"] == "ok"]
    rows.sort(key=lambda row: -(row["predicted"] or 0))
    told = [cell for cell in of_kind(cells, PUBLISHED) if cell["table"].startswith("abstract")]
    goals = " -> ".join(f"{cell['mfu_pct_as_published']} %" for cell in told)
    tried = len(of_kind(cells, LAYOUTS))
    best = {name: _best(rows, name) for name in ("full", "balanced")}
    note = (
        f"Published MFU: {goals}. The layouts are not published, so the table scores nothing. "
        f"{len(rows)} "
        f"of {tried} cells tried fit. Best MFU (causal) with full recomputation and no offload: "
        f"{best['full']}; with balanced checkpointing and offload: {best['balanced']}."
    )
    return Table(
        name="atc24_abstract_layouts",
        title="ATC'24 abstract at 32,768 tokens (llama-175b, 256 H800): layouts that fit",
        columns=(
            *LAYOUT_COLUMNS,
            *columns("recompute"),
            ALPHA,
            OURS_SPEED,
            Column("mfu_causal", "ours MFU (causal) %", percent),
            OURS_PEAK,
        ),
        rows=tuple(rows),
        note=note,
        shown=20,
    )


def _best(rows: Sequence[Line], recompute: str) -> str:
    found = [row["mfu_causal"] for row in rows if row["recompute"] == recompute]
    return f"{percent(max(found))} %" if found else "none fits"
