"""No simulated step is shorter than its bound, and no peak lower: on drawn layouts and plans."""

import random
from statistics import median
from typing import Any, NamedTuple

import pytest

from rematbench.advise.bounds.columns import Bounds
from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.lines import Probe, Refused
from rematbench.advise.candidates.candidate import KEEP, Candidate, Variant
from rematbench.advise.candidates.layouts import Fixed, LayoutChoice
from rematbench.advise.search.families import PlanFamily
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate_program
from rematbench.inputs.job import Job
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.load import load_system
from rematbench.inputs.system import with_facts
from rematbench.plan import PlanError, Unsupported
from tests.everything import bounds_at
from tests.tables import tables

JOBS = tables(__file__)["jobs"]
OWN_PIECES = Variant("mst", "mst", cuts=True)
"""A method as a user names it, which chooses its pieces by itself."""

MOST_PASSES = 1200
"""Passes of a step that is simulated here: longer ones say no more and take seconds."""

ROUNDING = 1.0 + 1e-9
SECONDS = ("first", "before", "time", "tight", "keep")


class Checked(NamedTuple):
    """One candidate: what it is, and its bounds as shares of what is simulated; `before`: the one
    of the candidate without its last method; `keep`: the one of keeping everything; `least`: bytes
    of every plan; `more` and `more_host`: bytes as fewer pieces bound them; `kept`, `copied`: bytes
    on the device and the host by the plan's fates alone."""

    text: str
    first: float
    before: float
    time: float
    tight: float
    keep: float
    peak: float
    host: float
    least: float
    more: float
    more_host: float
    kept: float
    copied: float


def drawn(
    job: tuple[str, str, str, int, int, int], count: int, seed: int, **fixed: Any
) -> list[Checked]:
    """Candidates of a job: a layout, a candidate of at most three methods, steps of its scalars."""
    model, cluster, system, gpus, seq_len, global_batch = job
    spec = Job(
        model=model,
        cluster=cluster,
        system=system,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
    )
    made, chance = SearchJob(SearchRequest(spec=spec, fixed=Fixed(**fixed))), random.Random(seed)
    candidates = _candidates(made)
    choices = [
        choice
        for choice in made.space.choices
        if choice.layout.num_micro_batches * choice.layout.num_chunks < MOST_PASSES
    ]
    found: list[Checked] = []
    for _ in range(20 * count):
        choice, candidate = chance.choice(choices), chance.choice(candidates)
        one = _checked(made, choice, candidate, chance)
        found += [one] if one else []
        if len(found) == count:
            break
    return found


def test_one_bound_holds_for_every_exchange_and_place_of_states() -> None:
    """Of groups that are alike, whose layouts are among those of the plain group."""
    spec = Job(
        model="qwen3-30b-a3b", cluster="h100-80gb", system="megatron-core-2026", gpus=16,
        seq_len=4096, global_batch=64,
    )  # fmt: skip
    seen = 0
    for each in SearchJob(SearchRequest(spec=spec)).search().alike[::40]:
        plain, *others = (make() for make in each.makers)
        layouts = {choice.layout for choice in plain.choices}
        for group in others:
            assert layouts >= {choice.layout for choice in group.choices}
            for any_order in (False, True):
                least_s = plain.kernels_s(any_order=any_order, alike=True).min()
                assert 0.0 < least_s <= group.kernels_s(any_order=any_order).min() * ROUNDING
            seen += 1
    assert seen > 10


def _candidates(made: SearchJob) -> list[Candidate]:
    known = [*made.variants, OWN_PIECES]
    layout = next(c for c in made.space.choices if c.layout.pp > 2)
    group = bounds_at(made, layout)
    probes = {s: p for s in known if isinstance(p := group.probe(Candidate((s,))), Probe)}
    return PlanFamily([probes], 3).candidates


def _checked(
    made: SearchJob,
    choice: LayoutChoice,
    candidate: Candidate,
    chance: random.Random,
) -> Checked | None:
    problem = made.problem(choice)
    own = bounds_at(made, choice)
    short = own.short(candidate)
    step, pieces = chance.randint(1, own.steps(candidate)), chance.randint(1, 4)
    bounds, base = own.of(candidate, pieces), choice.base(problem.base_plan)
    fewer = own.of(candidate, pieces - 1) if candidate.pieces and pieces > 2 else None
    text = candidate.text(step, pieces)
    try:
        plan = made.registry.resolve(text, None, problem).plan(problem, base)
        if isinstance(plan, Unsupported) or isinstance(bounds, Refused):
            return None
        assert short is not None
        found = evaluate_program(problem, plan, lower(plan, problem))
    except (PlanError, LayoutError):
        return None
    tight = own.tight_s(candidate, step, pieces, 0)
    keep = own.tight_s(KEEP, 1, 1, 0)
    pinned, peak = max(1, found.host_node_bytes), max(found.peak_device_bytes)
    more, more_host = 0.0, 0.0
    if fewer and not isinstance(fewer, Refused):
        more = float(own.in_more_pieces(candidate, 1, pieces - 1, pieces)[step - 1, 0]) / peak
        more_host = float(fewer.host_bytes[step - 1, 0]) / pinned
    return Checked(
        f"{text} at {choice.layout} {choice.sizes}",
        float(own.kernels_s()[0]) / found.step_s,
        _before_s(own, candidate) / found.step_s,
        float(bounds.step_s[step - 1, 0]) / found.step_s,
        tight / found.step_s,
        keep / found.step_s,
        float(bounds.peak_bytes[step - 1, 0]) / peak,
        float(bounds.host_bytes[step - 1, 0]) / pinned,
        float(own.least_bytes(candidate.cutting if candidate.cutting.parts else None)[0]) / peak,
        more,
        more_host,
        (float(short.device[step - 1, 0]) + float(own.usable_bytes[0])) / peak,
        (float(short.host[step - 1, 0]) + problem.cost.host_room_bytes) / pinned,
    )


def _before_s(own: GroupBounds, candidate: Candidate) -> float:
    found = own.of(Candidate(candidate.parts[:-1]))
    return float(found.step_s[0, 0]) if isinstance(found, Bounds) else 0.0


def _holds(found: list[Checked]) -> None:
    for name in Checked._fields[1:]:
        worst = max(found, key=lambda one: float(getattr(one, name)))
        most = ROUNDING if name in SECONDS else 1.0
        assert getattr(worst, name) <= most, f"{name} {getattr(worst, name)}: {worst.text}"
    assert median(max(one.time, one.tight) for one in found) >= 0.95
    assert median(one.peak for one in found) >= 0.90


@pytest.mark.parametrize(
    "job",
    [*JOBS[:6], *(pytest.param(job, marks=pytest.mark.full) for job in JOBS[6:])],
    ids=lambda job: f"{job[0]}-{job[2]}",
)
def test_no_plan_beats_its_bounds(job: tuple[str, str, str, int, int, int]) -> None:
    """Time and bytes of the device and the host; and the bounds are near."""
    _holds(drawn(job, 8, seed=1))


def test_no_plan_with_held_states_or_ulysses_inside_context_parallelism_beats_its_bounds() -> None:
    _holds(drawn(JOBS[3], 12, seed=1, pp=4, zero_stage=3))
    job = ("llama-3.1-8b", "h100-80gb", "megatron-bridge", 32, 65536, 4)
    _holds(drawn(job, 12, seed=1, cp=2, ulysses=4))


@pytest.mark.soak
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job[0]}-{job[2]}")
def test_two_thousand_plans_do_not_beat_their_bounds(
    job: tuple[str, str, str, int, int, int],
) -> None:
    """The same on many more."""
    _holds(drawn(job, 334, seed=2))


def test_layers_on_the_device_and_a_head_on_the_host_are_not_added_up() -> None:
    """The last rank's pass of a layer waits for the host, that of twelve layers for the device."""
    model, cluster, system, gpus, seq_len, global_batch = JOBS[6]
    spec = Job(
        model=model, cluster=cluster, system=system, gpus=gpus, seq_len=seq_len,
        global_batch=global_batch,
    )  # fmt: skip
    fixed = Fixed(tp=4, sp=True, pp=2, vpp=1, micro_batch=1, zero_stage=1)
    made = SearchJob(SearchRequest(spec=spec, fixed=fixed))
    (choice,) = (c for c in made.space.choices if c.even)
    problem = made.problem(choice)
    base = choice.base(problem.base_plan)
    candidates = _candidates(SearchJob(SearchRequest(spec=spec)))
    candidate = next(a for a in candidates if a.text(1, 4) == "mst:mlp_chunks=16,head_chunks=16")
    plan = made.registry.resolve(candidate.text(1, 4), None, problem).plan(problem, base)
    assert not isinstance(plan, Unsupported)
    step_s = evaluate_program(problem, plan, lower(plan, problem)).step_s
    assert 0.99 < bounds_at(made, choice).tight_s(candidate, 1, 4, 0) / step_s <= ROUNDING


@pytest.mark.parametrize(
    "degrees", [{"tp": 2, "pp": 1}, {"tp": 2, "pp": 2, "vpp": 1}, {"tp": 2, "pp": 2, "vpp": 21}]
)
def test_layers_with_wider_attention_are_counted(degrees: dict[str, int]) -> None:
    """Gemma 2, at 131,072 tokens: every second layer has a window of 4,096, as probes have, and the
    others take most of a step."""
    stack = with_facts(load_system("megatron-core"), cp_kind="allgather")  # a ring has no windows
    spec = Job(
        model="gemma-2-9b", cluster="h100-80gb", system=stack, gpus=16, seq_len=131072,
        global_batch=32,
    )  # fmt: skip
    fixed = Fixed(**degrees, cp=2, sp=True, micro_batch=1, zero_stage=1)
    made = SearchJob(SearchRequest(spec=spec, fixed=fixed, only=("keep_all",)))
    choice = made.space.choices[0]
    problem, own = made.problem(choice), bounds_at(made, choice)
    plan = choice.base(problem.base_plan)
    step_s = evaluate_program(problem, plan, lower(plan, problem)).step_s
    bounds = own.of(KEEP)
    assert isinstance(bounds, Bounds)
    assert 0.9 < bounds.step_s[0, 0] / step_s <= ROUNDING
    assert 0.97 < own.tight_s(KEEP, 1, 1, 0) / step_s <= ROUNDING
    if degrees.get("vpp") == 21:  # a layer in each chunk: one rank has all of a kind
        assert len(set(own.wider_at(0))) == 2
