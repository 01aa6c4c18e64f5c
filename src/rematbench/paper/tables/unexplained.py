"""Tables of predictions whose errors have no known cause (docs/accuracy.md), published / ours."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from rematbench.evidence.accuracy import MORE, load_accuracy, members, of_sheet
from rematbench.evidence.published.derived import PUBLISHED
from rematbench.evidence.published.sheets import SPEED, read_predicted
from rematbench.paper.sheet.table import Column, Table

INPUTS = {"cells": "results/paper/tables/predictions.csv"}
READS = ("config/accuracy.yaml",)
TABLES = ("fujii_replicas", "small_model_batches")
Row = Mapping[str, Any]
GROUP = "Fujii A100, time"


def build(cells: Path) -> list[Table]:
    """The tables of Fujii's A100 and of vTrain's small models."""
    (group,) = (group for group in load_accuracy().groups if group.name == GROUP)
    rows = read_predicted(cells)
    fujii = [row for row in members(group, rows) if row["cell"] == PUBLISHED and row[SPEED]]
    return [replicas_table(fujii), batches_table(of_sheet(rows, MORE))]


def replicas_table(rows: Iterable[Row]) -> Table:
    """Seconds a sequence by data parallelism: every layout of 16 GPUs, and one of 8."""
    found: dict[tuple[int, str, str], dict[str, str]] = {}
    for row in rows:
        replica = int(row["gpus"]) // int(row["dp"])
        layout = "-".join(row[key] for key in ("tp", "cp", "pp"))
        if replica == 16 or layout == "4-2-1":
            place = (-replica, row["micro_batch"], layout)
            found.setdefault(place, {})[f"dp{row['dp']}"] = _both([row], _replica_s, 3)
    degrees = (1, 2, 4, 8, 16, 32)
    return Table(
        name="fujii_replicas",
        title="Fujii's A100: seconds a sequence, published / ours",
        columns=(
            *(Column(key, key) for key in ("replica", "TP-CP-PP", "micro-batch")),
            *(Column(f"dp{dp}", f"DP {dp}") for dp in degrees),
        ),
        rows=tuple(
            {"replica": -replica, "TP-CP-PP": layout, "micro-batch": micro_batch, **cells}
            for (replica, micro_batch, layout), cells in sorted(found.items())
        ),
    )


def batches_table(rows: Iterable[Row]) -> Table:
    """Milliseconds a layer and micro-batch of vTrain's rows of 24 layers at PP 1 and DP 1, the mean
    over global batches."""
    found = [row for row in rows if "vTrain" in row["source"] and row["layers"] == "24"]
    found = [row for row in found if row["pp"] == row["dp"] == "1"]
    batches = ("1", "2", "4", "8")
    cells = {
        (tp, batch): [row for row in found if (row["tp"], row["micro_batch"]) == (tp, batch)]
        for tp in ("2", "4", "8")
        for batch in batches
    }
    return Table(
        name="small_model_batches",
        title="vTrain, hidden 2048: milliseconds a layer and micro-batch, published / ours",
        columns=(Column("tp", "TP"), *(Column(b, f"micro-batch {b}") for b in batches)),
        rows=tuple(
            {"tp": tp, **{b: _both(cells[tp, b], _micro_batch_ms, 2) for b in batches}}
            for tp in ("2", "4", "8")
        ),
    )


def _replica_s(row: Row, speed: float) -> float:
    """Seconds in which a replica trains one sequence at a speed (tokens/s/GPU)."""
    return int(row["seq_len"]) / (speed * (int(row["gpus"]) // int(row["dp"])))


def _micro_batch_ms(row: Row, speed: float) -> float:
    """Milliseconds of one layer and micro-batch at a speed: the step over layers and batches."""
    tokens = int(row["micro_batch"]) * int(row["seq_len"])
    return 1e3 * tokens / (speed * int(row["gpus"]) * int(row["layers"]))


def _both(rows: list[Row], value: Callable[[Row, float], float], digits: int) -> str:
    """The mean value of rows at the published speed, and at ours."""
    speeds = (SPEED, f"pred_{SPEED}")
    means = (fmean(value(row, float(row[speed])) for row in rows) for speed in speeds)
    return " / ".join(f"{mean:.{digits}f}" for mean in means)
