"""Tables of baselines: traced, predicted and published bytes, saved tensors, and the agreement of
engines."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematbench.host.console import CommandError
from rematbench.paper.sheet.table import Column, Table, columns, exponent, gib, mib, signed_percent
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
NOTE = (
    "Traced: one rank through the package's own schedules on fake tensors, states included. "
    "Known extra: tensors that the stack keeps in addition to the operator table, listed in "
    "baselines_tensors and sized from shapes. Unexplained: (traced - known extra) / predicted - "
    "1. Freed: activation bytes saved relative to the same engine without a policy at the same "
    "layout. Engines are not ranked."
)


def _bytes_or_word(value: Any) -> str:
    return gib(value) if isinstance(value, int) else str(value)


POINTS = (
    *columns("point policy status"),
    Column("traced_peak_bytes", "traced GiB", gib),
    Column("known_extra_bytes", "known extra GiB", gib),
    Column("predicted_peak_bytes", "predicted GiB", _bytes_or_word),
    Column("unexplained", "unexplained %", signed_percent),
    Column("published_peak_bytes", "published GiB", _bytes_or_word),
    Column("traced_host_bytes", "traced host GiB", gib),
    Column("freed_against_none", "freed %", lambda value: f"{100 * value:.0f}"),
    Column("kernel_stack", "kernel stack"),
)
TENSORS = (
    *columns("model tensor dtype"),
    Column("rows", "rows"),
    Column("row_bytes", "bytes a row"),
    Column("table_bytes", "operator table MiB", mib),
    Column("stack_bytes", "traced stack MiB", mib),
    *columns("why"),
)
AGREEMENT = (
    *columns("engine case precision"),
    Column("loss", "loss", lambda value: f"{value:.7f}"),
    Column("gradient_norm", "gradient norm", lambda value: f"{value:.7f}"),
    Column("loss_error", "loss, relative", exponent),
    Column("norm_error", "norm, relative", exponent),
)


def build(records: Path, agreement: Path) -> list[Table]:
    points = load_points()
    traced = points_table(points, records)
    if not traced.rows:
        raise CommandError(f"{records}: no record of a point of config/baseline_points.yaml")
    return [agreement_table(agreement), traced, tensors_table(points)]


def points_table(points: Sequence[Point], folder: Path) -> Table:
    """The table of every point that has a record."""
    return Table(
        name="baselines_traced",
        title="Baselines traced at paper scale, predicted and published: peak of one rank",
        columns=POINTS,
        rows=tuple(rows(tuple(points), folder)),
        note=NOTE,
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
    return Table(
        name="baselines_tensors",
        title="Tensors of one layer and micro-batch: operator table and traced stack",
        columns=TENSORS,
        rows=tuple(found),
        note="Without a policy. A test checks that the traced bytes per layer are exactly these.",
    )


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
    return Table(
        name="agreement",
        title="Three engines on the same weights and batch, executed on a CPU: the first step",
        columns=AGREEMENT,
        rows=tuple(lines),
        note="Relative to the executor on one process. tiny-llama, 64 tokens, four sequences a "
        "step. Layouts differ in degrees and in what ZeRO shards.",
    )
