"""The commands about claims: study asks a study's questions, claims sets answers beside papers."""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.sheet import read, rich_table
from rematbench.cli.targets import need_file, need_folder
from rematbench.host.console import CommandError, console
from rematbench.host.garbage import collect_rarely
from rematbench.plugins.discover import discover
from rematbench.published.sheets import TABLED, read_sheet
from rematbench.runs.store import write_atomically
from rematbench.spec.paths import data_dir
from rematbench.studies.answers import Answer, ask_study, dump, line, read_answers
from rematbench.studies.claim_ledger import claims_table, prediction_answers
from rematbench.studies.claims import load_claims
from rematbench.studies.study import load_study, narrowed
from rematbench.studies.tables import study_tables
from rematbench.tables.table import Column, Table

METHODS = Annotated[
    list[Path] | None, Option("--methods", metavar="DIR", help="More method files (repeatable).")
]
HIDDEN = ("study", "model", "cluster", "command")


def study(
    file: Annotated[Path, Argument(metavar="STUDY.yaml", help="As config/study/*.yaml.")],
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="ANSWERS.json", help="Also write them.")
    ] = None,
    workload: Annotated[str, Option(metavar="W", help="Only this workload.")] = "",
    method: Annotated[str, Option(metavar="M", help="Only this method, by its label.")] = "",
    methods: METHODS = None,
) -> None:
    """Ask what papers claim beside a step time: longest sequence, bytes of an operator, waste.

    Every method of a question has the same candidate layouts.

    \b
    Example:
      rematbench study config/study/mst.yaml --workload llama3-8b --method mst
    """
    need_file("-o", output)
    collect_rarely()
    asked = narrowed(load_study(file), workload, method)
    found = ask_study(asked, discover(methods or ()), str(file))
    if output is None:
        _show(asked.name, found)
        return
    write_atomically(output, dump(found))
    typer.echo(f"{output}: {len(found)} answers in {time.process_time():.1f} s of CPU")


def _show(name: str, answers: list[Answer]) -> None:
    """One table per question, all figures in SI units."""
    for ask in dict.fromkeys(answer.ask for answer in answers):
        rows = tuple(line(answer) for answer in answers if answer.ask == ask)
        keys = [k for k in dict.fromkeys(k for row in rows for k in row) if k not in HIDDEN]
        table = Table(
            name=ask,
            title=f"{name}: {ask} (simulated)",
            columns=tuple(Column(key, key) for key in keys if any(row.get(key) for row in rows)),
            rows=rows,
        )
        console().print(rich_table(table))


def claims(
    answers: Annotated[list[Path], Argument(metavar="ANSWERS.json...", help="From study.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
    predictions: Annotated[
        Path | None, Option(metavar="PRED.csv", help="Predicted published rows.")
    ] = None,
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
    cells = read(predictions, "--predictions", *TABLED, "pred_status") if predictions else []
    rows = read_sheet(data_dir("published") / "claims.csv")
    declared = load_claims()
    ledger = claims_table(rows, declared, [*found, *prediction_answers(cells)])
    made = [ledger, *study_tables(found, rows, declared)]
    for table in made:
        table.write(output)
    typer.echo(f"{output}: {', '.join(table.name for table in made)}")


def _read(path: Path) -> list[Answer]:
    try:
        return read_answers(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise CommandError(f"{path}: cannot be read ({reason})") from error
