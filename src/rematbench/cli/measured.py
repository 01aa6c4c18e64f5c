"""The grids of the executed and traced worlds: `measure` fills results/measured, `worlds` makes
the table from its records (no torch needed)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from typer import Argument, Option

from rematbench.choose.outcome import Status
from rematbench.cli.execute import outcome_of, status_of
from rematbench.cli.options import Request, Timeout
from rematbench.cli.real import need_torch
from rematbench.cli.targets import need_folder
from rematbench.cli.trace import traced
from rematbench.host.console import CommandError
from rematbench.lowering.lower import lower
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY, Composition, Registry
from rematbench.problem import Problem
from rematbench.runs.collect import read_records
from rematbench.runs.measured import Measured
from rematbench.runs.record import Record, read_record, write_record
from rematbench.runs.suite import ProblemSpec, Suite, Variant, bundles, load_suite
from rematbench.tables.worlds import differing, worlds_table
from rematbench.worlds.again import differences
from rematbench.worlds.measure import activation_bytes, compared, measured, measured_record

if TYPE_CHECKING:
    from rematbench.torch.case import Result


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How cells are executed: on what, and whether each is compared with keep_all on the same
    batches (its gradients are kept, by kernels that give the same bits every time) or timed."""

    device: str = "cpu"
    steps: int = 3
    compare: bool = True
    timed_steps: int = 0


class Cell(msgspec.Struct, frozen=True):
    """One method on one problem of a suite; `name` is its record's file."""

    name: str
    problem: Problem
    method: Composition
    plan: Plan | Unsupported


def measure(
    suite: Annotated[Path, Argument(metavar="SUITE.yaml", help="Problems and methods.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
    world: Annotated[Literal["executed", "traced"], Option(help="Run it, or trace a rank.")],
    only: Annotated[
        list[str] | None, Option(metavar="PROBLEM[.METHOD]", help="Some cells (repeatable).")
    ] = None,
    methods: Annotated[
        list[Path] | None, Option("--methods", metavar="DIR", help="More method files.")
    ] = None,
    compare: Annotated[
        Path | None, Option(metavar="DIR", help="Exit 1 if a record is not as its namesake here.")
    ] = None,
    timeout: Timeout = 300,
) -> None:
    """Measure the cells of a suite in the executed or traced world; a record each.

    A record that says the same as before keeps its date, so that a second run changes no file.

    \b
    Example:
      rematbench measure config/traced.yaml --world traced -o results/measured/traced
        --only llama-65b-figure7.keep_all
    """
    need_torch()
    need_folder("-o", output)
    found = cells(load_suite(suite), methods or [], only or [])
    if not found:
        raise CommandError(f"--only {', '.join(only or [])}: no such cell in {suite}")
    if world == "traced":
        for cell in found:
            keep(traced(request_of(cell)), output, cell.name)
    else:
        execute_cells(found, output, timeout)
    typer.echo(f"{output}: {len(found)} records")
    if compare and not as_committed([cell.name for cell in found], output, compare):
        raise typer.Exit(1)


def cells(suite: Suite, folders: list[Path], only: Sequence[str] = ()) -> list[Cell]:
    """Every problem with every method and variant (or only some), in the suite's order."""
    registry = discover(folders)
    problems = {spec.name: spec.problem() for spec in suite.problems}
    found = []
    for name, spec, variant in _asked(suite, registry, only):
        problem = problems[spec.name]
        method = registry.resolve(variant.method, dict(variant.settings))
        found.append(Cell(name, problem, method, _plan(problem, method)))
    return found


def cell_names(suite: Suite, only: Sequence[str] = ()) -> list[str]:
    """The same cells' names, nothing planned."""
    return [name for name, _, _ in _asked(suite, discover(), only)]


def _asked(
    suite: Suite, registry: Registry, only: Sequence[str]
) -> Iterator[tuple[str, ProblemSpec, Variant]]:
    for spec in suite.problems:
        for bundle, variants in bundles(suite, registry).items():
            for number, variant in enumerate(variants):
                name = f"{spec.name}.{bundle}.{number}"
                elsewhere = variant.problems and spec.name not in variant.problems
                if not elsewhere and _wanted(name, only):
                    yield name, spec, variant


def _plan(problem: Problem, method: Composition) -> Plan | Unsupported:
    """A plan that lowers, or why there is none."""
    try:
        plan = method.plan(problem)
        if isinstance(plan, Plan):
            lower(plan, problem)
    except PlanError as error:
        return Unsupported(str(error))
    return plan


def _wanted(name: str, only: Sequence[str]) -> bool:
    return not only or any(name == word or name.startswith(f"{word}.") for word in only)


def request_of(cell: Cell) -> Request:
    """What a cell asks."""
    return Request(problem=cell.problem, method=cell.method, base=cell.problem.base_plan)


def keep(record: Record, folder: Path, name: str) -> None:
    """Write a record without its plan (the hash stays) unless the file says the same already."""
    record = msgspec.structs.replace(record, plan=None)
    path = folder / f"{name}.json"
    if path.is_file():
        old = read_record(path)
        if msgspec.structs.replace(old, provenance=record.provenance) == record:
            return
    write_record(record, path)


def _record_differences(name: str, folder: Path, committed: Path) -> list[str]:
    path = committed / f"{name}.json"
    if not path.is_file():
        return ["no such record"]
    return differences(read_record(folder / f"{name}.json"), read_record(path))


def as_committed(
    names: Sequence[str],
    folder: Path,
    committed: Path,
    differs: Callable[[str, Path, Path], list[str]] = _record_differences,
) -> bool:
    """Whether what a folder has says what the committed one says; a line for each difference that
    `differs` finds of a name in the two."""
    wrong = 0
    for name in names:
        lines = differs(name, folder, committed)
        wrong += bool(lines)
        for line in lines:
            typer.echo(f"{name}: {line}", err=True)
    typer.echo(f"{committed}: {len(names) - wrong} of {len(names)} as committed", err=wrong > 0)
    return not wrong


def execute_cells(found: list[Cell], folder: Path, timeout: float, how: How | None = None) -> None:
    """One launch per world size; each problem's methods beside keep_all on the same batches."""
    for size in sorted({cell.problem.layout.gpus for cell in found}):
        same = [c for c in found if c.problem.layout.gpus == size]
        _execute_size(same, folder, timeout, how or How())


def _execute_size(found: list[Cell], folder: Path, timeout: float, how: How) -> None:
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional
    from rematbench.torch.case import Case  # noqa: PLC0415

    cases: list[Case] = []
    numbers: dict[str, int] = {}
    for cell in found:
        base = [(_base(cell), cell.problem.base_plan)] if how.compare else []
        for name, plan in (*base, (cell.name, cell.plan)):
            if name not in numbers and isinstance(plan, Plan):
                numbers[name] = len(cases)
                cases.append(
                    Case(
                        name=name,
                        problem=cell.problem,
                        plan=plan,
                        steps=how.steps,
                        device=how.device,
                        gradients=how.compare,
                        shards=how.compare,
                        deterministic=how.compare,
                        timed_steps=how.timed_steps,
                        activation_bytes=activation_bytes(cell.problem, plan),
                    )
                )
    results = dict(zip(numbers, job.run_own(cases, timeout), strict=True))
    for cell in found:
        keep(_record(cell, results, how), folder, cell.name)


def _base(cell: Cell) -> str:
    """The name of keep_all's case on the cell's problem."""
    return f"{cell.name.split('.')[0]} {IDENTITY}"


def _record(cell: Cell, results: "dict[str, Result]", how: How) -> Record:
    """A cell's record from its own result and keep_all's."""
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional

    ranks = (cell.problem.layout.gpus,)
    where: dict[str, Any] = {"ranks_per_host": ranks, **job.versions(how.device)}
    outcome: tuple[Status, str, Measured | None]
    plan = cell.plan if isinstance(cell.plan, Plan) else None
    if isinstance(cell.plan, Unsupported):
        outcome = ("unsupported", cell.plan.reason, None)
    elif results[cell.name].status != "ok":
        outcome = (*status_of(results[cell.name]), None)
    else:
        result, base = results[cell.name], results.get(_base(cell))
        outcome = ("ok", "", measured(cell.problem, cell.plan, result))
        if base is not None and base.status == "ok":
            other = compared(cell.problem, result, base, IDENTITY)
            outcome = outcome_of(outcome[2], other)
    return measured_record("executed", cell.problem, cell.method, plan, outcome, where)


def _has_its_own_table(record: Record) -> bool:
    """A baseline's run, or a loss curve, which kept no bytes."""
    return record.observed is not None or bool(record.measured and not record.measured.ranks)


def worlds(
    records: Annotated[list[Path], Argument(metavar="DIR...", help="Folders of records.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DIR", help="Where to write.")],
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
    read = read_records(records)
    found = [entry for entry in read if not _has_its_own_table(entry[1])]
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
