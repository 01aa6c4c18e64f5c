"""The command `search`: the fastest layout and plan for a job, with a proved gap."""

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from rematbench.advise.candidates.layouts import Fixed
from rematbench.advise.search.by_layer import ByLayer
from rematbench.advise.search.request import Progress, SearchRequest
from rematbench.advise.search.rounds import SearchJob, rounds
from rematbench.cli.inverse import Inverse, ask
from rematbench.cli.options import Within, percents, require, takes_search
from rematbench.cli.plan_table import as_cells
from rematbench.cli.plots import Plot, need_figure, write_plot
from rematbench.cli.search_answer import SearchAnswer
from rematbench.cli.search_output import show_assumed, show_space
from rematbench.cli.targets import Json, Methods, Notes, need_file
from rematbench.host.console import CommandError, console
from rematbench.host.table import write_sheet
from rematbench.inputs.job import DEFAULT_SYSTEM, Job
from rematbench.worlds.packages.process import package_system

STEP_S = 1.0
"""Seconds between two lines of progress on a terminal."""


@takes_search
def search(  # noqa: PLR0913, PLR0917  # every option is a parameter
    facts: dict[str, Any],
    method: Annotated[
        list[str] | None,
        Option(
            metavar="X",
            help="Try only this method and its compositions (repeatable); optimizer_offload also "
            "tries states on the host, with all methods or the named ones.",
        ),
    ] = None,
    methods: Methods = None,
    engine: Annotated[
        str,
        Option(
            metavar="E", help="Search only plans that this package runs (`ours`: our executor)."
        ),
    ] = "",
    reserve_gib: Annotated[
        float | None,
        Option(
            min=0,
            metavar="G",
            help="Device memory to leave free (default: our error of predicted peaks).",
        ),
    ] = None,
    within: Within = 2.0,
    top: Annotated[int, Option(min=1, max=1000, metavar="N", help="Number of plans to show.")] = 10,
    find: Annotated[
        str,
        Option(
            metavar="gpus|context|batch|memory|rank|base",
            help="Find the smallest or largest value of this instead (see above).",
        ),
    ] = "",
    speed: Annotated[
        float,
        Option(min=0, metavar="T", help="For --find gpus: required tokens/s of all GPUs together."),
    ] = 0.0,
    step: Annotated[
        float, Option(min=0, metavar="S", help="For --find batch: longest step in seconds.")
    ] = 0.0,
    lose: Annotated[
        float,
        Option(
            parser=percents,
            metavar="P",
            help="For --find memory: percent of the best speed that may be lost.",
        ),
    ] = 5.0,
    by_layer: Annotated[
        bool,
        Option(
            "--by-layer",
            help="At the end, move layers between stages and recompute as few as possible.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        Option("-o", "--output", metavar="FILE.csv", help="Also write all numbers to this file."),
    ] = None,
    json: Json = False,
    notes: Notes = False,
    plot: Plot = None,
    limit: Annotated[
        int,
        Option(
            min=0,
            metavar="S",
            help="CPU seconds for each planner at each layout (0: skip planners).",
        ),
    ] = 4,
    processes: Annotated[int, Option(min=1, max=64, help="Worker processes.")] = 2,
) -> None:
    """Search all layouts and plans of a job: the fastest that fits, with a proved gap.

    The search tries every layout that the stack can run on these GPUs (degrees that are given stay
    fixed) with every method that is not a planner, in its grid, composed as in `compare`.  No plan
    of the space is faster than the first row by more than the gap.  The other rows are the next
    fastest layouts and compositions, each at the smallest share that fits.  Planners, whose plans
    no bound covers, are solved last, at the layouts of the first rows.  With --by-layer, layers of
    the fastest plans then move between stages.  Ctrl-C prints the best so far.

    \b
    --find gpus --speed T: the fewest GPUs, of --gpus at most, that make T tokens/s together
    --find context: the longest sequence that fits, from --seq-len on, with a plan that fits
    --find batch --step S: the largest multiple of --global-batch with steps of at most S seconds
    --find memory --lose P: the smallest device memory within P percent of the best
    --find rank: the largest rank of adapters that fits, from --lora-rank on
    --find base: the widest format of weights that do not train: the stack's, 8 or 4 bits

    \b
    Example:
      rematbench search --model llama-65b --cluster h800-80gb --system megatron-kwai
        --gpus 64 --seq-len 4096 --global-batch 256 -o search.csv
    """
    need_file("-o", output)
    need_figure(plot)
    _refuse(find, speed, step, others=(output, json, by_layer, plot))
    require(facts)
    if not facts["system"]:
        facts["system"] = package_system(engine, DEFAULT_SYSTEM)
    fixed = Fixed(**{name: facts.pop(name) for name in Fixed.__struct_fields__})
    spec = Job(**facts)
    request = SearchRequest(
        spec=spec, fixed=fixed, only=tuple(method or ()), folders=tuple(methods or ()),
        engine=engine, reserve_gib=reserve_gib, within=within / 100, by_layer=by_layer,
    )  # fmt: skip
    job = SearchJob(request).ready()
    if find:
        if planners := [name for name in job.planners if name in request.only]:
            raise CommandError(f"--method {planners[0]}: --find takes no planner")
        inverse = Inverse(find=find, speed=speed, step=step, lose=lose / 100)
        inverse.check(spec.work)
        show_assumed(console(), job)
        ask(console(), job, inverse, partial(rounds, processes=processes))
        return
    out = None if json else console()
    if out is not None:
        show_space(out, job)
    at, ended = _run(job, top, processes)
    answer = SearchAnswer(out, job, at, top, ended=ended)
    answer.table()
    answer.more(limit, processes, by_layer=by_layer)
    answer.notes(solved=limit > 0, every=notes)
    if output is not None:
        write_sheet(output, [as_cells(row) for row in answer.rows])
    if plot is not None:
        write_plot(answer.pictured, plot)
    if json:
        typer.echo(answer.json())
    if not ended:
        raise typer.Exit(130)


def _refuse(find: str, speed: float, step: float, *, others: Sequence[object]) -> None:
    """CommandError for options that do not work together; `others`: those without --find."""
    for option, value, kind in (("--speed", speed, "gpus"), ("--step", step, "batch")):
        if value and find != kind:
            raise CommandError(f"{option} needs --find {kind}")
    for option, given in zip(("-o", "--json", "--by-layer", "--plot"), others, strict=True):
        if given and find:
            raise CommandError(f"{option} cannot be used with --find")


def _run(job: SearchJob, shown: int, processes: int) -> tuple[Progress, bool]:
    """(last progress, whether the search ended without Ctrl-C).  If no bound covers the stages, the
    progress has the plans that fit."""
    if not job.bounded:
        return Progress(results=ByLayer(job).stated()), True
    at, last = Progress(), time.monotonic()
    try:
        for at in rounds(job.request, shown=shown, processes=processes):
            if sys.stderr.isatty() and time.monotonic() - last > STEP_S:
                last = time.monotonic()
                sys.stderr.write(f"\r{_progress(at)}\x1b[K")
    except KeyboardInterrupt:
        return at, False
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
    return at, True


def _progress(at: Progress) -> str:
    bound = f"no plan is faster than {min(at.bound_s, at.best_s):.4g} s"
    if not at.results:
        return f"{bound}; {at.simulations} plans simulated, none fits yet"
    best = f"best so far {at.best_s:.4g} s, gap {100 * at.gap:.2f} %"
    return f"{bound}; {best}; {at.simulations} plans simulated"
