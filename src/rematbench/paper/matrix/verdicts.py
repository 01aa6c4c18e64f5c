"""Confidence in the matrix's numbers: bands, unpublished properties, ties and gains."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rematbench.evaluate.problems import make_problem
from rematbench.evidence.bands import band_of, ratio_band
from rematbench.evidence.peaks import fits_word
from rematbench.evidence.published.sheets import number
from rematbench.host.table import grouped
from rematbench.paper.matrix.best import BEST, CELL, OPEN
from rematbench.paper.matrix.spec import MatrixSpec
from rematbench.paper.matrix.sweep import LAYOUT
from rematbench.problem import Problem

Line = dict[str, Any]
Row = Mapping[str, Any]


def judged(rows: Sequence[Row], spec: MatrixSpec) -> list[Line]:
    """The matrix's lines with speed bands, the words of `fits_word`, the properties outside
    published rows, and ties.

    An arm ties if it is slower than the cell's fastest arm by less than the error of speed ratios.
    The error is for one layout if both arms have the same layout, otherwise between layouts.
    """
    problems: dict[tuple[Any, ...], Problem] = {}
    lines: list[Line] = []
    for row in rows:
        line: Line = dict(row)
        if row["status"] == "ok":
            where = tuple(row[key] for key in CELL)
            if where not in problems:
                numbers = {key: int(row[key]) for key in ("gpus", "global_batch", *OPEN)}
                problems[where] = make_problem(
                    spec.problem(
                        int(row["seq_len"]), model=row["model"], cluster=row["cluster"], **numbers
                    )
                )
            line |= _trust(row, problems[where])
        lines.append(line)
    for table in dict.fromkeys(line["table"] for line in lines):
        for cell in by_cell(line for line in lines if line["table"] == table).values():
            _mark_ties(cell)
    return lines


def by_cell(lines: Iterable[Line]) -> dict[tuple[str, ...], list[Line]]:
    """The lines of each cell (model, cluster, length), in their order."""
    return grouped((tuple(str(line[key]) for key in CELL), line) for line in lines)


def _trust(row: Row, problem: Problem) -> Line:
    band, rate = band_of(problem, str(row["method"])), float(row["tokens_per_s_per_gpu"])
    return {
        "fits": fits_word(float(row["headroom_bytes"]), problem.room_bytes),
        "low": band.low(rate),
        "high": band.high(rate),
        "half_width": band.half_width,
        "outside": ", ".join(band.outside),
    }


def speed(line: Row) -> float:
    """Tokens/s/GPU of a line; 0 if the arm does not fit."""
    return (number(line, "tokens_per_s_per_gpu") or 0.0) if line["status"] == "ok" else 0.0


def _mark_ties(cell: list[Line]) -> None:
    best = max(cell, key=speed)
    if not speed(best):
        return
    best["rank"] = "best"
    for line in cell:
        alike = all(line.get(key) == best.get(key) for key in (*LAYOUT, "partition"))
        half_width = ratio_band(one_layout=alike)
        if line is not best and speed(line) >= speed(best) * math.exp(-half_width):
            line["rank"] = "tie"


def summary(lines: Sequence[Line], baseline: str) -> str:
    """The best-layout table in one sentence: cells where an arm fits, gains of the fastest arm over
    the baseline at its best layout, ties, and the evidence for the winners."""
    cells = by_cell(line for line in lines if line["table"] == BEST)
    fitting = [cell for cell in cells.values() if any(speed(line) for line in cell)]
    winners = [max(cell, key=speed) for cell in fitting]
    bases = [next(line for line in cell if line["arm"] == baseline) for cell in fitting]
    pairs = [pair for pair in zip(winners, bases, strict=True) if speed(pair[1])]
    if not pairs:
        return f"In {len(fitting)} of {len(cells)} simulated cells, some method fits."
    gains = [100 * (speed(best) / speed(base) - 1.0) for best, base in pairs]
    beaten = sum(base.get("rank") not in ("tie", "best") for _, base in pairs)
    tied = sum(any(line.get("rank") == "tie" for line in cell) for cell in fitting)
    inside = sum(not best["outside"] for best in winners)
    tight = sum(best["fits"] == "tight" for best in winners)
    return (
        f"Predicted, not measured: the fastest method at its best layout is a median "
        f"{statistics.median(gains):.0f} % (from {min(gains):.0f} to {max(gains):.0f} %) faster "
        f"than {baseline} at its best layout, by more than our error of such ratios in {beaten} of "
        f"{len(gains)} cells (model x cluster x length). Something fits in {len(fitting)} of "
        f"{len(cells)} cells. Which of the fast methods is fastest is within our error in {tied} "
        f"cells. {inside} of the {len(fitting)} winners lie inside the contexts, GPU counts, "
        f"stacks and mechanisms that were published; {tight} of them are tight."
    )
