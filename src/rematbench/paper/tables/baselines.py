"""Tables of baselines: traced, predicted and published bytes, saved tensors, and the agreement of
engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematbench.host.console import CommandError
from rematbench.paper.sheet.table import Table, gib, table_of
from rematbench.paper.studies.baseline_points import Point, load_points, rows
from rematbench.worlds.agreement import PRECISIONS, ROWS, record_name
from rematbench.worlds.packages.process import policy
from rematbench.worlds.packages.stack import layer_tensors, stack_of
from rematbench.worlds.records.measured import Measured
from rematbench.worlds.records.record import read_record

INPUTS = {
    "records": "results/measured/traced/baselines",
    "agreement": "results/measured/executed/agreement",
}
READS = ("config/baseline_points.yaml", "baselines/*/*.py")
TABLES = ("agreement", "baselines_traced", "baselines_tensors")


def _bytes_or_word(value: Any) -> str:
    return gib(value) if isinstance(value, int) else str(value)


def build(records: Path, agreement: Path) -> list[Table]:
    points = load_points()
    traced = points_table(points, records)
    if not traced.rows:
        raise CommandError(f"{records} has no record of any point in config/baseline_points.yaml")
    return [agreement_table(agreement), traced, tensors_table(points)]


def points_table(points: Sequence[Point], folder: Path) -> Table:
    """The table of every point that has a record."""
    return table_of(
        "baselines_traced",
        rows(tuple(points), folder),
        {
            "predicted_peak_bytes": _bytes_or_word,
            "published_peak_bytes": _bytes_or_word,
            "freed_against_none": lambda value: f"{100 * value:.0f}",
        },
    )


def tensors_table(points: Sequence[Point]) -> Table:
    """The tensors that one layer of each model saves for one micro-batch without a policy."""
    found: list[dict[str, Any]] = []
    seen = set()
    for point in points:
        if point.settings or (point.baseline, point.model) in seen:
            continue
        seen.add((point.baseline, point.model))
        stack = stack_of(point.baseline, policy(point.baseline).methods[0], point.problem)
        if stack is not None:
            words = {"model": f"{point.model} ({point.baseline})"}
            found += [
                {**words, "tensor": held.name, **held._asdict()}
                for held in layer_tensors(point.problem, stack)
            ]
            found += [
                {**words, "tensor": name, "stack_bytes": nbytes, "why": "once, never freed"}
                for name, nbytes in stack.once.items()
                if nbytes
            ]
    return table_of("baselines_tensors", found)


def agreement_table(folder: Path) -> Table:
    """The table of first losses and whole-gradient norms of every record, with relative errors
    against the executor's record of the same precision."""
    lines = []
    for precision in PRECISIONS:
        wanted: Measured | None = None
        for engine, own in ROWS.items():
            for row in own:
                record = read_record(folder / f"{record_name(engine, row, precision)}.json")
                line: dict[str, Any] = {"case": row.name, "precision": precision}
                found = record.measured
                if found is None or record.engine is None:
                    line["engine"] = f"{engine}: {record.status}: {record.reason}"
                    lines.append(line)
                    continue
                line |= {"engine": record.engine.label, "loss": found.losses[0]}
                line["gradient_norm"] = found.gradient_norms[0]
                if wanted is None:
                    wanted = found
                else:
                    line["loss_error"], line["norm_error"] = found.first_errors(wanted)
                lines.append(line)
    return table_of("agreement", lines)
