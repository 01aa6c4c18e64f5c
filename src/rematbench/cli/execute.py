"""The commands `execute` and `trace`: a plan on torch, in processes or on fake tensors."""

import dataclasses
from typing import Annotated

import typer
from typer import Option

from rematbench.cli.baseline import finish_baseline, of_baseline
from rematbench.cli.options import Request, RunOptions, Timeout, refuse_baseline, request, takes_run
from rematbench.cli.real import (
    Address,
    Local,
    Port,
    Rank,
    Size,
    cell_of,
    finish,
    is_launched,
    need_gpu,
    need_torch,
)
from rematbench.cli.targets import Json, Out, need_file
from rematbench.host.console import CommandError
from rematbench.plugins.discover import discover
from rematbench.worlds import executed, package, traced
from rematbench.worlds.executed import How
from rematbench.worlds.packages.process import Device, baselines
from rematbench.worlds.records.measured import TIMED_STEPS
from rematbench.worlds.records.suite_cells import Cell

SEQ_LEN = 128


@takes_run
def execute(  # noqa: PLR0913, PLR0917  # every option is a parameter
    run: RunOptions,
    steps: Annotated[int, Option(min=1, help="Optimizer steps.")] = 3,
    against: Annotated[
        str, Option(metavar="METHOD", help="Also run this method and compare the gradients.")
    ] = "",
    device: Annotated[Device | None, Option(help="Device (default: cuda if available).")] = None,
    timeout: Timeout = 600,
    out: Out = None,
    json: Json = False,
    rank: Rank = None,
    world_size: Size = None,
    local_rank: Local = 0,
    address: Address = "",
    port: Port = 0,
) -> None:
    """Execute a method's plan on torch: losses, gradients, and bytes against the ledger.

    Starts --gpus processes (gloo on CPU, NCCL on CUDA); under torchrun or srun the command is one
    of the launcher's processes.  --seq-len defaults to 128, --global-batch to two micro-batches a
    stage.  Seconds on a CPU are not reported, because they predict nothing.  Exit code 0 if the run
    is ok (and, with --against, lossless), else 1.

    \b
    Example:
      rematbench execute full_recompute --model tiny-llama --cluster this-machine
        --gpus 2 --tp 2 --precision fp32 --against keep_all
    """
    need_torch()
    need_file("-o", out)
    from rematbench.worlds.torch import rank_processes  # noqa: PLC0415  # torch is optional

    refuse_baseline(run.method)
    asked = request(_with_defaults(run))
    given = None
    if is_launched(rank, world_size, (address, port), asked.problem.layout.gpus):
        given = rank_processes.LauncherPlace(rank or 0, world_size or 1, local_rank, address, port)
    kind = rank_processes.device_kind(device or "")
    need_gpu(kind)
    cell = cell_of(asked)
    other = None
    if against:
        method = discover(run.methods or ()).resolve(against, None, asked.problem)
        other = Cell(against, asked.problem, method, method.plan(asked.problem, asked.base))
    how = How(device=kind, steps=steps, compare=bool(against), timed_steps=TIMED_STEPS)
    record = executed.run(cell, how, other, timeout_s=timeout, place=given, out=out)
    if record is None:  # only rank 0 of a launcher's processes has a record
        return
    finish(record, asked, None if given else out, json)  # a launcher's process wrote the record
    found = record.measured.comparison if record.measured else None
    if record.status != "ok" or (found is not None and not found.lossless):
        raise typer.Exit(1)


def _with_defaults(run: RunOptions) -> RunOptions:
    """The options, with a small default sequence length and batch."""
    given = run.problem
    ranks = given["tp"] * given["cp"] * given["pp"]
    replicas = max(1, (given["gpus"] or ranks) // ranks)
    usual = {"seq_len": SEQ_LEN, "global_batch": 2 * given["pp"] * replicas * given["micro_batch"]}
    filled = {key: given[key] or value for key, value in usual.items()}
    return dataclasses.replace(run, problem={**given, **filled})


@takes_run
def trace(
    run: RunOptions,
    stage: Annotated[
        int | None,
        Option(
            min=0,
            help="Pipeline rank to trace (default: the rank with the highest simulated peak).",
        ),
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
    need_file("-o", out)
    if run.method in baselines():
        made = of_baseline(run)
        _need_stage(stage, made)
        finish_baseline(package.run_stage(made.problem, made.method, made.base, stage), out, json)
        return
    refuse_baseline(run.method)
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
