"""What a search found, as lines of a table: every number, the job, and the command again."""

import math
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from rematbench.choose.job import Job
from rematbench.lowering.lower import lower
from rematbench.plan import Unsupported
from rematbench.published.bands import Band, band_of, fits_word, ratio_band
from rematbench.search.job import SearchJob
from rematbench.search.trial import Tried
from rematbench.simulate.breakdown import PARTS, parts_of
from rematbench.spec.configfile import ConfigError


class Found(Struct, frozen=True, kw_only=True):
    """A plan that fits, with its band, whether it is tight, and whether the error of ratios of
    speeds cannot tell it from the best."""

    tried: Tried
    job: Job
    band: Band
    fits: str
    tied: bool


def judged(search: SearchJob, tried: Sequence[Tried]) -> list[Found]:
    """The plans in their order, the fastest first."""
    found = []
    for one in tried:
        problem = search.problem(one.choice.layout)
        try:
            words = (*search.spec(one.choice.layout).to_arguments(), *one.choice.words)
        except ConfigError:  # a model, cluster or system that is an object has no name to type
            words = ()
        composed = search.registry.resolve(one.method, None, problem)
        assert one.verdict is not None
        base = one.choice.base(problem.base_plan)
        limit = math.exp(ratio_band()) * tried[0].step_s
        found.append(
            Found(
                tried=one,
                job=Job(problem=problem, base=base, words=words),
                band=band_of(problem, composed.name),
                fits=fits_word(one.verdict.headroom_bytes, problem.usable_bytes),
                tied=one is not tried[0] and one.step_s <= limit,
            )
        )
    return found


def line(place: int, found: Found) -> dict[str, Any]:
    """Every number of a plan: base SI units, fractions."""
    tried = found.tried
    evaluation, verdict = tried.evaluation, tried.verdict
    assert evaluation is not None
    assert verdict is not None
    speed = evaluation.tokens_per_s_per_gpu
    return {
        "place": place,
        "name": tried.method,
        "step_s": evaluation.step_s,
        "bound_s": tried.bound_s,
        "tokens_per_s_per_gpu": speed,
        "low_tokens_per_s_per_gpu": found.band.low(speed),
        "high_tokens_per_s_per_gpu": found.band.high(speed),
        "mfu_causal": evaluation.mfu_causal,
        "mfu_dense": evaluation.mfu_dense,
        "hfu": evaluation.hfu,
        "reserved_bytes": evaluation.reserved_bytes,
        "headroom_bytes": verdict.headroom_bytes,
        "host_node_bytes": evaluation.host_node_bytes,
        "host_headroom_bytes": verdict.host_headroom_bytes,
        "fits": found.fits,
        "tied_with_best": found.tied,
        "outside": ", ".join(found.band.outside),
        **found.job.facts(),
        "run_with": found.job.run_with(tried.method),
    }


def parts(search: SearchJob, found: Found) -> dict[str, float]:
    """Where the step of a plan goes, in seconds that add up to it."""
    problem, tried = found.job.problem, found.tried
    plan = search.registry.resolve(tried.method, None, problem).plan(problem, found.job.base)
    assert not isinstance(plan, Unsupported)
    return parts_of(problem, lower(plan, problem), tried.step_s)


def difference(search: SearchJob, one: Found, other: Found) -> dict[str, float]:
    """Seconds by which each part of the other's step is longer; they add up to the difference."""
    ours, theirs = parts(search, one), parts(search, other)
    return {part: theirs.get(part, 0.0) - ours.get(part, 0.0) for part in PARTS}
