"""The command `trace`: the executor runs one rank of a job of any size on fake tensors."""

from typing import Annotated

import typer
from typer import Option

from rematbench.cli.baseline import finish_baseline, of_baseline
from rematbench.cli.options import Request, RunOptions, request, takes_run
from rematbench.cli.real import cell_of, finish, need_torch
from rematbench.cli.targets import Json, Out, need_file
from rematbench.host.console import CommandError
from rematbench.worlds import package, traced
from rematbench.worlds.packages.process import baselines


@takes_run
def trace(
    run: RunOptions,
    stage: Annotated[
        int | None, Option(min=0, help="Pipeline rank (default: the simulated fullest).")
    ] = None,
    out: Out = None,
    json: Json = False,
) -> None:
    """Trace one rank of a job of any size: the executor on fake tensors, in one CPU process.

    Bytes are counted from live storages, as in the executed world; nothing depends on values.
    METHOD may be a baseline (megatron_core, deepspeed): then the baseline's code runs.

    \b
    Example:
      rematbench trace full_recompute --model llama-175b --cluster h800-80gb
        --system megatron-kwai --gpus 512 --seq-len 8192 --global-batch 256 --tp 8 --pp 8
    """
    need_torch()
    need_file("--out", out)
    if run.method in baselines():
        made = of_baseline(run)
        _need_stage(stage, made)
        finish_baseline(package.run_stage(made.problem, made.method, made.base, stage), out, json)
        return
    asked = request(run)
    _need_stage(stage, asked)
    record = traced.run(cell_of(asked), stage)
    finish(record, asked, out, json)
    if record.status != "ok":
        raise typer.Exit(1)


def _need_stage(stage: int | None, asked: Request) -> None:
    ranks = asked.problem.layout.pp
    if stage is not None and stage >= ranks:
        raise CommandError(f"--stage {stage}: the pipeline has ranks 0 to {ranks - 1}")
