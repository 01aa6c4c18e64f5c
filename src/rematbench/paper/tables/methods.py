"""Runs of a suite: the table of methods, and a sheet with a line per run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rematbench.host.console import CommandError
from rematbench.paper.sheet.table import Table, sheet, table_of
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.records.record import Record, read_records
from rematbench.worlds.records.suite import label_key, labels, load_suite

INPUTS = {
    "suite": "config/{suite}.yaml",
    "records": "results/{suite}/records/simulated/{method}",
}
TABLES = ("methods",)
SHEETS = ("runs",)

Line = dict[str, Any]


def build(suite: Path, records: list[Path]) -> list[Table]:
    found = read_records(records)
    if not found:
        raise CommandError(f"no record (*.json) below {', '.join(map(str, records))}")
    return [
        method_table(found, labels(load_suite(suite), discover())),
        sheet("runs", [_run_line(problem, record) for problem, record in found]),
    ]


def _run_line(problem: str, record: Record) -> Line:
    """A line of runs.csv: the run's spec, status and numbers of the first measured repeat."""
    spec = record.spec
    head: Line = {
        "run_id": record.run_id,
        "problem": problem,
        "world": spec.world,
        "method": spec.method,
        "parameters": msgspec.json.encode(spec.parameters, order="sorted").decode(),
        "model": spec.model.name,
        "cluster": spec.cluster,
        "system": spec.system,
        "gpus": spec.layout.gpus,
        "seq_len": spec.seq_len,
        "precision": spec.precision,
        "attention": spec.stack.attention,
    }
    layout = msgspec.structs.asdict(spec.layout)
    result: Line = {
        "status": record.status,
        "reason": record.reason,
        "plan_hash": record.plan_hash,
        "headroom_bytes": record.headroom_bytes,
        "host_headroom_bytes": record.host_headroom_bytes,
        "binds": record.binds,
        "rematbench": record.provenance.rematbench,
        "calibration_hash": spec.calibration_hash,
    }
    measured = (msgspec.structs.asdict(one) for one in record.repeats if not one.warmup)
    speed = next(measured, {})
    speed.pop("warmup", None)
    return head | layout | result | speed


def method_table(records: Sequence[tuple[str, Record]], labels: Mapping[str, str]) -> Table:
    """The table of every method on every problem at the problem's layout: verdict, speed, bytes,
    freed bytes."""
    rows: list[Line] = []
    base = {problem: record for problem, record in records if record.spec.method == IDENTITY}
    for problem, record in records:
        rows.append(_method_line(problem, record, base.get(problem), labels))
    order = list(dict.fromkeys(row["problem"] for row in rows))
    rows.sort(key=lambda row: (order.index(row["problem"]), RANKS[row["status"]], row["slow"]))
    return table_of("methods", rows)


RANKS = {"ok": 0, "oom": 1, "unsupported": 2, "failed": 3}


def _method_line(
    problem: str, record: Record, base: Record | None, labels: Mapping[str, str]
) -> Line:
    spec = record.spec
    key = label_key(spec.method, spec.parameters)
    line: Line = {
        "problem": problem,
        "label": labels.get(key, spec.method),
        "method": spec.method,
        "status": record.status,
        "headroom_bytes": record.headroom_bytes,
        "slow": float("inf"),
        "remark": record.reason if record.status in ("unsupported", "failed") else "",
    }
    if not record.repeats:
        return line
    own = record.repeats[0]
    line |= msgspec.structs.asdict(own) | {"slow": own.step_s}
    if base is not None and base.repeats:
        line["freed_bytes"] = base.repeats[0].peak_device_bytes - own.peak_device_bytes
        line["slowdown"] = own.step_s / base.repeats[0].step_s - 1
        if record.plan_hash == base.plan_hash and spec.method != IDENTITY:
            line["remark"] = f"no-op: the same plan as {IDENTITY}"
    return line
