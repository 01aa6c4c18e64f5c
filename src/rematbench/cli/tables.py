"""The commands that make tables of records, sheets and answers for the workflow."""

from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import asdict
from typer import Argument, Option

from rematbench.cli.matrix import SUITE, declared, lines_of
from rematbench.cli.targets import (
    Methods,
    More,
    Output,
    Predictions,
    Records,
    SuiteFile,
    need_file,
    need_folder,
)
from rematbench.engine.lowering.lower import lower
from rematbench.evidence.accuracy import left_out_errors, load_accuracy
from rematbench.evidence.accuracy import validate as score
from rematbench.evidence.job_evidence import out_of_source
from rematbench.evidence.published.derived import all_cells, bundles
from rematbench.evidence.published.sheets import TABLED, read_cells, read_sheet
from rematbench.host.console import CommandError, console, rich_table
from rematbench.host.table import Column, Table, gib, write_sheet
from rematbench.paper.claim_ledger import claims_table, prediction_answers, study_tables
from rematbench.paper.matrix.verdicts import judged, summary
from rematbench.paper.studies.answers import StudyAnswer, read_answers
from rematbench.paper.studies.claims import load_claims
from rematbench.paper.studies.front import pareto_table
from rematbench.paper.tables.atc24 import paper_tables
from rematbench.paper.tables.curves import curve_lines, curves_table
from rematbench.paper.tables.matrix import matrix_tables as tables_of
from rematbench.paper.tables.records import measurement_lines, method_table, read_records, run_lines
from rematbench.paper.tables.rule80 import rule_table
from rematbench.paper.tables.scores import score_tables
from rematbench.paper.tables.speed import NAME, speed_table, timed
from rematbench.paper.tables.stage_memory import stage_bytes
from rematbench.paper.tables.worlds import differing, has_its_own_table, worlds_table
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY
from rematbench.spec.load import calibration
from rematbench.spec.paths import data_dir
from rematbench.worlds.records.record import read_record
from rematbench.worlds.records.replay import replay
from rematbench.worlds.records.suite import labels, load_suite

EXECUTED = ("problem", "engine", "method", "status", "record_key")


def collect(
    suite: SuiteFile,
    records: Records,
    output: Output,
    methods: Methods = None,
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
    rows: Annotated[Path, Argument(metavar="ROWS.csv", help="Published rows.")], output: Output
) -> None:
    """Split published rows, and rows of ours beside them, into a sheet per bundle.

    \b
    Example:
      rematbench sheets results/published/runs.csv -o results/paper/sheets
    """
    need_folder("-o", output)
    for name, cells in bundles(
        all_cells(read_cells(rows, "ROWS.csv", *TABLED)), discover()
    ).items():
        write_sheet(output / f"{name}.csv", cells)
        typer.echo(f"{output / name}.csv: {len(cells)} rows")


def tables(
    predictions: Annotated[list[Path], Argument(metavar="PRED.csv...", help="From predict.")],
    output: Output,
    joined: Annotated[
        Path | None, Option(metavar="ALL.csv", help="Also write all rows as one sheet.")
    ] = None,
    more: More = None,
) -> None:
    """Write the papers' tables and the accuracy tables from predicted sheets.

    \b
    Example:
      rematbench tables results/paper/predictions/*.csv -o results/paper/tables
    """
    need_folder("-o", output)
    need_file("--joined", joined)
    cells = [
        cell
        for path in predictions
        for cell in read_cells(path, "PRED.csv", *TABLED, "pred_status")
    ]
    published = [cell for cell in cells if cell.get("cell", "published") == "published"]
    accuracy, constants = load_accuracy(), calibration()
    strange = out_of_source()
    left_out = left_out_errors(strange, accuracy, constants)
    beside = read_cells(more, "--more", *TABLED, "pred_status") if more else ()
    report = score(published, constants, accuracy, left_out, beside)
    scores = score_tables(report, published, constants, accuracy, strange, beside)
    made = [*scores, rule_table(published)]
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


def worlds(
    records: Records,
    output: Output,
    again: Annotated[
        Path | None, Option(metavar="FILE", help="What `retrace` says; goes into the note.")
    ] = None,
) -> None:
    """The table method x layout: lossless? bytes simulated, executed and traced.

    \b
    Example:
      rematbench worlds results/measured -o results/paper/tables
    """
    need_folder("-o", output)
    found = [entry for entry in read_records(records) if not has_its_own_table(entry[1])]
    if not any(record.measured for _, record in found):
        raise CommandError(f"no measured record below {', '.join(map(str, records))}")
    table = worlds_table(found, again.read_text(encoding="utf-8").strip() if again else "")
    table.write(output)
    wrong = differing(found)
    typer.echo(f"{output / table.name}.md: {len(table.rows)} rows, {len(wrong)} break a law")
    for line in wrong:
        typer.echo(line, err=True)
    if wrong:
        raise typer.Exit(1)


def curves(
    records: Annotated[Path, Argument(metavar="DIR", help="Records of `converge`.")],
    output: Output,
) -> None:
    """Loss curves (convergence.csv) and the table of their deviations from keep_all's.

    \b
    Example:
      rematbench curves results/measured/convergence -o results/paper/tables
    """
    need_folder("-o", output)
    found = [(problem, record) for problem, record in read_records([records]) if record.measured]
    bases = {problem: r for problem, r in found if r.spec.method == IDENTITY}
    alone = sorted({problem for problem, _ in found} - set(bases))
    if alone or not bases:
        of = f" on {', '.join(alone)}" if alone else ""
        raise CommandError(f"{records}: no record of {IDENTITY}{of} to compare with")
    write_sheet(output / "convergence.csv", curve_lines(found, bases))
    curves_table(found, bases).write(output)
    typer.echo(f"{output}: {len(found)} curves")


def claims(
    answers: Annotated[list[Path], Argument(metavar="ANSWERS.json...", help="From study.")],
    output: Output,
    predictions: Predictions = None,
) -> None:
    """Write the ledger of claims, and the tables of the studies behind it.

    Every row of results/published/claims.csv is compared as config/claims.yaml declares, or says
    why it is not.

    \b
    Example:
      rematbench claims results/paper/studies/*.json -o results/paper/tables
        --predictions results/paper/predictions.csv
    """
    need_folder("-o", output)
    found = [answer for path in answers for answer in _read(path)]
    cells = read_cells(predictions, "--predictions", *TABLED, "pred_status") if predictions else []
    rows = read_sheet(data_dir("published") / "claims.csv")
    declared = load_claims()
    ledger = claims_table(rows, declared, [*found, *prediction_answers(cells)])
    made = [ledger, *study_tables(found, rows, declared)]
    for table in made:
        table.write(output)
    typer.echo(f"{output}: {', '.join(table.name for table in made)}")


def _read(path: Path) -> list[StudyAnswer]:
    try:
        return read_answers(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{path}: cannot be read ({reason})") from error


def matrix_tables(
    suite: SUITE,
    results: Annotated[list[Path], Argument(metavar="FILE.csv...", help="From matrix.")],
    output: Output,
) -> None:
    """Tables of the matrix, with bands, what nobody published, and ties; and the Pareto front.

    \b
    Example:
      rematbench matrix-tables config/paper.yaml results/paper/matrix/llama3-8b.csv
        -o results/paper/tables
    """
    need_folder("-o", output)
    spec = declared(suite)
    rows = [row for path in results for row in lines_of(path, "arm")]
    lines = judged(rows, spec)
    made = [*tables_of(lines, spec), pareto_table(spec)]
    for table in made:
        table.write(output)
    typer.echo(f"{output}: {', '.join(table.name for table in made)}")
    typer.echo(summary(lines, spec.baseline))


def speeds(
    executed: Annotated[Path, Argument(metavar="EXECUTED.csv", help="From collect-cells.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where it is written.")],
) -> None:
    """Write the table of measured speed: seconds, MFU and bytes of executed
    cells beside the simulated ones, and gains within each engine.

    \b
    Example:
      rematbench speeds results/measure/executed.csv -o results/measure/tables
    """
    need_folder("-o", output)
    rows = read_cells(executed, "EXECUTED.csv", columns=EXECUTED)
    speed_table(rows).write(output)
    typer.echo(f"{output / NAME}.md: {len(rows)} cells, {timed(rows)} with seconds of a GPU")
