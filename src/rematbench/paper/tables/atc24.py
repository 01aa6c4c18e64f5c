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
from rematbench.paper.sheet.table import Table, percent, table_of

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
    return table_of("atc24_table8_waterfall", rows)


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
    return table_of("atc24_figure7_memory", rows)


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
    return table_of("atc24_figure9_scaling", rows)


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
    return table_of("atc24_abstract_layouts", rows, note=note)


def _best(rows: Sequence[Line], recompute: str) -> str:
    found = [row["mfu_causal"] for row in rows if row["recompute"] == recompute]
    return f"{percent(max(found))} %" if found else "none fits"
