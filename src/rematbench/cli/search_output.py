"""Output of `search` on a terminal: the space, the plans, the proof, differences of plans."""

from collections.abc import Iterator
from math import inf
from typing import Any

from rich.console import Console

from rematbench import __version__
from rematbench.advise.candidates.layouts import DEGREES
from rematbench.advise.search.job import search_row
from rematbench.advise.search.limits import not_searched, space_words
from rematbench.advise.search.request import Progress
from rematbench.advise.search.rounds import SearchJob
from rematbench.cli.plan_table import (
    Head,
    PlanTable,
    folded_name,
    initials,
    outside_line,
    over_peaks,
    summary,
)
from rematbench.evaluate.result import ALIKE, Result, assumed
from rematbench.evidence.bands import ratio_band
from rematbench.evidence.peaks import about
from rematbench.host.console import gib, percent, plain, rounded
from rematbench.host.table import GIB
from rematbench.worlds.packages.process import broken_baselines

HEADS = (
    Head(""), Head("method", words=True), Head("tp"), Head("cp"), Head("pp"), Head("vpp"),
    Head("dp"), Head("zero"), Head("mb"), Head("step s"), Head("tokens/s\n/GPU"),
    Head("80 % band", given_up=6), Head("MFU %\ncausal", given_up=5),
    Head("MFU %\ndense", given_up=7), Head("left\nGiB"), Head("host\nGiB", given_up=4),
    Head("fits", words=True, given_up=3), Head("runs\non", words=True, given_up=2),
    Head("what binds", words=True, given_up=1),
)  # fmt: skip

SOLVED = ", solved at the layouts of the first rows"


def show_space(out: Console, job: SearchJob) -> None:
    """Print the job and the size of the search space: layouts and methods."""
    spec = job.request.spec
    work = spec.work
    out.print(
        plain(
            f"{job.model.name}, {work.seq_len:,} tokens{work.packing}, {work.numbers}, global "
            f"batch {spec.degrees.global_batch}, on {spec.gpus} x {job.cluster.gpu} "
            f"({job.cluster.name}), stack {job.system.name}; simulated"
        ),
        soft_wrap=True,
    )
    out.print(plain(f"space: {space_words(job)}"))
    out.print()


def assumed_of(job: SearchJob) -> str:
    """The kernels and constants that a search assumes, which all of its layouts share."""
    return assumed(job.problem(job.space.choices[0]))


def show_assumed(out: Console, job: SearchJob) -> None:
    out.print(plain(f"assumes: {assumed_of(job)}"))


def show_plans(out: Console, job: SearchJob, results: list[Result]) -> str:
    """Print the fastest plan, then the plans' table with the columns that have room; no cell is
    cut. Return a sentence that names the other columns."""
    if not results:
        return ""
    out.print(plain(f"FASTEST: {summary(results[0], where(results[0]))}"), style="bold")
    out.print()
    table = PlanTable(out, HEADS)
    rows = [
        list(_cells(out, job, search_row(place, item), item))
        for place, item in enumerate(results, 1)
    ]
    table.rows(rows)
    return table.not_shown("-o FILE.csv")


def where(result: Result) -> str:
    """A layout in words: the degrees above 1, and the optimizer's states if the host has them."""
    lay, uneven = result.problem.layout, result.job.uneven_layers
    words = [f"{name} {getattr(lay, name)}" for name in (*DEGREES, "ep") if getattr(lay, name) > 1]
    words += ["without sp"] if lay.tp > 1 and not lay.sp else []
    words += [f"etp {lay.etp}"] if lay.etp not in (None, lay.tp) else []
    words += [f"ulysses {lay.ulysses}"] if lay.ulysses > 1 else []
    words += [f"micro-batch {lay.micro_batch}"] if lay.micro_batch > 1 else []
    words += [f"zero {lay.zero_stage}"] if lay.dp > 1 or lay.zero_stage > 1 else []
    words += [f"shard degree {lay.shard_degree}"] if lay.shard_degree else []
    words += [f"--partition {uneven}"] if uneven else []
    words += _chosen(result)
    return " ".join(words) or "1 GPU"


def _chosen(result: Result) -> list[str]:
    """What a run chooses besides its degrees, in words: the optimizer's states on the host, the
    dispatcher, the CUDA graphs and the overlap of experts' exchanges."""
    chosen = result.problem.stack_choice
    words = ["optimizer on host"] if result.base.state("optimizer").home == "host" else []
    words += [f"dispatcher {chosen.dispatcher}"] if chosen.dispatcher else []
    words += [f"graphs {chosen.cuda_graphs}"] if chosen.cuda_graphs else []
    return words + (["exchanges overlap"] if chosen.ep_overlap in ("on", "delayed_wgrad") else [])


def _cells(out: Console, job: SearchJob, row: dict[str, Any], result: Result) -> Iterator[str]:
    lay = result.problem.layout
    words = [f"layers {row['partition']}"] if result.job.uneven_layers else []
    words += ["without sp"] if lay.tp > 1 and not lay.sp else []
    words += [*_chosen(result), *([f"ep {lay.ep} etp {lay.etp}"] if lay.etp is not None else [])]
    name = folded_name("; ".join((row["name"], *words)), job.registry.methods, out)
    yield from (str(row["place"]), name, str(lay.tp))
    exchanged = f"u{lay.ulysses}" if lay.ulysses > 1 else ""
    yield exchanged if exchanged and lay.cp == 1 else f"{lay.cp}{exchanged}"
    yield from map(str, (lay.pp, lay.vpp, lay.dp, lay.zero_stage, lay.micro_batch))
    yield f"{row['step_s']:.4g}"
    yield rounded(row["tokens_per_s_per_gpu"]) + ("=" if result.tied else " ")
    yield f"{rounded(row['low_tokens_per_s_per_gpu'])}-{rounded(row['high_tokens_per_s_per_gpu'])}"
    yield from (f"{100 * row[key]:.1f}" for key in ("mfu_causal", "mfu_dense"))
    yield from (gib(row["headroom_bytes"]), f"{row['host_node_bytes'] / GIB:.0f}")
    yield from (result.fit, initials(result), result.losses)


def proof_lines(
    job: SearchJob, at: Progress, results: list[Result], *, ended: bool
) -> Iterator[str]:
    """The proved gap, or why nothing fits. `ended`: False after Ctrl-C."""
    stopped = "" if ended else "stopped: "
    if not job.bounded:
        yield "no bound covers these stages; methods are tried on all layers and on lists of layers"
        return
    if results:
        yield (
            f"{stopped}proved gap: no plan of this space is more than {100 * at.gap:.2f} % faster "
            f"than the first row ({at.simulations} of {at.plans:,} plans simulated)"
        )
    elif not ended:
        yield _stopped(at)
    elif at.short_bytes < inf:
        yield (
            f"NOTHING FITS: every plan exceeds the memory of some device by at least "
            f"{gib(at.short_bytes)} GiB"
        )
    else:
        yield "NOTHING FITS: every plan was excluded, but none for lack of device memory"


def notes(job: SearchJob, at: Progress, results: list[Result], *, solved: bool) -> Iterator[str]:
    """Notes on the table and on what excluded the other plans, the most important first. `solved`:
    whether the planners have been solved."""
    if any(item.tied for item in results):
        near, far = (percent(ratio_band(one_layout=item)) for item in (True, False))
        yield (
            f"= tied: within {near} of the first row ({far} on another layout), our error when "
            "comparing two methods"
        )
    yield from (*over_peaks(results), *outside_line(results))
    yield from about(results[0].problem) if results else ()
    yield from _rows_note(job, at, results)
    if results:
        yield "runs on: M megatron_core, D deepspeed (`flags` prints options), O our executor"
    yield f"not searched: {'; '.join(not_searched(job))}"
    if dropped := [f"{count:,} {rule}" for rule, count in job.space.refused.items()]:
        yield f"layouts not allowed: {'; '.join(dropped)}"
    fell = sorted(at.excluded.items(), key=lambda pair: -pair[1])
    if said := [f"{count:,} {why}" for why, count in fell if count]:
        yield f"plans excluded: {'; '.join(said)}"
    if results and at.short_bytes < inf:
        yield f"every plan excluded for device memory lacks at least {gib(at.short_bytes)} GiB"
    if job.planners:
        names = ", ".join(job.planners)
        yield (
            f"not covered by the proved gap: {names} "
            f"(planners{SOLVED if results and solved else ''})"
        )
    for path, reason in broken_baselines().items():
        yield f"unavailable: {path}: {reason}"
    yield f"assumes: {assumed_of(job)}"
    date = results[0].problem.calibration.date if results else ""
    yield f"world: simulated (rematbench {__version__}{f', constants of {date}' if date else ''})"


def _rows_note(job: SearchJob, at: Progress, results: list[Result]) -> Iterator[str]:
    """What the rows are, and how far they are proved."""
    if len(results) < 2:
        return
    sure = len(
        [item for item in results if item.fitting_s * (1 - job.request.within) <= at.listed_s]
    )
    told = "no plan missing from the table is faster than a row by more than the gap"
    if sure < len(results):
        told = f"the order after place {max(1, sure)} is not proved"
    yield (
        "rows: the fastest plans over all layouts and compositions of methods, each with the "
        f"smallest share and the fewest pieces that fit; {told}"
    )


def beside_line(label: str, end: Result | None, best: Result) -> str:
    """What a planner, or a package by its own options, reaches compared with the first row, in a
    line.  `end`: None if no plan was found."""
    if end is None:
        return f"{label}: no plan found that fits"
    if not end.fits:
        return f"{label}: {end.method}: {end.reason}"
    share = end.fitting_s / best.fitting_s - 1.0
    beside = f"{percent(abs(share))} {'slower' if share > 0 else 'FASTER'} than the first row"
    if abs(share) < ALIKE:
        beside = "as fast as the first row"
    return f"{label}: {summary(end, where(end))}: {beside}{', a tie' if end.tied else ''}"


def _stopped(at: Progress) -> str:
    """What was done before Ctrl-C; the joint plans are counted by the first round."""
    if not at.plans:
        return "stopped before any plan was evaluated"
    return f"stopped: {at.simulations} of {at.plans:,} plans simulated, none fits so far"
