"""The plans of a search as lines of a table: every number, the job, and the command to run it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import replace

from rematbench.advise.search.job import Asked, SearchJob
from rematbench.advise.search.space import Choice, partitions
from rematbench.advise.search.trial import Tried, tried_plan
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.breakdown import PARTS, losses, parts_of
from rematbench.evaluate.result import WORDS, Band, Job
from rematbench.evidence.bands import band_of, fits_word, ratio_band
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import IDENTITY
from rematbench.spec.configfile import ConfigError
from rematbench.spec.problemspec import ProblemSpec
from rematbench.worlds.packages.flags import Engines


class Found(Struct, frozen=True, kw_only=True):
    """A plan that fits.  `band`: the error of its predicted speed; `fits`: how tightly its bytes
    fit; `tied`: the error of speed ratios cannot tell the plan from the best one; `parts_s`:
    seconds of the parts of its step, which add up to the step; `methods`: how many change the plan
    (0: everything is kept); `runs_on`: the engines that can run it (`with_engines`)."""

    tried: Tried
    job: Job
    band: Band
    fits: str
    tied: bool
    parts_s: dict[str, float]
    plan: Plan
    methods: int
    runs_on: tuple[str, ...] = ()

    @property
    def binds(self) -> str:
        """The largest losses of the step."""
        return losses({part: each / self.tried.step_s for part, each in self.parts_s.items()})


def judged(search: SearchJob, tried: Sequence[Tried]) -> list[Found]:
    """A Found for each simulated plan, in the order of `tried` (fastest first)."""
    found = []
    for one in tried:
        problem = search.problem(one.choice)
        try:
            words = (*search.spec(one.choice).to_arguments(), *one.choice.words)
        except ConfigError:  # an object (model, cluster or system) has no name on a command line
            words = ()
        composed = search.registry.resolve(one.method, None, problem)
        assert one.verdict is not None
        base = one.choice.base(problem.base_plan)
        plan = composed.plan(problem, base)
        assert not isinstance(plan, Unsupported)
        alike = _parallel(one.choice) == _parallel(tried[0].choice)
        limit = math.exp(ratio_band(one_layout=alike)) * tried[0].step_s
        found.append(
            Found(
                tried=one,
                job=Job(problem=problem, base=base, words=words),
                band=band_of(problem, composed.name),
                fits=fits_word(one.verdict.headroom_bytes, problem.usable_bytes),
                tied=one is not tried[0] and one.step_s <= limit,
                parts_s=parts_of(problem, lower(plan, problem), one.step_s),
                plan=plan,
                methods=sum(method.name != IDENTITY for method in composed.methods),
            )
        )
    return found


def _parallel(choice: Choice) -> Choice:
    """A choice without its micro-batch, which the error of ratios at one layout covers."""
    return replace(choice, layout=replace(choice.layout, micro_batch=1))


def with_engines(found: Found) -> Found:
    """The plan with the engines that can run it; looking them up takes longer than all else."""
    return replace(found, runs_on=Engines(found.job.problem).of(found.plan))


def simplest(found: Sequence[Found]) -> Found | None:
    """The plan of the tie with the fewest methods, of these that with the fewest host bytes; None
    where that is the fastest."""
    tie = [one for one in found if one.tied or one is found[0]]
    least = min(tie, key=lambda one: (one.methods, _host_bytes(one)), default=None)
    return None if least is None or least is tie[0] else least


def _host_bytes(found: Found) -> int:
    assert found.tried.evaluation is not None
    return found.tried.evaluation.host_node_bytes


def line(place: int, found: Found) -> dict[str, Any]:
    """A table line with every number of a plan, in base SI units and fractions."""
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
        **{f"{part}_s": seconds for part, seconds in found.parts_s.items()},
        "binds": found.binds,
        "fits": found.fits,
        "tied_with_best": found.tied,
        "outside": ", ".join(found.band.outside),
        **found.job.facts(),
        "run_with": found.job.run_with(tried.method),
    }


def best_line(search: SearchJob, tried: Tried) -> dict[str, Any]:
    """The table line of one simulated plan, at place 1."""
    return line(1, judged(search, [tried])[0])


def simulated(row: Mapping[str, str], reserve_gib: float | None = None) -> Tried:
    """The plan of a table line, planned, lowered and simulated for a second time."""
    numbers = {name: int(row[name]) for name in ("gpus", "seq_len", *WORDS) if name != "dp"}
    texts = ("model", "cluster", "system", "precision", "attention", "optimizer")
    words = {name: row[name] for name in texts if row.get(name)}
    spec = convert({**numbers, **words}, ProblemSpec)
    search, layout = SearchJob(Asked(spec=spec, reserve_gib=reserve_gib)), spec.layout
    sizes = tuple(int(layers) for layers in row["partition"].split(","))
    choice = next(one for one in partitions(layout, search.model.num_layers) if one.sizes == sizes)
    return tried_plan(choice, search.problem(choice), row["name"], 0.0, search.registry)


def difference(one: Found, other: Found) -> dict[str, float]:
    """Seconds by which each part of `other`'s step is longer than `one`'s; their sum is the
    difference of the two steps."""
    return {part: other.parts_s[part] - one.parts_s[part] for part in PARTS}
