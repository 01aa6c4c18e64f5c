"""How far to trust the matrix's numbers: evidence, validated range, ties, and gaps."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from rematbench.choose.outcome import make_problem
from rematbench.matrix.spec import MatrixSpec
from rematbench.matrix.sweep import BEST, DEGREES
from rematbench.plugins.registry import IDENTITY
from rematbench.problem import Problem
from rematbench.published.accuracy import number
from rematbench.published.evidence import Evidence, Known, evidence, family_of
from rematbench.spec.load import load_cluster

Line = dict[str, Any]
Row = Mapping[str, Any]
CELL = ("model", "cluster", "seq_len")


class Range(Struct, frozen=True, kw_only=True):
    """The range of the published cells of a GPU generation to which no constant was fitted."""

    least_seq: int
    most_seq: int
    least_gpus: int
    most_gpus: int
    methods: frozenset[str]

    def outside(self, seq_len: int, gpus: int, family: str) -> list[str]:
        """The properties of a prediction that no such cell covers."""
        found = [] if self.least_seq <= seq_len <= self.most_seq else ["context"]
        if not self.least_gpus <= gpus <= self.most_gpus:
            found.append("GPUs")
        if not set(family.split("+")) - {IDENTITY} <= self.methods:
            found.append("mechanism")
        return found


def ranges(known: Iterable[Known]) -> dict[str, Range]:
    """The validated range by GPU generation."""
    cells: dict[str, list[Known]] = defaultdict(list)
    for cell in known:
        if cell.split != "fitted":
            cells[cell.generation].append(cell)
    return {
        generation: Range(
            least_seq=min(cell.seq_len for cell in own),
            most_seq=max(cell.seq_len for cell in own),
            least_gpus=min(cell.gpus for cell in own),
            most_gpus=max(cell.gpus for cell in own),
            methods=frozenset(name for cell in own for name in cell.family.split("+")),
        )
        for generation, own in cells.items()
    }


def judged(
    rows: Sequence[Row], spec: MatrixSpec, known: Sequence[Known], context_factor: float
) -> list[Line]:
    """The matrix's lines with evidence, what lies outside the validated range, and ties.

    A tie is slower than the cell's fastest by less than the error of such predictions, the larger
    of the two counting.
    """
    covered = ranges(known)
    problems: dict[tuple[Any, ...], Problem] = {}
    lines: list[Line] = []
    for row in rows:
        line: Line = dict(row)
        if row["status"] == "ok":
            where = tuple(row[key] for key in CELL)
            if where not in problems:
                problems[where] = _problem(row, spec)
            found = evidence(problems[where], family_of(str(row["method"])), known, context_factor)
            line |= _evidence(found) | {"outside": _outside(row, covered)}
        lines.append(line)
    for table in dict.fromkeys(line["table"] for line in lines):
        for cell in by_cell(line for line in lines if line["table"] == table).values():
            _mark_ties(cell)
    return lines


def by_cell(lines: Iterable[Line]) -> dict[tuple[str, ...], list[Line]]:
    """Lines by (model, cluster, length), in order."""
    found: dict[tuple[str, ...], list[Line]] = defaultdict(list)
    for line in lines:
        found[tuple(str(line[key]) for key in CELL)].append(line)
    return dict(found)


def _outside(row: Row, covered: Mapping[str, Range]) -> str:
    """The uncovered properties in words; all of them where the generation has no cell."""
    span = covered.get(load_cluster(row["cluster"]).generation)
    if span is None:
        return "context, GPUs, mechanism"
    return ", ".join(
        span.outside(int(row["seq_len"]), int(row["gpus"]), family_of(str(row["method"])))
    )


def _problem(row: Row, spec: MatrixSpec) -> Problem:
    whole = ("gpus", "global_batch", *DEGREES)
    numbers = {key: int(row[key]) for key in whole if key != "dp"}
    return make_problem(
        spec.problem(int(row["seq_len"]), model=row["model"], cluster=row["cluster"], **numbers)
    )


def _evidence(found: Evidence) -> Line:
    return {
        "grade": found.grade or "no rows",
        "rule": found.rule,
        "evidence_cells": found.cells,
        "expected_error": found.error,
        "evidence_groups": "; ".join(found.groups),
    }


def speed(line: Row) -> float:
    """Tokens/s/GPU where it fits, else 0."""
    return (number(line, "tokens_per_s_per_gpu") or 0.0) if line["status"] == "ok" else 0.0


def _mark_ties(cell: list[Line]) -> None:
    best = max(cell, key=speed)
    if not speed(best):
        return
    best["rank"] = "best"
    for line in cell:
        errors = [one.get("expected_error") or 0.0 for one in (best, line)]
        if line is not best and speed(line) >= speed(best) * (1.0 - max(errors)):
            line["rank"] = "tie"


class Outcome(Struct, frozen=True, kw_only=True):
    """The matrix in numbers, from the best-layout table.  Gains are over the baseline at its own
    best layout, in fractions."""

    cells: int
    fitting: int
    tied: int
    inside: int
    gains: tuple[float, ...]
    beaten: int
    baseline: str

    @property
    def clear(self) -> int:
        """Cells that one method wins alone."""
        return self.fitting - self.tied

    @property
    def sentence(self) -> str:
        """The outcome in one sentence."""
        if not self.gains:
            return f"Of {self.cells} simulated cells, {self.fitting} fit with any method."
        median, low, high = (
            100 * value
            for value in (statistics.median(self.gains), min(self.gains), max(self.gains))
        )
        return (
            f"Predicted, not measured: something fits in {self.fitting} of {self.cells} cells "
            f"(model x cluster x length); each method at its best layout, the fastest is a median "
            f"{median:.0f} % (from {low:.0f} to {high:.0f} %) above {self.baseline} in the "
            f"{len(self.gains)} cells where that fits too, by more than the error of such "
            f"predictions in {self.beaten} of them; which method is fastest is clear in only "
            f"{self.clear} cells and a tie in {self.tied}, and {self.inside} of the {self.fitting} "
            f"winners lie inside the range of contexts, GPU counts and mechanisms that published "
            f"cells validate."
        )


def outcome(lines: Sequence[Line], baseline: str) -> Outcome:
    """Count the best-layout table."""
    cells = by_cell(line for line in lines if line["table"] == BEST)
    fitting = [cell for cell in cells.values() if any(speed(line) for line in cell)]
    gains, inside, tied, beaten = [], 0, 0, 0
    for cell in fitting:
        best = max(cell, key=speed)
        inside += not best["outside"]
        tied += any(line.get("rank") == "tie" for line in cell)
        base = next(line for line in cell if line["arm"] == baseline)
        if speed(base):
            gains.append(speed(best) / speed(base) - 1.0)
            beaten += base.get("rank") not in ("tie", "best")
    return Outcome(
        cells=len(cells),
        fitting=len(fitting),
        tied=tied,
        inside=inside,
        gains=tuple(gains),
        beaten=beaten,
        baseline=baseline,
    )
