"""The command `run`: one bundle of a suite, simulated."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from rematbench.cli.targets import Methods, Output, SuiteFile, need_folder
from rematbench.host.workers import collect_rarely
from rematbench.plugins.discover import discover
from rematbench.worlds.records.store import Store
from rematbench.worlds.records.suite import load_suite, run_bundle


def run(
    suite: SuiteFile,
    output: Output,
    method: Annotated[str, Option(help="Method or composition a+b of the suite.")],
    methods: Methods = None,
    store: Annotated[
        Path | None, Option(metavar="DIR", help="Folder of finished runs; these are not run again.")
    ] = None,
) -> None:
    """Run one bundle of a suite (a method on every problem); writes a record per run.

    \b
    Example:
      rematbench run config/smoke.yaml --method keep_all -o results/smoke/records/keep_all
    """
    need_folder("-o", output)
    collect_rarely()
    finished = Store(store) if store else None
    records = run_bundle(load_suite(suite), method, discover(methods or ()), output, finished)
    counts = {status: [r.status for r in records].count(status) for status in ("ok", "oom")}
    other = len(records) - sum(counts.values())
    typer.echo(
        f"{method}: {counts['ok']} fit, {counts['oom']} out of memory, {other} "
        "unsupported or failed"
    )
