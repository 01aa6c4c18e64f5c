"""The command `flags`: a plan as options of a baseline."""

from typing import Annotated

import msgspec
import typer
from msgspec.structs import asdict
from typer import Option

from rematbench.cli.options import RunOptions, request, takes_run
from rematbench.cli.targets import Json
from rematbench.host.console import GIB, CommandError
from rematbench.plan import Unsupported
from rematbench.worlds.packages.flags import costs, flags_of
from rematbench.worlds.packages.process import BaselineError, baselines


@takes_run
def flags(
    run: RunOptions,
    baseline: Annotated[str, Option(metavar="B", help="The baseline.")] = "megatron_core",
    json: Json = False,
) -> None:
    """Print the options of a baseline that equal a method's plan, or list what it cannot express.

    megatron_core: arguments of Megatron-LM's script; deepspeed: its configuration as JSON.  Exit
    code 0 if equal, 1 if the baseline cannot express the plan.

    \b
    Example:
      rematbench flags full_recompute --set num_layers=2 --model llama-7b --cluster a800-80gb
        --gpus 8 --seq-len 8192 --global-batch 16 --tp 2 --pp 4
      rematbench flags full_recompute --baseline deepspeed --system deepspeed --model llama2-7b
        --cluster a800-80gb --gpus 8 --seq-len 4096 --global-batch 8 --zero 3
    """
    if baseline not in baselines():
        raise BaselineError(f"--baseline {baseline}: one of {', '.join(baselines())}")
    asked = request(run)
    plan = asked.method.plan(asked.problem, asked.base)
    if isinstance(plan, Unsupported):
        raise CommandError(f"unsupported: {plan.reason}")
    answer = flags_of(asked.problem, plan, baseline)
    lost = costs(asked.problem, plan, answer.plan) if answer.missing and answer.plan else None
    if json:
        values = {**asdict(answer), "nearest": lost and asdict(lost)}
        del values["plan"]
        typer.echo(msgspec.json.format(msgspec.json.encode(values)).decode())
    elif answer.missing:
        typer.echo(f"{baseline} has no options equal to {run.method}; missing:")
        for line in answer.missing:
            typer.echo(f"  {line}")
        if lost is not None:
            peak, step = f"{lost.peak_bytes / GIB:+.2f} GiB", f"{100 * lost.step_share:+.1f} %"
            room = f"{lost.headroom_bytes / GIB:.2f} GiB left"
            typer.echo(f"nearest: {answer.flags}")
            typer.echo(f"compared with {run.method}: peak {peak}, step {step}; {room}")
    else:
        typer.echo(answer.flags)
    raise typer.Exit(1 if answer.missing else 0)
