"""The commands `baseline` (list, run, predict) and `flags`, which prints a plan as its options."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from msgspec.structs import asdict
from typer import Argument, Option

from rematbench.cli.options import Request, RunOptions, Timeout, request, settings_of, takes_run
from rematbench.cli.real import Address, Port, Rank, Size, has_gpu, is_launched, speed_text, timing
from rematbench.cli.show import banner
from rematbench.cli.targets import Json, Out, need_file
from rematbench.cli.titan import TITAN, titan_answer
from rematbench.evaluate.result import evaluate_method, told_fragmented
from rematbench.host.console import CommandError, align_left, console, gib, grid, plain
from rematbench.host.table import GIB
from rematbench.inputs.configfile import require_among
from rematbench.inputs.job import DEFAULT_SYSTEM
from rematbench.plan import Unsupported
from rematbench.plugins.discover import check_baseline
from rematbench.plugins.registry import IDENTITY, MethodError
from rematbench.problem import Problem
from rematbench.worlds import package
from rematbench.worlds.packages.flags import Costs, FlagsAnswer, alike, costs, flags_of
from rematbench.worlds.packages.process import (
    Device,
    baselines,
    broken_baselines,
    package_system,
    policy,
)
from rematbench.worlds.packages.stack import package_problem
from rematbench.worlds.records.measured import TIMED_STEPS, measured_speed
from rematbench.worlds.records.record import Record, encode_record, make_record, write_record

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
def list_baselines() -> None:
    """List the baselines: what each claims, its settings and its file.

    \b
    Example:
      rematbench baseline list
    """
    table = align_left(grid("baseline", "claim", "settings"), 1, 2)
    for entry in baselines().values():
        settings = ", ".join(f"{key}={value}" for key, value in entry.parameters.items())
        table.add_row(entry.name, plain(entry.claim.partition(": ")[2]), plain(settings))
    console().print(table)
    for path, reason in broken_baselines().items():
        typer.echo(f"left out: {path}: {reason}", err=True)


@app.command("check")
def check(
    folder: Annotated[Path, Argument(metavar="DIR", help="The folder of a baseline.")],
) -> None:
    """Check the policy, functions and files in a baseline's folder; exit code 1 if one is missing.

    \b
    Example:
      rematbench baseline check baselines/megatron_core
    """
    try:
        found = check_baseline(folder)
    except MethodError as error:
        raise CommandError(f"{folder / 'plan.py'}: {error}") from error
    typer.echo(f"ok: {folder / 'plan.py'} has the policy {', '.join(found)}")
    if lacks := [name for name in ("run.py", "stack.py") if not (folder / name).is_file()]:
        raise CommandError(f"{folder} has no {' and no '.join(lacks)}, so it cannot be run")


def of_baseline(options: RunOptions) -> Request:
    """The request of a run's options, with the baseline's policy as its method.  Without --system
    the package's own stack is taken.  CommandError for an order or partition that no baseline
    runs."""
    method = policy(options.method, settings_of(options.settings))
    problem = dict(options.problem)
    if not problem["system"]:
        problem["system"] = package_system(options.method, DEFAULT_SYSTEM)
    # request() knows methods only, so keep_all stands in for the policy.
    made = request(replace(options, method=IDENTITY, settings=None, problem=problem))
    if made.base != made.problem.base_plan:
        given = "--partition" if options.partition else "--gpipe"
        raise CommandError(
            f"{given}: {options.method} runs only 1F1B with the same number of "
            "layers in every chunk"
        )
    return msgspec.structs.replace(made, method=method)


@app.command("predict")
@takes_run
def predict_baseline(run: RunOptions, out: Out = None) -> None:
    """Predict a baseline's policy with the simulator: labelled simulated, never measured.

    Bytes are those that the package itself holds (docs/baselines.md).  METHOD is a baseline (see
    `rematbench baseline list`).

    \b
    Example:
      rematbench baseline predict megatron_core --model gpt-22b --cluster a100-80gb-selene
        --gpus 8 --seq-len 2048 --global-batch 4 --micro-batch 4 --tp 8 --set recompute=selective
    """
    need_file("-o", out)
    made = of_baseline(run)
    here = package_problem(made.method, made.problem)
    result = evaluate_method(here, made.method)
    record = make_record(result, made.method, made.problem)
    if out is not None:
        write_record(record, out)
    typer.echo(f"{run.method} policy (simulated): {record.status} {record.reason}".rstrip())
    found = result.evaluation
    if found is None:
        return
    if not found.not_timed:
        typer.echo(f"  step {found.step_s:.4g} s")
    for rank, nbytes in enumerate(found.peak_device_bytes):
        host = found.peak_host_bytes[rank]
        typer.echo(f"  stage {rank}: peak {gib(nbytes)} GiB, host {gib(host)} GiB")


@app.command("run")
@takes_run
def run_baseline(  # noqa: PLR0913, PLR0917  # every option is a parameter
    run: RunOptions,
    steps: Annotated[
        int, Option(min=1, help="Number of steps to check (loss, gradients, bytes).")
    ] = 2,
    warmup: Annotated[int, Option(min=1, help="Untimed warm-up steps (GPUs only).")] = 1,
    timed_steps: Annotated[
        int, Option(min=0, help="Number of timed steps (GPUs only).")
    ] = TIMED_STEPS,
    device: Annotated[Device | None, Option(help="Device (default: cuda if available).")] = None,
    timeout: Timeout = 600,
    out: Out = None,
    rank: Rank = None,
    world_size: Size = None,
    address: Address = "",
    port: Port = 0,
) -> None:
    """Execute a baseline: the real package in separate processes (gloo on a CPU, NCCL on GPUs).

    Starts one process for each GPU of --gpus.  Under torchrun or srun the command is one of the
    launcher's processes, and rank 0 writes and prints the record.

    \b
    Example:
      rematbench baseline run megatron_core --model tiny-llama --cluster this-machine --gpus 2
        --seq-len 128 --global-batch 4 --tp 2 --precision fp32 --set recompute=full
    """
    need_file("-o", out)
    made = of_baseline(run)
    launched = is_launched(rank, world_size, (address, port), made.problem.layout.gpus)
    asked: dict[str, package.Option] = {
        "steps": steps,
        "warmup": warmup,
        "timed_steps": timed_steps,
        "device": device or ("cuda" if has_gpu() else "cpu"),
        "timeout_s": timeout,
    }
    if launched and rank is not None:
        record = package.run_as_rank(made.problem, made.method, rank, out, **asked)
        if record is not None:
            if rank == 0:
                show(record, made.problem)
            elif record.status in ("failed", "oom"):
                typer.echo(f"rank {rank}: {record.status}: {record.reason}", err=True)
            if record.status != "ok":
                raise typer.Exit(1)
    else:
        record = package.run(made.problem, made.method, "executed", **asked)
        finish_baseline(record, out, problem=made.problem)


def finish_baseline(
    record: Record, out: Path | None, json: bool = False, problem: Problem | None = None
) -> None:
    """Write and print a record; exit code 1 unless the record is ok."""
    if out is not None:
        write_record(record, out)
    if json:
        typer.echo(encode_record(record).decode())
    else:
        show(record, problem)
    if record.status != "ok":
        raise typer.Exit(1)


def show(record: Record, problem: Problem | None = None) -> None:
    """Print a record and, if `problem` is given, the speed computed from the GPU's step times."""
    seen, engine = record.measured, record.engine
    if seen is None or engine is None:
        typer.echo(f"{record.status.upper()}: {record.reason}")
        return
    versions = ", ".join(f"{name} {version}" for name, version in engine.stack.items())
    typer.echo(f"{engine.label} ({record.world}; {versions}; {engine.backend})")
    for name, kernel in engine.kernels.items():
        typer.echo(f"  {name}: {kernel}")
    if engine.shim:
        typer.echo(f"  shim: {', '.join(engine.shim)}")
    for step, loss in enumerate(seen.losses):
        typer.echo(f"  step {step}: loss {loss:.6f}, gradient norm {seen.gradient_norms[step]:.6f}")
    for rank in seen.ranks:
        live, host = gib(rank.activation_peak_bytes), gib(rank.host_peak_bytes)
        away = rank.host_state_bytes
        beside = f" and {gib(away)} GiB on the host" if away else ""
        words = f"activations {live} GiB, host {host} GiB, states {gib(rank.state_bytes)} GiB"
        typer.echo(f"  rank {rank.rank}: {words}{beside}")
    if problem is not None and seen.step_s:
        typer.echo(f"  {timing(seen.step_s)}")
        typer.echo(f"  {speed_text(measured_speed(problem, seen.step_s, engine.device))}")


@takes_run
def flags(
    run: RunOptions,
    baseline: Annotated[str, Option(metavar="B", help="The baseline.")] = "megatron_core",
    whole: Annotated[
        bool, Option("--whole", help="Also print the model's arguments (megatron_core).")
    ] = False,
    json: Json = False,
) -> None:
    """Print the options of a baseline that equal a method's plan, or list what no option expresses.

    megatron_core: arguments of Megatron-LM's script; deepspeed: its configuration as JSON;
    torchtitan: its configuration as TOML, with torchao's converters.  Facts of the stack for which
    the first two have no option follow as "assumed, not set".  Exit code 0 if the options equal the
    plan, 1 if the baseline cannot express it.

    \b
    Example:
      rematbench flags full_recompute --set num_layers=2 --model llama-7b --cluster a800-80gb
        --gpus 8 --seq-len 8192 --global-batch 16 --tp 2 --pp 4
      rematbench flags full_recompute --baseline deepspeed --system deepspeed --model llama2-7b
        --cluster a800-80gb --gpus 8 --seq-len 4096 --global-batch 8 --zero 3
    """
    require_among([baseline], (*baselines(), TITAN), ("", "--baseline", "baseline"))
    asked = request(run)
    plan = asked.method.plan(asked.problem, asked.base)
    if isinstance(plan, Unsupported):
        raise CommandError(f"unsupported: {plan.reason}")
    if asked.method.name != IDENTITY and alike(asked.problem, plan, asked.base):
        raise CommandError(f"{run.method} changes nothing here: its options are keep_all's")
    if baseline == TITAN:
        answer = titan_answer(asked)
    else:
        answer = flags_of(asked.problem, plan, baseline, whole=whole)
    fits = banner(told_fragmented(evaluate_method(asked.problem, asked.method, asked.base)))
    lost = costs(asked.problem, plan, answer.plan) if answer.missing and answer.plan else None
    if json:
        values = {**asdict(answer), "verdict": fits, "nearest": lost and asdict(lost)}
        del values["plan"]
        typer.echo(msgspec.json.format(msgspec.json.encode(values)).decode())
    else:
        _print_flags(answer, run.method, fits, lost)
    raise typer.Exit(1 if answer.missing else 0)


def _print_flags(answer: FlagsAnswer, method: str, fits: str, lost: Costs | None) -> None:
    """Print the verdict (`fits`), options and remarks; `lost`: the costs of the nearest policy."""
    aside = answer.flags.startswith("{")
    typer.echo(f"# {fits}", err=aside)
    if answer.missing:
        typer.echo(f"{answer.baseline} cannot express the plan of {method}; it lacks options for:")
        for line in answer.missing:
            typer.echo(f"  {line}")
        if lost is not None:
            peak, step = f"{lost.peak_bytes / GIB:+.2f} GiB", f"{100 * lost.step_share:+.1f} %"
            room = f"{lost.headroom_bytes / GIB:.2f} GiB left"
            typer.echo(f"nearest:\n{broken_lines(answer.flags)}")
            typer.echo(f"compared with {method}: peak {peak}, step {step}; {room}")
    else:
        typer.echo(broken_lines(answer.flags))
    for line in remarks(answer):
        typer.echo(f"# {line}", err=aside)


def broken_lines(flags: str) -> str:
    """The options, one on each line, for a shell; a JSON object stays as it is."""
    return flags if flags.startswith("{") else flags.replace(" --", " \\\n  --")


def remarks(answer: FlagsAnswer) -> Iterator[str]:
    """Comment lines that say what the options leave out (printed to stderr if the options are JSON,
    which has no comments)."""
    yield from answer.remarks
    if answer.assumed:
        yield f"assumed, not set (no option): {', '.join(answer.assumed)}"
    for reason in answer.not_run:
        yield f"{answer.baseline} cannot run these options here: {reason}"
