"""Long training runs on real text: each method's loss curve beside keep_all's."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from rematbench.cli.execute import status_of
from rematbench.cli.measured import Cell, as_committed, cells, keep
from rematbench.cli.real import need_torch
from rematbench.cli.targets import need_folder
from rematbench.host.console import CommandError
from rematbench.lowering.lower import lower
from rematbench.plan import Plan
from rematbench.plugins.registry import IDENTITY
from rematbench.published.sheets import write_sheet
from rematbench.runs.collect import read_records
from rematbench.runs.measured import Measured
from rematbench.runs.record import Record, RecordError, read_record
from rematbench.runs.suite import load_suite
from rematbench.tables.table import Column, Table, fixed, whole
from rematbench.tables.worlds import label_of
from rematbench.worlds.again import curve_differences
from rematbench.worlds.measure import activation_bytes, measured_record

LEARNING_RATE = 1e-3
TEXT_BYTES = 4 << 20


def converge(
    suite: Annotated[Path, Argument(metavar="SUITE.yaml", help="Problems and methods.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
    steps: Annotated[int, Option(min=2, help="Optimizer steps.")] = 240,
    only: Annotated[
        list[str] | None, Option(metavar="PROBLEM.METHOD", help="Some cells (repeatable).")
    ] = None,
    compare: Annotated[
        Path | None, Option(metavar="DIR", help="Exit 1 if a curve is not as its namesake here.")
    ] = None,
) -> None:
    """Train a suite's model on the Python standard library's sources; a record per method.

    keep_all is trained on every problem, every other method on the first one on which it does
    something; a line for each problem says what is left out there, and why.

    \b
    Example:
      rematbench converge config/convergence.yaml -o results/measured/convergence
    """
    need_torch()
    need_folder("-o", output)
    found, left_out = chosen(cells(load_suite(suite), [], only or []))
    for line in left_out:
        typer.echo(line)
    if not found:
        words = ", ".join(only or [])
        raise CommandError(f"--only {words}: no such cell in {suite} has a plan of its own")
    for cell in found:
        record = _trained(cell, steps)
        keep(record, output, cell.name)
        last = record.measured.losses[-1:] if record.measured else ()
        typer.echo(f"{cell.name}: {record.status} {' '.join(map(str, last))}".rstrip())
    names = [cell.name for cell in found]
    if compare and not as_committed(names, output, compare, _curve_differences):
        raise typer.Exit(1)


def chosen(found: Sequence[Cell]) -> tuple[list[Cell], list[str]]:
    """keep_all on every problem, every other cell on the first problem on which it does something;
    and a line for each problem: what it leaves out, and why."""
    trained: list[Cell] = []
    where: dict[str, str] = {}
    left_out: dict[str, dict[str, list[str]]] = {}
    for cell in found:
        problem, name = cell.name.split(".", maxsplit=1)
        reason = f"trained on {where[name]}" if name in where else _without_work(cell)
        if reason:
            left_out.setdefault(problem, {}).setdefault(reason, []).append(name)
            continue
        trained.append(cell)
        if cell.method.name != IDENTITY:
            where[name] = problem
    lines = []
    for problem, reasons in left_out.items():
        words = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
        lines.append(f"{problem}, left out: {'; '.join(words)}")
    return trained, lines


def _without_work(cell: Cell) -> str:
    """Why a cell has no curve of its own; empty if it has."""
    if not isinstance(cell.plan, Plan):
        return cell.plan.reason.removeprefix(f"{cell.method.name}: ")
    base = cell.problem.base_plan
    if cell.method.name != IDENTITY and lower(cell.plan, cell.problem) == lower(base, cell.problem):
        return f"{IDENTITY}'s program"
    return ""


def _trained(cell: Cell, steps: int) -> Record:
    """The record of one run, in processes of its own."""
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional
    from rematbench.torch.case import Case  # noqa: PLC0415
    from rematbench.torch.parameters import AdamW  # noqa: PLC0415
    from rematbench.torch.text import standard_library  # noqa: PLC0415

    assert isinstance(cell.plan, Plan)
    case = Case(
        name=cell.name,
        problem=cell.problem,
        plan=cell.plan,
        steps=steps,
        measure=False,
        shards=False,
        text_bytes=TEXT_BYTES,
        optimizer=AdamW(lr=LEARNING_RATE),
        activation_bytes=activation_bytes(cell.problem, cell.plan),
    )
    (result,) = job.run_own([case], 3600.0)
    found = None
    if result.status == "ok":
        found = Measured(steps=steps, losses=tuple(result.losses))
    where: dict[str, Any] = {
        **job.versions("cpu"),
        "ranks_per_host": (cell.problem.layout.gpus,),
        "text": standard_library(TEXT_BYTES)[1],
    }
    outcome = (*status_of(result), found)
    return measured_record("executed", cell.problem, cell.method, cell.plan, outcome, where)


def _curve_differences(name: str, folder: Path, committed: Path) -> list[str]:
    """How a curve differs from the committed one, each beside keep_all's."""
    base = f"{name.split('.', maxsplit=1)[0]}.{IDENTITY}.0"
    try:
        again, old = (
            (read_record(at / f"{name}.json"), read_record(at / f"{base}.json"))
            for at in (folder, committed)
        )
    except RecordError as error:
        return [str(error)]
    return curve_differences(again, old)


def curves(
    records: Annotated[Path, Argument(metavar="DIR", help="Records of `converge`.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
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
    lines, rows = [], []
    for problem, record in found:
        own, base = _losses(record), _losses(bases[problem])
        name = label_of(record)
        lines += [
            {"problem": problem, "method": name, "step": step, "loss": loss, "deviation": loss - b}
            for step, (loss, b) in enumerate(zip(own, base, strict=True))
        ]
        rows.append({"problem": problem, "method": name, **_deviation(own, base)})
    write_sheet(output / "convergence.csv", lines)
    _table(rows).write(output)
    typer.echo(f"{output}: {len(rows)} curves")


def _losses(record: Record) -> tuple[float, ...]:
    assert record.measured is not None
    return record.measured.losses


def _deviation(own: tuple[float, ...], base: tuple[float, ...]) -> dict[str, object]:
    gaps = [abs(a - b) / b for a, b in zip(own, base, strict=True)]
    return {
        "steps": len(own),
        "first": own[0],
        "last": own[-1],
        "largest": max(gaps),
        "at_end": gaps[-1],
        "bitwise": "yes" if own == base else "no",
    }


def _table(rows: list[dict[str, object]]) -> Table:
    def exponent(value: object) -> str:
        return f"{float(str(value)):.1e}"

    return Table(
        name="convergence_deviation",
        title="Loss curves against keep_all's (executed, CPU)",
        columns=(
            Column("problem", "problem"),
            Column("method", "method"),
            Column("steps", "steps", whole),
            Column("first", "first loss", fixed(4)),
            Column("last", "last loss", fixed(4)),
            Column("largest", "largest relative deviation", exponent),
            Column("at_end", "at the last step", exponent),
            Column("bitwise", "bitwise"),
        ),
        rows=tuple(rows),
        note="Bytes of the Python standard library's sources, fp32, AdamW at "
        f"{LEARNING_RATE:g}; the same batches for all. A method that splits a GEMM rounds "
        "differently from step 1, and training amplifies it; the others are bitwise equal.",
    )
