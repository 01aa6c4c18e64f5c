"""`trace`: one rank of a job of any size, the executor on fake tensors."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from rematbench.choose.outcome import Status
from rematbench.cli.baseline import trace_stage
from rematbench.cli.options import Request, RunOptions, request, takes_run
from rematbench.cli.real import finish, need_torch
from rematbench.cli.targets import need_file
from rematbench.host.console import CommandError
from rematbench.packages.process import baselines
from rematbench.plan import Unsupported
from rematbench.runs.measured import Measured
from rematbench.runs.record import Record
from rematbench.simulate.evaluate import fullest
from rematbench.worlds.measure import measured_ranks, measured_record


@takes_run
def trace(
    run: RunOptions,
    stage: Annotated[
        int | None, Option(min=0, help="Pipeline rank (default: the simulated fullest).")
    ] = None,
    out: Annotated[Path | None, Option(metavar="RECORD.json", help="Write the record.")] = None,
    json: Annotated[bool, Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Trace one rank of a job of any size: the executor on fake tensors, in one CPU process.

    Bytes are counted from live storages, as in the executed world; nothing depends on values.
    METHOD may be a baseline (megatron_core, deepspeed): then its own code runs.

    \b
    Example:
      rematbench trace full_recompute --model llama-175b --cluster h800-80gb
        --system megatron-kwai --gpus 512 --seq-len 8192 --global-batch 256 --tp 8 --pp 8
    """
    need_torch()
    need_file("--out", out)
    if run.method in baselines():
        trace_stage(run, stage, out, json=json)
        return
    asked = request(run)
    lay = asked.problem.layout
    if stage is not None and stage >= lay.pp:
        raise CommandError(f"--stage {stage}: the pipeline has ranks 0 to {lay.pp - 1}")
    record = traced(asked, stage)
    finish(record, asked, out, json)
    if record.status != "ok":
        raise typer.Exit(1)


def traced(asked: Request, stage: int | None = None) -> Record:
    """The record of a traced rank (the fullest of the simulation unless one is named)."""
    from rematbench.torch import job  # noqa: PLC0415  # torch is optional
    from rematbench.torch.memory import ExecutionError  # noqa: PLC0415
    from rematbench.torch.model import NotExecutable  # noqa: PLC0415
    from rematbench.torch.trace import trace_rank  # noqa: PLC0415

    problem = asked.problem
    plan = asked.method.plan(problem, asked.base)
    where: dict[str, Any] = {**job.versions("cpu"), "device": "meta"}
    if isinstance(plan, Unsupported):
        outcome: tuple[Status, str, Measured | None] = ("unsupported", plan.reason, None)
        return measured_record("traced", problem, asked.method, None, outcome, where)
    try:
        result = trace_rank(problem, plan, fullest(problem, plan) if stage is None else stage)
        ranks = measured_ranks(problem, plan, [result], 1)
        outcome = ("ok", "", Measured(steps=1, ranks=ranks))
    except NotExecutable as error:
        outcome = ("unsupported", str(error), None)
    except ExecutionError as error:
        outcome = ("failed", str(error), None)
    return measured_record("traced", problem, asked.method, plan, outcome, where)
