"""The commands about one run: plan, simulate, timeline."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, TypeAlias

import msgspec
import typer
from msgspec.structs import replace
from rich.table import Table
from typer import Option

from rematbench.cli.beside import beside, without_recipe
from rematbench.cli.options import Request, RunOptions, request, takes_run
from rematbench.cli.plots import Plot, need_figure, write_ranks
from rematbench.cli.show import as_json, banner, heading, method_line, show
from rematbench.cli.targets import Json, Notes, Out, need_file
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import Resolved, resolve
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.evaluate.perfetto import write_timeline
from rematbench.evaluate.result import Result, evaluate_method, told_fragmented
from rematbench.evaluate.verdict import retries
from rematbench.evidence.bands import with_host_rates
from rematbench.host.console import CommandError, align_left, console, grid, plain, seconds, worded
from rematbench.inputs.stages import Stage, stages_of, stages_text
from rematbench.plan import Phase, Plan, Unsupported
from rematbench.worlds.records.plan_replay import Replay, replay, replay_plan
from rematbench.worlds.records.record import make_record, write_record

PHASES: tuple[Phase, ...] = ("warmup", "steady", "cooldown")


@takes_run
def simulate(
    run: RunOptions,
    json: Json = False,
    notes: Notes = False,
    plot: Plot = None,
    check: Annotated[
        bool, Option("--check", help="Also prove that the lowered plan is safe.")
    ] = False,
    out: Out = None,
) -> None:
    """Simulate one method on one problem: does it fit, how fast, what does it free?

    Out of memory and unsupported are results (exit code 0; see `status` with --json).

    \b
    Example:
      rematbench simulate balanced_checkpointing+pp_offload --model llama-175b
        --cluster h800-80gb --system megatron-kwai --gpus 256 --seq-len 8192
        --global-batch 256 --tp 4 --pp 8 --vpp 6 --set alpha=0.63
    """
    need_file("-o", out)
    need_figure(plot)
    asked = request(run)
    result = evaluate_method(asked.problem, asked.method, asked.base, checked=check)
    if out is not None:
        record = make_record(result, asked.method)
        write_record(record, out)
    result = _with_errors(result)
    if plot is not None:
        write_ranks(result, "\n".join((*heading(asked.problem), banner(result))), plot)
    twin = without_recipe(run)
    if json:
        values = as_json(asked, result) | ({"without_recipe": twin.row()} if twin else {})
        typer.echo(msgspec.json.format(msgspec.json.encode(values)).decode())
    else:
        show(console(), asked, result, _keep_all(result), every=notes)
        if twin is not None:
            console().print(plain(beside(twin, result)))
    if result.status == "failed":
        raise typer.Exit(1)


def _with_errors(result: Result) -> Result:
    """The result with its band, its allocator retries, and what expandable segments change."""
    result = with_host_rates(told_fragmented(result))
    plan, evaluation = result.plan, result.evaluation
    if plan is None or evaluation is None:
        return result
    return replace(result, retries=retries(result.problem, plan, evaluation))


def _keep_all(result: Result) -> PlanEvaluation | None:
    if result.evaluation is None:
        return None
    evaluation = result.problem.cost.evaluate(result.base)
    return evaluation if isinstance(evaluation, PlanEvaluation) else None


@takes_run
def plan(
    run: RunOptions,
    json: Json = False,
    actions: Annotated[
        bool, Option("--actions", help="Print the actions of one pipeline rank.")
    ] = False,
    rank: Annotated[int, Option(min=0, help="The pipeline rank to show.")] = 0,
) -> None:
    """Show the resolved plan: the fate of every saved tensor, or a rank's actions.

    \b
    Example:
      rematbench plan full_recompute --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 12288 --global-batch 16 --pp 4 --vpp 8 --actions --rank 1
    """
    asked = request(run)
    lay = asked.problem.layout
    if rank >= lay.pp:
        raise CommandError(f"--rank {rank}: the pipeline has ranks 0 to {lay.pp - 1}")
    planned = asked.method.plan(asked.problem, asked.base)
    if isinstance(planned, Unsupported):
        console().print(plain(f"UNSUPPORTED: {planned.reason}"))
        return
    if actions:
        typer.echo(lower(planned, asked.problem).ranks[rank].text(), nl=False)
    elif json:
        typer.echo(msgspec.json.format(msgspec.json.encode(planned)).decode())
    else:
        _show_plan(asked, planned, rank)


def _show_plan(asked: Request, planned: Plan, rank: int) -> None:
    out = console()
    for line in (*heading(asked.problem), method_line(asked), *_facts(asked, planned, rank)):
        out.print(plain(line))
    alike: dict[tuple[str, str], tuple[list[int], Table]] = {}
    for chunk in range(len(planned.partition[rank])):
        for phases, lines in _fate_lines(asked, planned, rank, chunk):
            key = (" and ".join(phases), repr(lines))
            alike.setdefault(key, ([], _fate_table(lines)))[0].append(chunk)
    for (phase_words, _), (chunks, table) in alike.items():
        out.print()
        words = f"chunk{'s' * (len(chunks) > 1)} {', '.join(map(str, chunks))}"
        out.print(plain(f"rank {rank}, {words}, {phase_words}: MiB of one micro-batch"))
        out.print(table)


def _facts(asked: Request, planned: Plan, rank: int) -> Iterable[str]:
    stages = stages_of(planned.partition, asked.problem.workload.model.num_layers)
    layers = " | ".join(_held(stage) for stage in stages[rank :: len(planned.partition)])
    yield f"schedule {planned.schedule}; rank {rank} holds layers {layers}"
    yield f"stages {stages_text(stages)}"
    moves = planned.transfers
    yield f"copies per {moves.granularity}, {len(planned.rules)} rules"
    for state in planned.states:
        words = f"{state.kind}: {state.shards} shards, home {state.home}, gather {state.gather}"
        yield f"{words}, update {state.update}" if state.kind == "optimizer" else words
    for key, value in planned.fit.items():
        yield f"{key}: {worded(value)}"


def _held(stage: Stage) -> str:
    layers = (*stage.layers, *stage.prediction)
    if not layers:
        return "none"
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0])


Lines: TypeAlias = Counter[tuple[str, str, Resolved]]
"""The number of layers in which an activation has a fate, by part, activation and fate."""


def _fate_lines(
    asked: Request, planned: Plan, rank: int, chunk: int
) -> list[tuple[list[Phase], Lines]]:
    """The fates of a chunk; phases with equal fates share them."""
    ops = ChunkOps.of_plan(asked.problem, planned, rank, chunk)
    found: list[tuple[list[Phase], Lines]] = []
    for phase in PHASES:
        fates, _ = resolve(planned, ops.sites, phase, 0)
        lines: Lines = Counter((part, name, fate) for (part, _, name), fate in fates.items())
        same = next((phases for phases, seen in found if seen == lines), None)
        if same is None:
            found.append(([phase], lines))
        else:
            same.append(phase)
    return found


def _fate_table(lines: Lines) -> Table:
    """The fates of a chunk as a table; activations of equal name and fate share a row."""
    table = align_left(
        grid("part", "activation", "layers", "kept", "offloaded", "rebuilt", "scope"), 1
    )
    for (part, name, fate), count in lines.items():
        sizes = (fate.keep_bytes, fate.offload_bytes, fate.recompute_bytes)
        scope = str(fate.scope) if fate.recompute_bytes else "gathered" if fate.peer_bytes else "-"
        shown = (f"{size / 2**20:,.2f}" if size else "-" for size in sizes)
        table.add_row(part, name, str(count), *shown, scope)
    return table


@takes_run
def timeline(
    run: RunOptions, output: Annotated[Path, Option("-o", "--output", metavar="TIMELINE.json")]
) -> None:
    """Write one step as a timeline that ui.perfetto.dev and chrome://tracing open.

    Give METHOD with the options of a run, or RECORD.json from `simulate -o` or `run`.

    \b
    Example:
      rematbench simulate keep_all --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 4096 --global-batch 16 --pp 4 -o run.json
      rematbench timeline run.json -o trace.json
      rematbench timeline keep_all --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 4096 --global-batch 16 --pp 4 -o trace.json
    """
    need_file("-o", output)
    again = _replayed(run)
    write_timeline(again.title, again.evaluation, output)
    step = seconds(again.evaluation.step_s)
    typer.echo(f"{output}: one step of {step}; open it at https://ui.perfetto.dev")


def _replayed(run: RunOptions) -> Replay:
    """The replay of a record file, or of a method with its options."""
    path = Path(run.method)
    if path.suffix == ".json" or path.is_file():
        named = {what: str(run.problem[what] or "") for what in ("cluster", "system")}
        return replay(path, timeline=True, **named)
    asked = request(run)
    planned = asked.method.plan(asked.problem, asked.base)
    if isinstance(planned, Unsupported):
        raise CommandError(f"unsupported: {planned.reason}")
    return replay_plan(asked.problem, planned, asked.method.name, timeline=True)
