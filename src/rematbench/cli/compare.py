"""The command `compare`: every method and baseline for one job in one table, and its notes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from typer import Option

from rematbench.advise.candidates.candidate import load_compare
from rematbench.advise.compare.comparison import Comparison, table
from rematbench.advise.compare.would_fit import would_fit
from rematbench.cli.beside import beside, without_recipe
from rematbench.cli.options import RunOptions, request, takes_problem
from rematbench.cli.plan_table import (
    WIDE,
    Head,
    PlanTable,
    as_cells,
    folded_name,
    initials,
    outside_line,
    over_peaks,
    summary,
)
from rematbench.cli.plots import Plot, need_figure, write_plot
from rematbench.cli.show import (
    FRAGMENTS,
    UNTIMED,
    covers,
    heading,
    job_notes,
    nominal,
    say_notes,
    tight_line,
    world_line,
)
from rematbench.cli.targets import Json, Notes, need_file
from rematbench.evaluate.result import Result
from rematbench.evidence.bands import ratio_band, shipped
from rematbench.evidence.peaks import about
from rematbench.host.console import console, gib, percent, plain, rounded
from rematbench.host.table import GIB, grouped, write_sheet
from rematbench.problem import Problem
from rematbench.worlds.packages.process import broken_baselines

Names = list[str] | None

RUNS_ON = "runs\non"

NARROW = 100
"""A terminal of fewer columns shows each part of a step on a line of its own."""

MOST_PARTS = 3
"""The most parts of the step that a cell of the table shows (the CSV file has all parts)."""


@takes_problem
def compare(  # noqa: PLR0913, PLR0917  # every option is a parameter
    run: RunOptions,
    output: Annotated[
        Path | None,
        Option("-o", "--output", metavar="FILE.csv", help="Also write all numbers to this file."),
    ] = None,
    also: Annotated[
        Names,
        Option(
            metavar="METHOD",
            help="Also compare this method, for example memo:alpha=0.3 (repeatable).",
        ),
    ] = None,
    only: Annotated[
        Names, Option(metavar="METHOD", help="Compare only these methods (repeatable).")
    ] = None,
    json: Json = False,
    notes: Notes = False,
    plot: Plot = None,
    limit: Annotated[
        int, Option(min=1, metavar="S", help="CPU seconds that each candidate may take.")
    ] = 4,
    processes: Annotated[int, Option(min=1, help="Worker processes.")] = 2,
) -> None:
    """Compare all methods, their compositions and the baseline policies on one job.

    Methods that fit come first, by tokens/s; --notes has the reasons of methods without a plan.
    `simulate` takes the name of every row; the CSV and --json have the whole command.

    \b
    Example:
      rematbench compare --model llama-65b --cluster h800-80gb --system megatron-kwai
        --gpus 64 --seq-len 4096 --global-batch 256 --tp 4 --pp 4 --vpp 5 -o compare.csv
      rematbench compare --model llama-7b --cluster a800-80gb --gpus 8 --tp 2
        --seq-len 16384 --global-batch 32 --only keep_all --only memo --also memo:alpha=0.3
    """
    need_file("-o", output)
    need_figure(plot)
    asked = request(run, name_broken=False)
    comparison = Comparison(
        asked.job,
        load_compare(),
        methods=run.methods or (),
        also=also or (),
        only=only or (),
        processes=processes,
        limit_s=limit,
    )
    printed = Ranking(console(), comparison, every=notes)
    shipped()  # the bands are learnt while the workers' server imports modules
    comparison.quick()
    if not json:
        printed.table(comparison.results())
    for late in comparison.late():
        if not json:
            printed.rows([item for item in comparison.results() if item.method == late.method])
    results = comparison.results()
    fits = any(result.fits for result in results)
    changes = [] if fits else would_fit(asked.problem, results, comparison.registry)
    rows = table(results)
    if json:
        answer = {
            "job": asked.job.facts(),
            "rows": rows,
            "would_fit": changes,
            "unavailable": comparison.registry.broken,
            "left_out": comparison.left_out,
        }
        typer.echo(msgspec.json.format(msgspec.json.encode(answer)).decode())
    else:
        printed.notes(results, changes)
        best = results[0] if results else None
        twin = without_recipe(run, best.method) if best and best.evaluation else None
        if best is not None and twin is not None:
            text = f"{best.method} {beside(twin, best)}"
            printed.out.print(plain(text), soft_wrap=True)
    if output is not None:
        write_sheet(output, [as_cells(row) for row in rows])
    if plot is not None:
        write_plot(rows, plot)


def heads(problem: Problem) -> tuple[Head, ...]:
    host = f"{problem.cluster.host_bytes / GIB:.0f}"
    return (
        Head("method", words=True),
        Head("fits", words=True),
        Head("headroom\nGiB"),
        Head("step s"),
        Head("tokens/s\n/GPU"),
        Head("MFU %\ncausal", given_up=3),
        Head("MFU %\ndense", given_up=5),
        Head(f"host GiB\nper node\nof {host}", given_up=2),
        Head("GPU-h\nper 1e9\ntokens", given_up=7),
        Head("where the\nstep goes, %", words=True, given_up=1),
        Head(RUNS_ON, words=True, given_up=6),
        Head("80 %\nband;\noutside", words=True, given_up=4),
    )


class Ranking:
    """Prints a comparison: the table of quick methods, then planners as they end, then notes."""

    def __init__(
        self,
        out: Console,
        comparison: Comparison,
        *,
        every: bool = False,
    ) -> None:
        self.out, self.comparison = out, comparison
        self.every = every
        self.problem = comparison.job.problem
        self.verdict = ""
        gap = 2 if out.width >= WIDE else 1
        self.plans = PlanTable(out, heads(self.problem), gap=gap)

    def table(self, results: Sequence[Result]) -> None:
        for text in heading(self.problem):
            self.out.print(plain(text))
        self.out.print()
        if results:
            self.verdict = verdict(results)
            self.out.print(plain(self.verdict), style="bold")
            for line in (safest(results), runnable(results)):
                if line:
                    self.out.print(plain(line))
            self.out.print()
        self.rows(results)

    def rows(self, results: Sequence[Result]) -> None:
        """Print the results that have a verdict, under the columns that fit next to the first
        printed rows; no cell is cut. Refusals are lines below the table."""
        share = self.comparison.config.shown_share
        rows = [cells(result, share, self.out) for result in results if result.verdict is not None]
        if rows:
            self.plans.rows(rows)

    def notes(self, results: Sequence[Result], changes: Sequence[str] = ()) -> None:
        """Print the verdict if planners changed it, the changes that would make a method fit if
        none does, and how to read the table."""
        self.out.print()
        if verdict(results) != self.verdict:
            late = "(a planner finished this plan after the table was printed)"
            self._say(f"{verdict(results)} {late}", style="bold")
        shown = {result.method for result in results if result.verdict is not None}
        for policy in self.comparison.config.policies:
            if policy.keys and policy.name in shown:
                self._say(f"{policy.name} is set by {policy.keys}")
        absent = left_out(results, self.comparison)
        engines = f"runs on: {self.comparison.engines.legend()}"
        more = (
            self.plans.not_shown("-o FILE.csv"),
            *job_notes(self.problem),
            engines if RUNS_ON not in self.plans.missing else "",
            world_line(self.problem),
        )
        every = (*nominal(self.problem), *notes(results, absent), *filter(None, more))
        say_notes(self.out, every, every=self.every)
        if changes:
            self.out.print(
                plain(f"WOULD FIT: {'; or '.join(changes)}"), style="bold", soft_wrap=True
            )

    def _say(self, text: str, style: str = "") -> None:
        self.out.print(plain(text), style=style)


def verdict(results: Sequence[Result]) -> str:
    """One line with the fastest plan that fits, or else with the plan nearest to fitting."""
    best = results[0] if results else None
    if best is None or best.verdict is None:
        return "NOTHING FITS: no method could plan this problem"
    if not best.fits:
        return f"NOTHING FITS: the closest method is {best.method}, {best.reason}"
    if best.not_timed:
        return f"FITS: {summary(best)} ({best.not_timed})"
    return f"FASTEST: {summary(best)}"


def safest(results: Sequence[Result]) -> str:
    """The tied plan with the most free device memory, in one line; empty if it is the fastest."""
    fitting = _distinct(results)
    tie = [result for result in fitting if result.tied or result is fitting[0]]
    if not tie:
        return ""
    most = max(tie, key=lambda result: result.headroom_bytes or 0)
    return "" if most is tie[0] else f"MOST FREE MEMORY among the tied plans: {summary(most)}"


def runnable(results: Sequence[Result]) -> str:
    """The fastest plan that an engine here runs, in one line; empty if it is the fastest of all, or
    if none runs."""
    fitting = _distinct(results)
    first = next((result for result in fitting if result.runs_on), None)
    if first is None or first is fitting[0]:
        return ""
    word = "FITS and an engine can run it" if first.not_timed else "FASTEST that an engine can run"
    return f"{word}: {summary(first)}"


def _distinct(results: Sequence[Result]) -> list[Result]:
    """The results that fit, without those whose plan equals an earlier one."""
    return [result for result in results if result.fits and not result.same_as]


def cells(result: Result, share: float, out: Console) -> list[str]:
    """The cells of one row of the table; parts of the step below `share` are left out."""
    evaluation, room = result.evaluation, result.verdict
    assert evaluation is not None
    assert room is not None
    name = folded_name(result.method, result.family.split("+"), out)
    short = room.host_headroom_bytes < 0 <= room.headroom_bytes
    fit = "host" if short else result.fit
    free = gib(room.host_headroom_bytes if short else room.headroom_bytes)
    pinned = f"{evaluation.host_node_bytes / GIB:.1f}"
    if result.same_as:
        where = f"plan of {result.same_as}"
        return [name, fit, free, *["-"] * 4, pinned, "-", where, "-", "-"]
    if not result.fits or result.not_timed:
        return [name, fit, free, *["-"] * 4, pinned, *["-"] * 4]
    return [
        name,
        fit,
        free,
        f"{evaluation.step_s:.4g}",
        rounded(evaluation.tokens_per_s_per_gpu) + ("=" if result.tied else " "),
        f"{100 * evaluation.mfu_causal:.1f}",
        f"{100 * evaluation.mfu_dense:.1f}",
        pinned,
        rounded(result.gpu_hours_per_1e9_tokens or 0.0),
        parts(result, share, ", " if out.width >= NARROW else "\n"),
        initials(result),
        banded(result),
    ]


def banded(result: Result) -> str:
    """A band's half-width, and the properties of the job that no published row has."""
    band = result.error_band
    return " ".join((f"+-{100 * band.half_width:.0f} %", *band.outside)) if band else "-"


def parts(result: Result, share: float, between: str = ", ") -> str:
    """The largest parts of the step in percent; parts below `share` are left out."""
    shares = {part: value / (result.step_s or 1.0) for part, value in result.parts_s.items()}
    largest = sorted((-each, part) for part, each in shares.items() if each >= share)
    return between.join(f"{part} {-100 * each:.0f}" for each, part in largest[:MOST_PARTS])


def notes(results: Sequence[Result], absent: Sequence[str] = ()) -> list[str]:
    """Lines that explain the table, the most important first: ties, jobs that nobody published,
    what the table leaves out (`absent`), parts of the step, bands and their evidence."""
    fitting = [result for result in results if result.fits and result.timed]
    checked = about(results[0].problem) if results else ()
    lines = untimed_lines(results)
    if not fitting:
        return [
            *lines,
            *checked,
            *retry_lines([result for result in results if result.fits]),
            *absent,
        ]
    if any(result.tied and not result.same_as for result in fitting):
        error = percent(ratio_band())
        lines.append(f"= tied: within {error}, our error when comparing two methods")
    lines += [*over_peaks(fitting), *retry_lines(fitting), *outside_line(fitting), *checked]
    return [
        *lines,
        *absent,
        tight_line(),
        "where the step goes: compute, recompute and pipeline bubble of the busiest rank, and "
        "the time that copies, communication (tp, cp, ep, dp, pp) and host waits add to the step",
        "80 % band: 80 % of published speeds, of sources of equal weight, differ by less than this "
        "from predictions that were fitted without their source; the band is wider for jobs that "
        f"are unlike the published ones ({covers()})",
    ]


def untimed_lines(results: Sequence[Result]) -> list[str]:
    """Lines that name the rows that fit but are not timed, grouped by reason."""
    fitting = [result for result in results if result.fits]
    reasons = grouped((one.not_timed, one.method) for one in fitting if one.not_timed)
    return [
        reason if len(methods) == len(fitting) else f"{reason}: {'; '.join(methods)}"
        for reason, methods in reasons.items()
    ]


def retry_lines(fitting: Sequence[Result]) -> list[str]:
    """Lines that name the rows with allocator retries, and the rows whose retries fail."""
    tried = [
        (item.method, item.retries) for item in fitting if item.retries and item.retries.per_step
    ]
    counts = [f"{name} {retries.per_step:,}" for name, retries in tried if not retries.fails]
    failing = [name for name, retries in tried if retries.fails]
    lines = [f"allocator retries a step ({UNTIMED}): {'; '.join(counts)}"] if counts else []
    return lines + ([f"{FRAGMENTS}: {'; '.join(failing)}"] if failing else [])


def left_out(results: Sequence[Result], comparison: Comparison) -> list[str]:
    """Lines that name what the table leaves out, with the reasons."""
    lines = [
        f"{result.status}: {result.method}: {result.reason.removeprefix(f'{result.method}: ')}"
        for result in results
        if result.verdict is None
    ]
    broken = comparison.registry.broken | broken_baselines()
    lines += [f"unavailable: {path}: {reason}" for path, reason in broken.items()]
    if comparison.left_out:
        lines.append(
            f"{comparison.left_out} candidates are not shown because their plan equals "
            "the plan of a row above"
        )
    return lines
