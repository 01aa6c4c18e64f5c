"""The command `fit`: does a job fit, and what would make it fit."""

from typing import Annotated, Any

import msgspec
import typer
from typer import Argument, Option

from rematbench.advise.compare.estimate import estimate_job, job_of
from rematbench.cli.options import require, takes_facts
from rematbench.cli.rank_table import stages
from rematbench.cli.show import heading
from rematbench.cli.targets import Json
from rematbench.host.console import console, plain, print_uncut
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import IDENTITY


@takes_facts("", "model")
def fit(
    facts: dict[str, Any],
    config: Annotated[
        str, Argument(metavar="CONFIG", help="A config.json, a model file or a model's name.")
    ],
    method: Annotated[str, Option(metavar="METHOD", help="The method of the job.")] = IDENTITY,
    json: Json = False,
) -> None:
    """Tell whether a model fits on GPUs, with its bytes by rank and kind, and what would make it
    fit.

    --cluster and --seq-len are needed; without --gpus the job has one GPU, and without
    --global-batch one micro-batch for each stage of the pipeline.  Exit code 1 if it does not fit.

    \b
    Example:
      rematbench fit config.json --cluster a100-80gb --seq-len 4096 --system huggingface-flash
    """
    require({"model": config, "gpus": 1, "global_batch": 1, **facts})
    answer = estimate_job(job_of(config, facts), method, discover())
    if json:
        names = ("verdict", "fits", "headroom_bytes", "margin_bytes", "ranks", "why", "options")
        values = {name: getattr(answer, name) for name in (*names, "command")}
        typer.echo(msgspec.json.format(msgspec.json.encode(values)).decode())
    else:
        out = console()
        for line in heading(answer.result.problem):
            out.print(plain(line))
        first, *others = str(answer).splitlines()
        out.print(plain(f"\n{first}"), style="bold")
        for line in others:
            out.print(plain(line))
        evaluation = answer.result.evaluation
        assert evaluation is not None
        print_uncut(out, stages(answer.result, evaluation, None))
    if not answer.fits:
        raise typer.Exit(1)
