"""Steps and bytes on one GPU, their predictions, and speeds relative to full recomputation."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematbench.host.console import CommandError
from rematbench.measure.layer_suite import LayerSuite, by_hand_names, layer_names, load_layers
from rematbench.measure.parts.layers import ratio
from rematbench.measure.parts.measured_errors import (
    TIME_BAR,
    caveats,
    devices_of,
    mean_error,
    measured_and_predicted,
    runs_with,
    signed_error,
    turns_of,
)
from rematbench.measure.predicted_steps import PREDICTED
from rematbench.measure.records import Prediction, Turn, by_cell, read_lines
from rematbench.paper.sheet.table import Table, table_of
from rematbench.worlds.records.measured import measured_speed
from rematbench.worlds.records.suite_cells import problem_of

INPUTS = {"runs": "results/measured/gpu*", "suite": "config/gpu_layers.yaml"}
READS = ("methods/*.py",)
TABLES = ("gpu_layers", "gpu_ratios")
BYTES_BAR = 0.005
"""The mean absolute error of allocated bytes that we expected before any measurement."""
KEEP_BAR = (1.15, 1.26)
"""The range of speeds, relative to full recomputation, that we expected before any measurement from
methods that keep attention at 32K to 128K tokens."""
KEEPS = "keep attention"


def build(runs: list[Path], suite: Path) -> list[Table]:
    """The tables of all cells in the suite's order. If several runs have a cell, its last measured
    row counts, otherwise its last row."""
    asked = load_layers(suite)
    found: dict[str, dict[str, Any]] = {}
    for path in runs_with(runs, "layers"):
        turns = turns_of(path, "layers")
        for row in layer_rows(asked, path, turns) if turns else ():
            if row["step_s"] or not found.get(row["cell"], {}).get("step_s"):
                found[row["cell"]] = row
    if not found:
        raise CommandError("no run has measured a cell (layers/*.jsonl)")
    problems = [problem.name for problem in asked.problems]
    order = sorted(layer_names(asked), key=lambda name: problems.index(problem_of(name)))
    rows = [found[name] for name in order if name in found]
    return [layers_table(rows), ratios_table(rows)]


def layer_rows(suite: LayerSuite, folder: Path, turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """A row for each cell that has a turn (or a refusal), with its prediction if there is one.  A
    rank that runs alone has no MFU."""
    known = {line.cell: line for line in read_lines(folder / PREDICTED, Prediction)}
    labels, found, by_hand = layer_names(suite), by_cell(turns), by_hand_names(suite)
    problems = {spec.name: spec.problem() for spec in suite.problems}
    rows = []
    for name, label in labels.items():
        line = known.get(name)
        if name not in found or (line is None and name not in by_hand):
            continue
        problem, last = problem_of(name), found[name][-1]
        row: dict[str, Any] = {"cell": name, "problem": problem, "method": label}
        row["run"] = folder.name
        short = last.reason.replace("device memory of pipeline rank 0: ", "")
        row |= {
            "status": f"refused: {short}" if last.status == "refused" else last.status,
            "reason": last.reason,
        }
        row |= {"context": problems[problem].workload.seq_len, "device": last.provenance.device}
        row |= measured_and_predicted(line, found[name])
        reference = f"{problem}.{suite.references[problem]}"
        if row["step_s"]:
            row |= _ratios(found[name], found.get(reference, ()), line, known[reference])
        if row["step_s"] and problem not in suite.alone:
            speed = measured_speed(problems[problem], [row["step_s"]], row["device"])
            row |= {"mfu_causal": speed.mfu_causal, "mfu_dense": speed.mfu_dense}
        first = line is None or last.provenance.written >= line.provenance.written
        row |= {"against": labels[reference], "predicted_first": first}
        rows.append(row)
    return rows


def _ratios(
    turns: Sequence[Turn],
    reference: Sequence[Turn],
    line: Prediction | None,
    reference_line: Prediction,
) -> dict[str, Any]:
    found, step_s = ratio(turns, reference), line.step_s if line else None
    predicted = reference_line.step_s / step_s if reference_line.step_s and step_s else None
    if found is None:
        return {"predicted_ratio": predicted}
    half = found.half_width if math.isfinite(found.half_width) else None
    error = signed_error(found.mean, predicted)
    return {"ratio": found.mean, "half_width": half, "rounds": found.n,
            "predicted_ratio": predicted, "ratio_error": error}  # fmt: skip


def layers_table(rows: Sequence[dict[str, Any]]) -> Table:
    return table_of(
        "gpu_layers",
        rows,
        devices=devices_of(rows),
        caveats=caveats(rows),
        time=mean_error([row["step_s_error"] for row in rows]),
        nbytes=mean_error([row["allocated_bytes_error"] for row in rows]),
        time_bar=100 * TIME_BAR,
        bytes_bar=100 * BYTES_BAR,
    )


def ratios_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Each method's speed relative to the problem's reference, and both MFUs, by context."""
    low, high = KEEP_BAR
    ran = [row for row in rows if row["step_s"]]
    kept = [row["ratio"] for row in ran if KEEPS in row["method"] and row.get("ratio")]
    text = ", ".join(f"{value:.3f}" for value in kept) or "not measured"
    return table_of(
        "gpu_ratios",
        sorted(ran, key=lambda row: (row["context"], row["problem"])),
        devices=devices_of(rows),
        caveats=caveats(rows),
        kept=text,
        low=low,
        high=high,
    )
