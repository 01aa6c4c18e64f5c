"""The commands that the workflow is made of: run, collect, sheets, tables, stages."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict
from typer import Argument, Option

from rematbench.cli.sheet import read, rich_table
from rematbench.cli.targets import need_file, need_folder
from rematbench.host.console import CommandError, console
from rematbench.host.garbage import collect_rarely
from rematbench.lowering.lower import lower
from rematbench.plugins.discover import discover
from rematbench.published.accuracy import load_accuracy, load_left_out
from rematbench.published.paper import paper_tables
from rematbench.published.rule80 import rule_table
from rematbench.published.scores import score_tables
from rematbench.published.sheets import TABLED, all_cells, bundles, write_sheet
from rematbench.published.validate import validate as score
from rematbench.runs.collect import measurement_lines, method_table, read_records, run_lines
from rematbench.runs.record import read_record
from rematbench.runs.reopen import replay
from rematbench.runs.store import Store
from rematbench.runs.suite import labels, load_suite, run_bundle
from rematbench.spec.load import calibration
from rematbench.tables.stage_memory import stage_bytes
from rematbench.tables.table import Column, Table, gib

SUITE = Annotated[Path, Argument(metavar="SUITE.yaml", help="Problems and methods.")]
FOLDER = Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")]
METHODS = Annotated[
    list[Path] | None, Option("--methods", metavar="DIR", help="More method files (repeatable).")
]


def run(
    suite: SUITE,
    output: FOLDER,
    method: Annotated[str, Option(help="The bundle: a method or a+b of the suite.")],
    methods: METHODS = None,
    store: Annotated[
        Path | None, Option(metavar="DIR", help="Finished runs, so that none is run twice.")
    ] = None,
) -> None:
    """Run one bundle of a suite (a method on every problem); writes a record per run.

    \b
    Example:
      rematbench run config/smoke.yaml --method keep_all -o results/smoke/records/keep_all
    """
    need_folder("-o", output)
    collect_rarely()
    finished = Store(store, say=typer.echo) if store else None
    records = run_bundle(load_suite(suite), method, discover(methods or ()), output, finished)
    counts = {status: [r.status for r in records].count(status) for status in ("ok", "oom")}
    other = len(records) - sum(counts.values())
    typer.echo(f"{method}: {counts['ok']} fit, {counts['oom']} out of memory, {other} neither")


def collect(
    suite: SUITE,
    records: Annotated[list[Path], Argument(metavar="DIR...", help="Folders of records.")],
    output: FOLDER,
    methods: METHODS = None,
) -> None:
    """Gather records into runs.csv, measurements.csv (tidy) and the table of methods.

    \b
    Example:
      rematbench collect config/smoke.yaml results/smoke/records -o results/smoke
    """
    need_folder("-o", output)
    found = read_records(records)
    if not found:
        raise CommandError(f"no record (*.json) below {', '.join(map(str, records))}")
    names = labels(load_suite(suite), discover(methods or ()))
    write_sheet(output / "runs.csv", run_lines(found))
    write_sheet(output / "measurements.csv", measurement_lines(found))
    method_table(found, names).write(output / "tables")
    typer.echo(f"{output}: {len(found)} runs")


def sheets(
    rows: Annotated[Path, Argument(metavar="ROWS.csv", help="Published rows.")], output: FOLDER
) -> None:
    """Split published rows, and rows of ours beside them, into a sheet per bundle.

    \b
    Example:
      rematbench sheets results/published/runs.csv -o results/paper/sheets
    """
    need_folder("-o", output)
    for name, cells in bundles(all_cells(read(rows, "ROWS.csv", *TABLED)), discover()).items():
        write_sheet(output / f"{name}.csv", cells)
        typer.echo(f"{output / name}.csv: {len(cells)} rows")


def tables(
    predictions: Annotated[list[Path], Argument(metavar="PRED.csv...", help="From predict.")],
    output: FOLDER,
    joined: Annotated[
        Path | None, Option(metavar="ALL.csv", help="Also write all rows as one sheet.")
    ] = None,
) -> None:
    """Write the papers' tables and the accuracy tables from predicted sheets.

    \b
    Example:
      rematbench tables results/paper/predictions/*.csv -o results/paper/tables
    """
    need_folder("-o", output)
    need_file("--joined", joined)
    cells = [
        cell for path in predictions for cell in read(path, "PRED.csv", *TABLED, "pred_status")
    ]
    published = [cell for cell in cells if cell.get("cell", "published") == "published"]
    accuracy, constants = load_accuracy(), calibration()
    report = score(published, constants, accuracy, load_left_out())
    made = [*score_tables(report, published, constants, accuracy), rule_table(published)]
    if any("cell" in cell for cell in cells):
        made += paper_tables(cells)
    for table in made:
        table.write(output)
    if joined is not None:
        write_sheet(joined, cells)
    typer.echo(f"{output}: {', '.join(table.name for table in made)}")


def stages(
    record: Annotated[Path, Argument(metavar="RECORD.json", help="From simulate --out or run.")],
    output: Annotated[Path | None, Option("-o", "--output", metavar="STAGES.csv")] = None,
    cluster: Annotated[str, Option(metavar="FILE.yaml", help="If the run's was a file.")] = "",
) -> None:
    """What fills each pipeline stage's memory at its peak.

    \b
    Example:
      rematbench simulate keep_all --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 4096 --global-batch 16 --pp 4 --out run.json
      rematbench stages run.json
    """
    need_file("-o", output)
    again = replay(read_record(record), cluster=cluster)
    program = lower(again.plan, again.problem)
    bars = stage_bytes(again.problem, again.plan, program, again.evaluation)
    rows = tuple(asdict(bar) for bar in bars)
    columns = [Column("rank", "rank")]
    columns += [Column(key, key.replace("_", "-"), gib) for key in rows[0] if key != "rank"]
    table = Table(
        name="stages",
        title=f"GiB at the peak of each stage: {again.title}",
        columns=tuple(columns),
        rows=rows,
        note="Parts and free add up to the device's memory; free below zero does not fit.",
    )
    console().print(rich_table(table))
    if output is not None:
        write_sheet(output, [{**row, "title": again.title} for row in rows])
