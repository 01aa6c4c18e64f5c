"""`execute`: a plan on torch, in processes on this machine or a launcher's."""

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import typer
from typer import Option

from rematbench.choose.outcome import Status as RecordStatus
from rematbench.cli.launched import Address, Local, Port, Rank, Size, is_launched, leave
from rematbench.cli.options import Request, RunOptions, Timeout, request, takes_run
from rematbench.cli.real import finish, need_gpu, need_torch
from rematbench.cli.targets import need_file
from rematbench.host.console import CommandError
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import discover
from rematbench.runs import rank_error
from rematbench.runs.measured import Comparison, Measured
from rematbench.runs.record import Record
from rematbench.worlds.measure import activation_bytes, compared, measured, measured_record

if TYPE_CHECKING:
    from rematbench.torch.case import Case, Result
    from rematbench.torch.job import Given

SEQ_LEN = 128
Device = Literal["cpu", "cuda"]


@takes_run
def execute(  # noqa: PLR0913, PLR0917  # an option of the command line each
    run: RunOptions,
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = 3,
    against: Annotated[
        str, Option(metavar="METHOD", help="Also run this method and compare the gradients.")
    ] = "",
    device: Annotated[Device | None, Option(help="Default: cuda where there is one.")] = None,
    timeout: Timeout = 600,
    out: Annotated[Path | None, Option(metavar="RECORD.json", help="Write the record.")] = None,
    json: Annotated[bool, Option("--json", help="Print the record as JSON.")] = False,
    rank: Rank = None,
    world_size: Size = None,
    local_rank: Local = 0,
    address: Address = "",
    port: Port = 0,
) -> None:
    """Execute a method's plan on torch: losses, gradients, and bytes against the ledger.

    Starts a process for each of --gpus (gloo on CPU, NCCL on CUDA); under torchrun or srun it is
    one of theirs.  --seq-len defaults to 128, --global-batch to two micro-batches a stage.
    CPU seconds are not performance and are not reported.  Exit code 1 unless the run is ok (and,
    with --against, lossless).

    \b
    Example:
      rematbench execute full_recompute --model tiny-llama --cluster this-machine
        --gpus 2 --tp 2 --precision fp32 --against keep_all
    """
    need_torch()
    need_file("--out", out)
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional

    asked = request(_with_defaults(run))
    given = _given(rank, world_size, local_rank, (address, port), asked)
    kind = job.device_kind(device or "")
    need_gpu(kind)
    cases = _cases(asked, run, against, steps, kind)
    reason = cases if isinstance(cases, str) else next(filter(None, map(job.refused, cases)), "")
    record: Record | None
    if reason or isinstance(cases, str):
        record = _record(asked, None, ("unsupported", reason, None), (), job.versions(kind))
    else:
        record = _executed(asked, cases, given, timeout, against, out)
        out = out if given is None else None  # written
    if record is None:  # a launcher's other process
        return
    finish(record, asked, out, json)
    found = record.measured.comparison if record.measured else None
    if record.status != "ok" or (found is not None and not found.lossless):
        raise typer.Exit(1)


def _with_defaults(run: RunOptions) -> RunOptions:
    """A length and a batch for a first try."""
    ranks = run.tp * run.cp * run.pp
    replicas = max(1, (run.gpus or ranks) // ranks)
    return dataclasses.replace(
        run,
        seq_len=run.seq_len or SEQ_LEN,
        global_batch=run.global_batch or 2 * run.pp * replicas * run.micro_batch,
    )


def _given(
    rank: int | None,
    world_size: int | None,
    local_rank: int,
    meeting: tuple[str, int],
    asked: Request,
) -> "Given | None":
    """This process's place among a launcher's, if one started it."""
    from rematbench.torch.job import Given  # noqa: PLC0415  # torch is optional

    if not is_launched(rank, world_size, meeting, asked.problem.layout.gpus):
        return None
    assert rank is not None
    assert world_size is not None
    address, port = meeting
    return Given(
        rank=rank, world_size=world_size, local_rank=local_rank, address=address, port=port
    )


def _cases(
    asked: Request, run: RunOptions, against: str, steps: int, device: str
) -> "list[Case] | str":
    """The method's case and the other's to compare with, or why there is no plan."""
    from rematbench.torch.case import Case  # noqa: PLC0415  # torch is optional

    registry = discover(run.methods or ())
    methods = [asked.method, *([registry.resolve(against)] if against else [])]
    cases = []
    for method in methods:
        plan = method.plan(asked.problem, asked.base)
        if isinstance(plan, Unsupported):
            return plan.reason
        cases.append(
            Case(
                name=method.name,
                problem=asked.problem,
                plan=plan,
                steps=steps,
                device=device,
                gradients=bool(against),
                deterministic=bool(against),
                # lowers the plan too: a PlanError is said before any process starts
                activation_bytes=activation_bytes(asked.problem, plan),
            )
        )
    return cases


def _executed(
    asked: Request,
    cases: "list[Case]",
    given: "Given | None",
    timeout: float,
    against: str,
    out: Path | None,
) -> Record | None:
    """The record, of a launcher's process written to `out`; None in its other processes.  One that
    fails leaves its error beside `out` before it ends, as rank 0 will only see a connection
    break."""
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional

    if given is None:
        results = job.run_own(cases, timeout)
        return _answer(asked, cases, results, (asked.problem.layout.gpus,), against)
    from rematbench.torch.failures import failure  # noqa: PLC0415

    started = time.time()
    try:
        results, hosts = job.run_given(cases, given, timeout)
    except Exception as error:
        if out is not None:
            lost = (*rank_error.recorded(*failure(error)), None)
            versions = job.versions(cases[0].device)
            leave(_record(asked, cases[0].plan, lost, (), versions), out, given.rank, started)
        if isinstance(error, job.NotMet):
            raise CommandError(str(error)) from error
        raise
    if not results:
        return None
    record = _answer(asked, cases, results, hosts, against)
    return leave(record, out, given.rank, started) if out is not None else record


def _answer(
    asked: Request,
    cases: "list[Case]",
    results: "list[Result]",
    hosts: tuple[int, ...],
    against: str,
) -> Record:
    """The record of the results, or of the first of them that is none."""
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional

    plan, versions = cases[0].plan, job.versions(cases[0].device)
    broken = next((result for result in results if result.status != "ok"), None)
    if broken is not None:
        return _record(asked, plan, (*status_of(broken), None), hosts, versions)
    found = measured(asked.problem, plan, results[0])
    if against:
        other = compared(asked.problem, results[0], results[1], against)
        return _record(asked, plan, outcome_of(found, other), hosts, versions)
    return _record(asked, plan, ("ok", "", found), hosts, versions)


def status_of(result: "Result") -> tuple[RecordStatus, str]:
    """A record's status: NaN and timeouts are failures that say so."""
    return rank_error.recorded(result.status, result.reason)


def outcome_of(found: Measured, other: Comparison) -> tuple[RecordStatus, str, Measured | None]:
    """What a run's record says once it was compared; an error that is no number fails it, as a loss
    that is none does."""
    if other.not_finite:
        return (*rank_error.recorded("nan", other.not_finite), None)
    return "ok", "", msgspec.structs.replace(found, comparison=other)


def _record(
    asked: Request,
    plan: Plan | None,
    outcome: tuple[RecordStatus, str, Measured | None],
    hosts: tuple[int, ...],
    versions: dict[str, str],
) -> Record:
    where: dict[str, Any] = {**versions, "ranks_per_host": hosts}
    return measured_record("executed", asked.problem, asked.method, plan, outcome, where)
