"""Tables of our runtime on one GPU: the claims that hold, and the seconds of a step by action."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from rematbench.engine.program.action import Kind
from rematbench.measure.parts.checks import PACKAGES_RUN, SUMMARY, Finding, Summary, read_summary
from rematbench.measure.parts.measured_errors import CPU_NOTE, runs_with
from rematbench.measure.records import ActionSeconds, by_cell, read_lines
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {"runs": "results/measured/gpu*"}
TABLES = ("gpu_checks", "gpu_actions")


def build(runs: list[Path]) -> list[Table]:
    """The tables of all runs; if several runs timed the actions of a cell, the last run counts."""
    summaries = {str(path): read_summary(path / SUMMARY) for path in runs_with(runs, SUMMARY)}
    actions: dict[str, list[ActionSeconds]] = {}
    for path in runs_with(runs, "actions.jsonl"):
        actions |= by_cell(read_lines(path / "actions.jsonl", ActionSeconds))
    lines = [line for own in actions.values() for line in own]
    tables = [checks_table(summaries)] if summaries else []
    return [*tables, actions_table(lines)] if lines else tables


def checks_table(summaries: Mapping[str, Summary]) -> Table:
    """Every claim of the runs, whether it holds, and its numbers. If several runs check a claim,
    the last run with a verdict counts; the runs of packages are collected from all runs."""
    words = {True: "yes", False: "NO", None: "not known"}
    said: dict[str, tuple[str, Finding]] = {}
    for run, summary in summaries.items():
        for found in summary.findings:
            if found.claim == PACKAGES_RUN and found.claim in said:
                said[found.claim] = _joined(*said[found.claim], Path(run).name, found)
            elif found.holds is not None or found.claim not in said:
                said[found.claim] = Path(run).name, found
    rows = [
        {"claim": claim, "holds": words[found.holds], "numbers": found.text, "run": run}
        for claim, (run, found) in said.items()
    ]
    lost = [
        f"{Path(run).name}/{ran.part}: {ran.status}, {ran.reason}"
        for run, summary in summaries.items()
        for ran in summary.parts
        if ran.reason
    ]
    days = sorted({summary.written[:10] for summary in summaries.values()})
    known = [one for one in summaries.values() if any(f.holds is not None for f in one.findings)]
    devices = dict.fromkeys(summary.device for summary in known)
    return table_of(
        "gpu_checks",
        rows,
        devices=", ".join(devices) or "no GPU",
        days=", ".join(days),
        lost="; ".join(lost) or "nothing",
    )


def _joined(first_run: str, first: Finding, last_run: str, last: Finding) -> tuple[str, Finding]:
    holds = None if None in (first.holds, last.holds) else first.holds and last.holds
    return f"{first_run}, {last_run}", replace(last, holds=holds, text=f"{first.text}; {last.text}")


def actions_table(lines: Sequence[ActionSeconds]) -> Table:
    """Seconds of a step's actions by kind, with the largest differences of each step first."""
    lost = [f"{one.cell} {one.status}: {one.reason}" for one in lines if one.status != "ok"]
    lines = [one for one in lines if one.status == "ok"]
    cells = list(dict.fromkeys(line.cell for line in lines))
    at = {cell: place for place, cell in enumerate(cells)}
    rows = [
        {
            **{key: getattr(one, key) for key in ("cell", "unit", "op", "kind", "stream")},
            **{key: getattr(one, key) for key in ("actions", "seconds", "predicted_s")},
            "difference_s": one.seconds - one.predicted_s,
        }
        for one in sorted(
            lines, key=lambda one: (at[one.cell], -abs(one.seconds - one.predicted_s))
        )
    ]
    computes = (row for row in rows if row["stream"] == "compute")
    works = [row for row in computes if row["kind"] != Kind.WAIT.value]
    sums = [
        f"{cell} {math.fsum(row['seconds'] for row in own):.4g} s, predicted "
        f"{math.fsum(row['predicted_s'] for row in own):.4g} s"
        for cell in cells
        if (own := [row for row in works if row["cell"] == cell])
    ]
    device = lines[0].provenance.device if lines else ""
    return table_of(
        "gpu_actions",
        rows,
        device=device,
        cpu=CPU_NOTE + " " if device.startswith("cpu") else "",
        sums="; ".join(sums) or "nothing",
        lost=f" Did not run: {'; '.join(lost)}." if lost else "",
    )
