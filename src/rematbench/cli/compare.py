"""The command `compare`: every method and baseline for one job in one table."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import replace
from typer import Option

from rematbench.choose.candidates import load_compare
from rematbench.choose.compare import Comparing
from rematbench.choose.entry import Comparison, Entry
from rematbench.choose.would_fit import would_fit
from rematbench.cli.options import Request, RunOptions, request, takes_problem
from rematbench.cli.ranking import Judged, Ranking
from rematbench.cli.targets import need_file
from rematbench.host.console import console
from rematbench.published.bands import band_of, fits_word, ratio_band
from rematbench.published.sheets import write_sheet
from rematbench.simulate.breakdown import PARTS


@takes_problem
def compare(
    run: RunOptions,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="FILE.csv", help="Also write every number.")
    ] = None,
    limit: Annotated[int, Option(min=1, metavar="S", help="CPU seconds for one candidate.")] = 4,
    processes: Annotated[int, Option(min=1, help="Worker processes.")] = 2,
) -> None:
    """Compare all methods, their compositions and the baseline policies on one job.

    Those that fit come first, by tokens/s; a method that refuses says why below the table.

    \b
    Example:
      rematbench compare --model llama-65b --cluster h800-80gb --system megatron-kwai
        --gpus 64 --seq-len 4096 --global-batch 256 --tp 4 --pp 4 --vpp 5 -o compare.csv
    """
    need_file("-o", output)
    asked = request(run)
    config = load_compare()
    comparing = Comparing(
        asked.problem,
        asked.base,
        config,
        methods=run.methods or (),
        processes=processes,
        limit_s=limit,
    )
    found = comparing.quick()
    printed = Ranking(console(), asked, config.shown_share)
    printed.table(judge(found, asked))
    for entry in comparing.late():
        found = comparing.comparison()
        printed.late([i for i in judge(found, asked) if i.entry.name == entry.name])
    found = comparing.comparison()
    judged = judge(found, asked)
    fits = any(entry.status == "ok" for entry in found.entries)
    changes = () if fits else would_fit(asked.problem, found.entries, comparing.registry)
    printed.notes(found, judged, changes)
    if output is not None:
        write_sheet(output, [line(item) for item in judged])


def judge(found: Comparison, asked: Request) -> list[Judged]:
    """Entries with their bands (an equal plan has that of the plan it equals), whether they fit,
    and whether they tie with the fastest."""
    family = {entry.name: entry.candidate.family for entry in found.entries}
    usable = asked.problem.usable_bytes
    judged = []
    for entry in found.entries:
        name, room = family.get(entry.same_as, entry.candidate.family), entry.verdict
        fits = fits_word(room.headroom_bytes, usable) if room and room.fits else "no"
        judged.append(Judged(entry, band_of(asked.problem, name), fits))
    return tied(judged, ratio_band())


def tied(judged: Sequence[Judged], half_width: float) -> list[Judged]:
    """Mark fitting entries that are slower than the fastest by less than the error of ratios of
    speeds at one layout (`half_width`, a logarithm)."""
    best = next((item for item in judged if item.entry.status == "ok"), None)
    if best is None:
        return list(judged)
    least = _speed(best.entry) * math.exp(-half_width)
    return [
        replace(item, tied=True)
        if item.entry.status == "ok" and item is not best and _speed(item.entry) >= least
        else item
        for item in judged
    ]


def _speed(entry: Entry) -> float:
    assert entry.evaluation is not None
    return entry.evaluation.tokens_per_s_per_gpu


def line(item: Judged) -> dict[str, Any]:
    """Every number of an entry, for the CSV: base SI units, fractions; empty where there is none.
    Speeds of a plan that does not fit are those it would have if it did."""
    entry = item.entry
    evaluation, verdict = entry.evaluation, entry.verdict
    speeds = ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense", "hfu")
    amounts = ("recompute_flop", "offload_bytes", "reserved_bytes", "host_node_bytes")
    rooms = ("headroom_bytes", "host_headroom_bytes", "binds")
    hours = entry.gpu_hours_per_1e9_tokens
    return {
        "name": entry.name,
        "origin": entry.candidate.origin,
        "same_as": entry.same_as,
        "status": entry.status,
        "reason": entry.reason,
        **{key: getattr(evaluation, key, "") for key in speeds},
        "gpu_hours_per_1e9_tokens": "" if hours is None else hours,
        "peak_device_bytes": max(evaluation.peak_device_bytes) if evaluation else "",
        **{key: getattr(evaluation, key, "") for key in amounts},
        **{key: getattr(verdict, key, "") for key in rooms},
        **{f"{part}_s": entry.parts_s.get(part, "") for part in PARTS},
        "plan": "; ".join(f"{k}={v}" for k, v in (entry.plan.fit if entry.plan else {}).items()),
        "fits": item.fits,
        "low_tokens_per_s_per_gpu": item.band.low(evaluation.tokens_per_s_per_gpu)
        if evaluation
        else "",
        "high_tokens_per_s_per_gpu": item.band.high(evaluation.tokens_per_s_per_gpu)
        if evaluation
        else "",
        "outside": ", ".join(item.band.outside),
        "evidence": item.band.evidence,
        "tied_with_best": "yes" if item.tied else "no",
    }
