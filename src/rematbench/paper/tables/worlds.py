"""The tables `worlds` (the bytes of each method and problem in each world) and `lossless` (the
largest differences for each precision)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematbench.host.console import CommandError
from rematbench.paper.sheet.table import Table, table_of
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.records.measured import Measured
from rematbench.worlds.records.record import Record, read_records
from rematbench.worlds.records.suite import label_key, record_label

INPUTS = {
    "executed": "results/measured/executed/*.json",
    "traced": "results/measured/traced/*.json",
    "retraced": "results/paper/retraced.txt",
}
TABLES = ("worlds", "lossless")
READS = ("methods/*.py",)  # labels show parameters of methods


def build(executed: list[Path], traced: list[Path], retraced: Path) -> list[Table]:
    """The table of all records and the table of their largest differences; CommandError if no
    record is measured, if a record's bytes differ from the ledger, or if a record is not
    lossless."""
    found = read_records([*executed, *traced])
    if not any(record.measured for _, record in found):
        raise CommandError("no record has a measurement")
    if wrong := differing(found):
        raise CommandError("; ".join(wrong))
    again = retraced.read_text(encoding="utf-8").strip()
    return [worlds_table(found, f"Run again for this table: {again}."), lossless_table(found)]


def worlds_table(records: Sequence[tuple[str, Record]], retraced: str = "") -> Table:
    """One row per problem and method, with columns for every world that has a matching record.
    `retraced` is a sentence on the records retraced for this table."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    bases = {problem: r.plan_hash for problem, r in records if r.spec.method == IDENTITY}
    for problem, record in records:
        key = (problem, label_key(record.spec.method, record.spec.parameters))
        row = rows.setdefault(key, {"problem": problem, "method": record_label(record)})
        line = _line(record)
        if record.spec.method != IDENTITY and record.plan_hash == bases.get(problem, ""):
            line["remark"] = f"no-op: {IDENTITY}'s plan"
        row |= {key: value for key, value in line.items() if key not in row}
    return table_of(
        "worlds",
        rows.values(),
        {"recompute_flop": lambda value: f"{float(value) / 1e9:,.3f}"},
        retraced=retraced,
    )


ERRORS = ("first_gradient_error", "gradient_error", "loss_error")
PRECISIONS = {"fp64": "float64", "fp32": "fp32", "bf16": "bf16"}


def lossless_table(records: Sequence[tuple[str, Record]]) -> Table:
    """One row per precision: the largest differences from keep_all of the methods that are not
    equal to it bit by bit, and how far total peaks are above the simulated ones."""
    rows = []
    for precision, name in PRECISIONS.items():
        of = [r for _, r in records if r.measured and r.spec.precision == precision]
        found = [r.measured.comparison for r in of if r.measured and r.measured.comparison]
        row: dict[str, Any] = {"precision": name, "cells": len(found)}
        row["bitwise"] = sum(one.bitwise for one in found)
        for key in ERRORS:
            row[key] = max((getattr(one, key) or 0.0 for one in found), default=None)
        for world in ("traced", "executed") if precision == "bf16" else ():
            ranks = [rank for r in of if r.spec.world == world and r.measured
                     for rank in r.measured.ranks]  # fmt: skip
            row[f"{world}_error"] = max((rank.peak_error for rank in ranks), default=None)
        rows.append(row)
    return table_of("lossless", rows)


def _line(record: Record) -> dict[str, Any]:
    found, world = record.measured, record.spec.world
    if found is None:
        return {"remark": f"{world}: {record.status}: {record.reason}"}
    top = found.fullest
    line: dict[str, Any] = {
        "simulated": top.ledger_boundary_peak_bytes,
        world: top.boundary_peak_bytes,
    }
    if record.spec.precision == "bf16":  # simulated states are those of bf16
        line[f"{world}_error"] = top.peak_error
    if world == "executed":
        line |= _ran(found)
    keys = ("actions", "offload_bytes", "recompute_flop")
    sums = {key: sum(getattr(rank, key) for rank in found.ranks) for key in keys}
    return line | {"differing": found.differing_actions, **sums}


def _ran(measured: Measured) -> dict[str, Any]:
    """The columns that only executed records have."""
    if measured.comparison is None:
        return {}
    other = measured.comparison
    word = "bitwise" if other.bitwise else "yes" if other.lossless else "NO"
    return {"lossless": word, **{key: getattr(other, key) for key in ERRORS}}


def differing(records: Sequence[tuple[str, Record]]) -> list[str]:
    """A line for each record whose bytes differ from the ledger or that is not lossless."""
    wrong = []
    for problem, record in records:
        found = record.measured
        if found is None:
            continue
        if found.differing_actions:
            wrong.append(
                f"{problem} {record.spec.method}: {found.differing_actions} actions differ"
            )
        if found.comparison is not None and not found.comparison.lossless:
            wrong.append(f"{problem} {record.spec.method}: not lossless")
    return wrong
