"""The executed world: plans on torch, in processes of this machine or a launcher's."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rematbench.choose.outcome import Status
from rematbench.host.console import CommandError
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import IDENTITY, Composition, Registry
from rematbench.runs import rank_error
from rematbench.runs.cell import Cell, problem_of
from rematbench.runs.measured import Comparison, Measured
from rematbench.runs.record import Record, write_record
from rematbench.worlds.launched import leave
from rematbench.worlds.measure import activation_bytes, compared, measured, measured_record

if TYPE_CHECKING:
    from rematbench.torch.case import Case, Result
    from rematbench.torch.job import Given


class How(msgspec.Struct, frozen=True, kw_only=True):
    """How cells are executed: on what, and whether each is compared with another on the same
    batches (gradients are kept, by kernels that give the same bits every time) or timed; `norms`
    notes those of gradients."""

    device: str = "cpu"
    steps: int = 3
    compare: bool = True
    norms: bool = True
    timed_steps: int = 0


def run(
    cell: Cell,
    how: How,
    other: Cell | None = None,
    *,
    timeout_s: float,
    place: "Given | None" = None,
    out: Path | None = None,
) -> Record | None:
    """The record of a cell, compared with `other`'s gradients if given; it is that of the other's
    failure where only the other fails.

    `place`: this process is one of a launcher's; the record is then written to `out`, and None in
    a process that has none.
    """
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional

    both = [cell, *([other] if other else [])]
    reason = next((one.plan.reason for one in both if isinstance(one.plan, Unsupported)), "")
    cases = [] if reason else [_case(one, how) for one in both]
    reason = reason or next(filter(None, map(job.refused, cases)), "")
    if reason:
        record = _record(cell, ("unsupported", reason, None), (), how.device)
        if place is not None and out is not None:
            write_record(record, out)
        return record
    if place is not None:
        return _as_rank(both, cases, place, timeout_s, out)
    hosts = (cell.problem.layout.gpus,)
    return _strictly(both, job.run_own(cases, timeout_s), hosts, how.device)


def again(record: Record, cell: Cell, registry: Registry) -> Record:
    """A run of this machine's processes once more: as many steps, and compared with the same method
    as its record says."""
    found = record.measured or Measured()
    against = found.comparison.against if found.comparison else ""
    how = How(
        device="cpu" if record.provenance.device.startswith("cpu") else "cuda",
        steps=found.steps if record.measured else How().steps,
        compare=bool(against),
        norms=any(found.gradient_norms),
        timed_steps=len(found.step_s),
    )
    method = registry.resolve(against or IDENTITY)
    plan = method.plan(cell.problem, cell.base) if against else cell.plan
    other = Cell(against, cell.problem, method, plan, cell.base) if against else None
    made = run(cell, how, other, timeout_s=600.0)
    assert made is not None  # of a process that no launcher started
    return made


def run_cells(
    found: Sequence[Cell], timeout_s: float, how: How | None = None
) -> Iterator[tuple[Cell, Record]]:
    """Records of many cells, in one launch per world size; each problem's beside keep_all on the
    same batches.  A cell whose keep_all fails is compared with nothing."""
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional

    how = how or How()
    for size in sorted({cell.problem.layout.gpus for cell in found}):
        same = [cell for cell in found if cell.problem.layout.gpus == size]
        bases = {cell.name: _keep_all(cell) for cell in same} if how.compare else {}
        cases: dict[str, Case] = {}
        for one in (one for cell in same for one in (bases.get(cell.name), cell)):
            if one is not None and one.name not in cases and isinstance(one.plan, Plan):
                cases[one.name] = _case(one, how)
        results = dict(zip(cases, job.run_own(list(cases.values()), timeout_s), strict=True))
        for cell in same:
            base = bases.get(cell.name)
            other = results.get(base.name) if base else None
            kept = other if other is not None and other.status == "ok" else None
            outcome = _outcome(cell, results.get(cell.name), kept, IDENTITY)
            yield cell, _record(cell, outcome, (size,), how.device)


def _keep_all(cell: Cell) -> Cell:
    """keep_all on the cell's problem, under one name for all its cells."""
    name = f"{problem_of(cell.name)} {IDENTITY}"
    return Cell(name, cell.problem, Composition(()), cell.problem.base_plan)


def _case(cell: Cell, how: How) -> "Case":
    """What torch is to run.  Lowers the plan too: a PlanError is said before any process starts."""
    from rematbench.torch.case import Case  # noqa: PLC0415  # torch is optional

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
    )


def _as_rank(
    both: list[Cell], cases: "list[Case]", place: "Given", timeout_s: float, out: Path | None
) -> Record | None:
    """The record of a launcher's process.  One that fails leaves its error beside `out` before it
    ends, as rank 0 will only see a connection break."""
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional
    from rematbench.torch.failures import failure  # noqa: PLC0415

    started, device = time.time(), cases[0].device
    try:
        results, hosts = job.run_given(cases, place, timeout_s)
    except Exception as error:
        if out is not None:
            lost = (*rank_error.recorded(*failure(error)), None)
            leave(_record(both[0], lost, (), device), out, place.rank, started)
        if isinstance(error, job.NotMet):
            raise CommandError(str(error)) from error
        raise
    if not results:
        return None
    record = _strictly(both, results, hosts, device)
    return leave(record, out, place.rank, started) if out is not None else record


def _strictly(
    both: list[Cell], results: "list[Result]", hosts: tuple[int, ...], device: str
) -> Record:
    """The record of the results, or of the first of them that is none."""
    broken = next((result for result in results if result.status != "ok"), results[0])
    other = results[1] if len(both) > 1 else None
    outcome = _outcome(both[0], broken, other, both[-1].name)
    return _record(both[0], outcome, hosts, device)


def _outcome(
    cell: Cell, result: "Result | None", other: "Result | None", against: str
) -> tuple[Status, str, Measured | None]:
    """What became of a cell, compared with another's result if there is one."""
    if isinstance(cell.plan, Unsupported):
        return "unsupported", cell.plan.reason, None
    assert result is not None
    if result.status != "ok":
        return (*rank_error.recorded(result.status, result.reason), None)
    found = measured(cell.problem, cell.plan, result)
    if other is None:
        return "ok", "", found
    return outcome_of(found, compared(cell.problem, result, other, against))


def outcome_of(found: Measured, other: Comparison) -> tuple[Status, str, Measured | None]:
    """What a run's record says once it was compared; an error that is no number fails it, as a loss
    that is none does."""
    if other.not_finite:
        return (*rank_error.recorded("nan", other.not_finite), None)
    return "ok", "", msgspec.structs.replace(found, comparison=other)


def _record(
    cell: Cell,
    outcome: tuple[Status, str, Measured | None],
    hosts: tuple[int, ...],
    device: str,
) -> Record:
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional

    where: dict[str, Any] = {**job.versions(device), "ranks_per_host": hosts}
    return measured_record("executed", cell, outcome, where)
