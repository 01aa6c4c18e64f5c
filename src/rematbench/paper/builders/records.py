"""The records of one method, or composition, on every problem of a suite."""

from collections.abc import Mapping
from pathlib import Path

from rematbench.host.workers import collect_rarely
from rematbench.plugins.discover import discover
from rematbench.worlds.records.store import Store
from rematbench.worlds.records.suite import load_suite, run_bundle


def build(output: Path, values: Mapping[str, str], suite: Path) -> str:
    """Write a record for each problem and variant; runs that are finished are not run again."""
    collect_rarely()
    method, store = values["method"], Store(Path("results") / values["suite"] / "cells")
    records = run_bundle(load_suite(suite), method, discover(), output, store)
    counts = {status: [r.status for r in records].count(status) for status in ("ok", "oom")}
    other = len(records) - sum(counts.values())
    return (
        f"{method}: {counts['ok']} fit, {counts['oom']} out of memory, {other} "
        "unsupported or failed"
    )
