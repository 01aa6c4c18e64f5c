"""Tables of a search's plans, measured on one GPU: is its first plan the fastest, does it fit?"""

import statistics
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rematbench.host.console import CommandError
from rematbench.host.table import grouped
from rematbench.measure.parts.measured_errors import (
    TIME_BAR,
    caveats,
    devices_of,
    measured_and_predicted,
    runs_with,
    turns_of,
)
from rematbench.measure.predicted_steps import PREDICTIONS
from rematbench.measure.records import Searched, Turn, by_cell, read_lines
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {"runs": "results/measured/gpu*"}
TABLES = ("gpu_advice", "gpu_searched")

LOSS_BAR = 0.02
"""The share by which we expected, before any measurement, a step of the search's first plan to be
longer than one of the fastest measured plan, on average over jobs and device memories."""

Row = dict[str, Any]


def build(runs: list[Path]) -> list[Table]:
    plans = searched_plans(runs)
    if not plans:
        raise CommandError("no run has measured a plan (searched/*.jsonl)")
    return [advice_table(advice_rows(plans)), searched_table(plans)]


def searched_plans(runs: list[Path]) -> list[Row]:
    """The rows of all runs' plans; if several runs have a cell, the last run counts."""
    name = PREDICTIONS["searched"]
    found: dict[str, Row] = {}
    for path in runs_with(runs, name):
        rows = searched_rows(read_lines(path / name, Searched), turns_of(path, "searched"))
        found |= {row["cell"]: row for row in rows}
    return list(found.values())


def searched_rows(lines: Sequence[Searched], turns: Sequence[Turn]) -> list[Row]:
    """A row for each predicted plan that had a turn.  `slower`: how much longer its step is than
    the fastest measured step of the same job and memory, as a share."""
    had, rows = by_cell(turns), []
    for line in lines:
        if own := had.get(line.cell):
            row: Row = {key: getattr(line, key) for key in ("cell", "job", "place", "method")}
            row |= {"memory_gib": line.memory_gib, "beside": line.beside}
            row |= {"micro_batch": line.spec.degrees.micro_batch, "status": own[-1].status}
            row |= {"reason": own[-1].reason, "device": own[-1].provenance.device}
            row |= {"predicted_first": own[0].provenance.written >= line.provenance.written}
            rows.append(row | measured_and_predicted(line, own))
    for _, same in _answers(rows):
        fastest = min((row["step_s"] for row in same if row["step_s"]), default=None)
        for row in same:
            row["slower"] = row["step_s"] / fastest - 1.0 if row["step_s"] else None
    return rows


def advice_rows(rows: Sequence[Row]) -> list[Row]:
    """A row for each job and memory: the search's first plan, the fastest measured plan, and the
    best plan of the compared methods.  `lost`: 1 if the first plan ran out of memory."""
    found = []
    for (job, memory), same in _answers(rows):
        pick = next((row for row in same if row["place"] == 1), None)
        ran = [row for row in same if row["step_s"]]
        if pick is None or not ran:
            continue
        fastest = min(ran, key=lambda row: float(row["step_s"]))
        beside = next((row for row in same if row["beside"]), None)
        row = {"job": job, "memory_gib": memory, "device": pick["device"]}
        row |= {"pick": _named(pick), "status": pick["status"]}
        row |= {key: pick[key] for key in ("step_s", "predicted_step_s", "step_s_error")}
        row |= {"reserved_bytes": pick["reserved_bytes"], "fastest": _named(fastest)}
        row |= {"measured": len(ran), "lost": pick["slower"] if pick["step_s"] else 1.0}
        row |= {"predicted_first": pick["predicted_first"]}
        row |= {"beside": _named(beside) if beside else None}
        row |= {"gain": _over(beside, pick, "step_s")}
        found.append(row | {"predicted_gain": _over(beside, pick, "predicted_step_s")})
    return found


def searched_table(rows: Sequence[Row]) -> Table:
    errors = [abs(row["step_s_error"]) for row in rows if row["step_s"]]
    out = [f"{row['cell']} ({row['method']})" for row in rows if row["status"] == "oom"]
    return table_of(
        "gpu_searched",
        rows,
        devices=devices_of(rows),
        caveats=caveats(rows),
        mean=100 * statistics.fmean(errors or [0.0]),
        count=len(errors),
        bar=100 * TIME_BAR,
        out=", ".join(out) or "none",
    )


def advice_table(rows: Sequence[Row]) -> Table:
    """The table of how much slower the search's first plan is than the fastest measured plan, by
    job and device memory."""
    most = max((row["lost"] for row in rows), default=0.0)
    out = [f"{row['job']} at {row['memory_gib']:g} GiB" for row in rows if row["status"] == "oom"]
    by_device = grouped((row["device"], row["lost"]) for row in rows)
    words = [f"{device} {_mean(lost)}" for device, lost in by_device.items()]
    each = f" ({', '.join(words)})" if len(words) > 1 else ""
    return table_of(
        "gpu_advice",
        rows,
        devices=devices_of(rows),
        caveats=caveats(rows),
        mean_lost=_mean([row["lost"] for row in rows]) + each,
        most=100 * most,
        bar=100 * LOSS_BAR,
        out=", ".join(out) or "none of the first plans",
    )


def _mean(lost: Sequence[float]) -> str:
    return f"{100 * statistics.fmean(lost or [0.0]):.2f} % of {len(lost)}"


def _answers(rows: Sequence[Row]) -> Iterator[tuple[tuple[str, float], list[Row]]]:
    """Yield each (job, memory) with its rows, which must be adjacent."""
    for key, same in groupby(rows, key=lambda row: (row["job"], row["memory_gib"])):
        yield key, list(same)


def _named(row: Row) -> str:
    return f"{row['method']}, micro-batch {row['micro_batch']}"


def _over(baseline: Row | None, pick: Row, key: str) -> float | None:
    if baseline is None or not baseline["step_s"] or not pick["step_s"]:
        return None
    return float(baseline[key] / pick[key] - 1.0)
