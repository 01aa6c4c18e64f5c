"""The command `study`: answers to the questions of a study."""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.targets import Methods, need_file
from rematbench.host.console import console, rich_table
from rematbench.host.files import write_atomically
from rematbench.host.workers import collect_rarely
from rematbench.paper.sheet.table import Column, Table
from rematbench.paper.studies.answers import StudyAnswer, ask_study, dump, line
from rematbench.paper.studies.study import load_study, narrowed
from rematbench.plugins.discover import discover

OMITTED = ("study", "model", "cluster", "command")


def study(
    file: Annotated[Path, Argument(metavar="STUDY.yaml", help="As config/study/*.yaml.")],
    output: Annotated[
        Path | None,
        Option(
            "-o", "--output", metavar="ANSWERS.json", help="Also write the answers to this file."
        ),
    ] = None,
    workload: Annotated[str, Option(metavar="W", help="Only this workload.")] = "",
    method: Annotated[str, Option(metavar="M", help="Only the method with this label.")] = "",
    methods: Methods = None,
) -> None:
    """Answer a study's questions: longest sequence, bytes of an operator, wasted bytes.

    All methods of a question have the same candidate layouts.

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


def _show(name: str, answers: list[StudyAnswer]) -> None:
    """Print one table per question, in SI units."""
    for ask in dict.fromkeys(answer.ask for answer in answers):
        rows = tuple(line(answer) for answer in answers if answer.ask == ask)
        keys = [k for k in dict.fromkeys(k for row in rows for k in row) if k not in OMITTED]
        table = Table(
            name=ask,
            title=f"{name}: {ask} (simulated)",
            columns=tuple(Column(key, key) for key in keys if any(row.get(key) for row in rows)),
            rows=rows,
        )
        console().print(rich_table(table.printed()))
