"""Measured and predicted values of one GPU, for tables.

Every error is signed: (measured - predicted) / predicted.
"""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rematbench.measure.parts.checks import SUMMARY, read_summary
from rematbench.measure.records import Prediction, Turn, read_lines

TIME_BAR = 0.05
"""The mean absolute error of seconds that we expected before any measurement."""
CPU_NOTE = "This was a trial run on a CPU: the times mean nothing."


def runs_with(runs: Iterable[Path], name: str) -> list[Path]:
    """Return the folders of measurements with a file `name`, the oldest measurement first."""
    there = [path for path in runs if (path / name).exists()]
    return sorted(there, key=_written)


def _written(folder: Path) -> str:
    summary = folder / SUMMARY
    return read_summary(summary).written if summary.exists() else ""


def turns_of(folder: Path, part: str) -> list[Turn]:
    files = sorted(folder.glob(f"{part}/*.jsonl"))
    return [turn for file in files for turn in read_lines(file, Turn)]


def signed_error(got: float | None, want: float | None) -> float | None:
    """Compute (measured - predicted) / predicted; None if either is missing."""
    return got / want - 1.0 if got and want else None


def mean_error(errors: Sequence[float | None]) -> str:
    """Return the mean absolute error in percent and the number of errors, as text."""
    known = [abs(error) for error in errors if error is not None]
    return f"{100 * statistics.fmean(known):.2f} % of {len(known)}" if known else "none"


def measured_and_predicted(line: Prediction | None, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the measured and predicted numbers of a cell with their errors: the median of its
    turns' median step seconds, and the peaks over all turns."""
    steps = [statistics.median(turn.step_s) for turn in turns if turn.step_s]
    found: dict[str, Any] = {"n": len(steps) or None}
    got = {"step_s": statistics.median(steps) if steps else None}
    for key in ("allocated_bytes", "reserved_bytes", "pinned_bytes"):
        got[key] = max(getattr(turn, key) for turn in turns) or None
    for key, value in got.items():
        want = getattr(line, key) if line else None
        found |= {key: value, f"predicted_{key}": want, f"{key}_error": signed_error(value, want)}
    return found


def devices_of(rows: Sequence[dict[str, Any]]) -> str:
    return ", ".join(sorted({row["device"] for row in rows}))


def caveats(rows: Sequence[dict[str, Any]]) -> str:
    """Return the first sentences of a note: a warning if rows are of a CPU, and one if predictions
    were written after their measurement; empty if neither holds."""
    early = all(row["predicted_first"] for row in rows)
    late = "" if early else "NOT every prediction was written before its measurement. "
    return (f"{CPU_NOTE} " if devices_of(rows).startswith("cpu") else "") + late
