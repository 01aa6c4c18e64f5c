"""The executed world: plans on torch, in processes that this machine or a launcher started."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rematbench.evaluate.result import Status
from rematbench.host.console import CommandError
from rematbench.host.ranks import record_status
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import IDENTITY, Composition, Registry
from rematbench.worlds.records.measured import Comparison, Measured
from rematbench.worlds.records.record import Record, write_record
from rematbench.worlds.records.suite_cells import Cell, problem_of
from rematbench.worlds.run_records import (
    activation_bytes,
    compared,
    measured,
    measured_record,
    write_rank_record,
)

if TYPE_CHECKING:
    from rematbench.worlds.torch.case import Case, Result
    from rematbench.worlds.torch.rank_processes import LauncherPlace


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How cells are executed.  `compare`: each cell is compared with another cell on the same
    batches, so gradients are kept and kernels are deterministic.  `norms`: gradient norms are
    recorded.  `timed_steps`: steps that are timed after the observed `steps`.  `device_weights`:
    the device draws the weights, which is fast but gives values specific to the device.  `linear`:
    an update is linear in the gradient, so that later steps stay comparable."""

    device: str = "cpu"
    steps: int = 3
    compare: bool = True
    norms: bool = True
    timed_steps: int = 0
    device_weights: bool = False
    linear: bool = False


def run(
    cell: Cell,
    how: How,
    reference: Cell | None = None,
    *,
    timeout_s: float,
    place: "LauncherPlace | None" = None,
    out: Path | None = None,
) -> Record | None:
    """The record of a cell, compared with the losses and gradients of `reference` if given.  If
    only `reference` fails, the cell's record carries that failure.

    `place`: set when this process is a rank that a launcher started.  The record is then written to
    `out`; a rank without a record returns None.
    """
    from rematbench.worlds.torch import rank_processes  # noqa: PLC0415  # torch is optional

    cells = [cell, *([reference] if reference else [])]
    reason = next((one.plan.reason for one in cells if isinstance(one.plan, Unsupported)), "")
    cases = [] if reason else [_case(one, how) for one in cells]
    reason = reason or next(filter(None, map(rank_processes.refusal, cases)), "")
    if reason:
        record = _record(cell, ("unsupported", reason, None), (), how)
        if place is not None and out is not None:
            write_record(record, out)
        return record
    if place is not None:
        return _as_rank(cells, cases, place, timeout_s, out, how)
    hosts = (cell.problem.layout.gpus,)
    return _strictly(cells, rank_processes.run_spawned(cases, timeout_s), hosts, how)


def rerun(record: Record, cell: Cell, registry: Registry) -> Record:
    """Execute the cell of a record again, in processes of this machine, and return the new record.
    The run has the same number of steps and is compared with the method that the record names."""
    found = record.measured or Measured()
    against = found.comparison.against if found.comparison else ""
    how = How(
        device="cpu" if record.provenance.device.startswith("cpu") else "cuda",
        steps=found.steps if record.measured else How().steps,
        compare=bool(against),
        norms=any(found.gradient_norms),
        timed_steps=len(found.step_s),
        linear=found.linear_updates,
    )
    method = registry.resolve(against or IDENTITY)
    plan = method.plan(cell.problem, cell.base) if against else cell.plan
    other = Cell(against, cell.problem, method, plan, cell.base) if against else None
    made = run(cell, how, other, timeout_s=600.0)
    assert made is not None  # only a rank of a launcher can have no record
    return made


def run_cells(
    cells: Sequence[Cell], timeout_s: float, how: How | None = None
) -> Iterator[tuple[Cell, Record]]:
    """Yield every cell with its record; each world size has one launch.  With `how.compare` each
    cell is compared with keep_all on the same problem and batches; if keep_all fails, the cell's
    record has no comparison."""
    from rematbench.worlds.torch import rank_processes  # noqa: PLC0415  # torch is optional

    how = how or How()
    for size in sorted({cell.problem.layout.gpus for cell in cells}):
        same = [cell for cell in cells if cell.problem.layout.gpus == size]
        bases = {cell.name: _keep_all(cell) for cell in same} if how.compare else {}
        cases: dict[str, Case] = {}
        for one in (one for cell in same for one in (bases.get(cell.name), cell)):
            if one is not None and one.name not in cases and isinstance(one.plan, Plan):
                cases[one.name] = _case(one, how)
        results = dict(
            zip(cases, rank_processes.run_spawned(list(cases.values()), timeout_s), strict=True)
        )
        for cell in same:
            base = bases.get(cell.name)
            other = results.get(base.name) if base else None
            kept = other if other is not None and other.status == "ok" else None
            outcome = _outcome(cell, results.get(cell.name), kept, IDENTITY)
            yield cell, _record(cell, outcome, (size,), how)


def _keep_all(cell: Cell) -> Cell:
    """keep_all on the cell's problem, under a name that all cells of the problem share."""
    name = f"{problem_of(cell.name)} {IDENTITY}"
    return Cell(name, cell.problem, Composition(()), cell.problem.base_plan)


def _case(cell: Cell, how: How) -> "Case":
    """The case that torch runs. It lowers the plan, so a PlanError comes before processes start."""
    from rematbench.worlds.torch.case import Case  # noqa: PLC0415  # torch is optional
    from rematbench.worlds.torch.parameters import LINEAR, AdamW  # noqa: PLC0415

    assert isinstance(cell.plan, Plan)
    return Case(
        name=cell.name,
        problem=cell.problem,
        plan=cell.plan,
        steps=how.steps,
        device=how.device,
        gradients=how.compare,
        shards=how.norms,
        deterministic=how.compare,
        timed_steps=how.timed_steps,
        activation_bytes=activation_bytes(cell.problem, cell.plan),
        device_weights=how.device_weights,
        optimizer=LINEAR if how.linear else AdamW(),
    )


def _as_rank(
    cells: list[Cell],
    cases: "list[Case]",
    place: "LauncherPlace",
    timeout_s: float,
    out: Path | None,
    how: How,
) -> Record | None:
    """The record of a rank that a launcher started.  A rank that fails writes its error next to
    `out` before it ends: rank 0 sees only a broken connection."""
    from rematbench.worlds.torch import rank_processes  # noqa: PLC0415  # torch is optional
    from rematbench.worlds.torch.case import failure  # noqa: PLC0415

    started = time.time()
    try:
        results, hosts = rank_processes.run_launched(cases, place, timeout_s)
    except Exception as error:
        if out is not None:
            lost = (*record_status(*failure(error)), None)
            write_rank_record(_record(cells[0], lost, (), how), out, place.rank, started)
        if isinstance(error, rank_processes.RendezvousError):
            raise CommandError(str(error)) from error
        raise
    if not results:
        return None
    record = _strictly(cells, results, hosts, how)
    return write_rank_record(record, out, place.rank, started) if out is not None else record


def _strictly(
    cells: list[Cell], results: "list[Result]", hosts: tuple[int, ...], how: How
) -> Record:
    """The record of the first cell, compared with the second cell if given.  If results failed, the
    record has the first failure."""
    broken = next((result for result in results if result.status != "ok"), results[0])
    reference = results[1] if len(cells) > 1 else None
    outcome = _outcome(cells[0], broken, reference, cells[-1].name)
    return _record(cells[0], outcome, hosts, how)


def _outcome(
    cell: Cell, result: "Result | None", reference: "Result | None", against: str
) -> tuple[Status, str, Measured | None]:
    if isinstance(cell.plan, Unsupported):
        return "unsupported", cell.plan.reason, None
    assert result is not None
    if result.status != "ok":
        return (*record_status(result.status, result.reason), None)
    found = measured(cell.problem, cell.plan, result)
    if reference is None:
        return "ok", "", found
    return compared_outcome(found, compared(cell.problem, result, reference, against))


def compared_outcome(
    measured_run: Measured, comparison: Comparison
) -> tuple[Status, str, Measured | None]:
    """The status, reason and numbers of a compared run.  A NaN or infinite error fails the run,
    like a NaN or infinite loss."""
    if comparison.not_finite:
        return (*record_status("nan", comparison.not_finite), None)
    return "ok", "", msgspec.structs.replace(measured_run, comparison=comparison)


def _record(
    cell: Cell, outcome: tuple[Status, str, Measured | None], hosts: tuple[int, ...], how: How
) -> Record:
    from rematbench.worlds.torch import rank_processes  # noqa: PLC0415  # torch is optional

    status, reason, found = outcome
    if found is not None:
        found = msgspec.structs.replace(found, linear_updates=how.linear)
    where: dict[str, Any] = {**rank_processes.versions(how.device), "ranks_per_host": hosts}
    return measured_record("executed", cell, (status, reason, found), where)
