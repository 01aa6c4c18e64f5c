"""Every plan of a search's space, tried one by one: what a search is held against."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from math import inf
from random import Random

import pytest
from msgspec.structs import replace

from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.lines import Probe
from rematbench.advise.candidates.candidate import Candidate, load_compare
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.advise.candidates.trials import LayoutTrials, Trial
from rematbench.advise.search.families import PlanFamily
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, in_one_process, rounds
from rematbench.evaluate.result import Result
from rematbench.evidence.peaks import reserve_bytes
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.load import load_cluster
from rematbench.workload import Model

ALONE = partial(rounds, processes=1)
"""A search in one process."""

ENDLESS = 1 << 46
SHARES = (0.0, 0.05, 0.15, 0.4, 0.75)
"""Shares of the plans that a device holds."""

GAPS = (0.0, 0.05, 0.005)
WORK = 1 << 40
Held = Callable[..., None]
Named = tuple[LayoutChoice, Candidate, str]
"""A plan of a space: its layout, its candidate, and the plan's text."""


def shallow(model: Model, layers: int, name: str = "drawn") -> Model:
    """The model with so many layers."""
    windows = model.attention_window[:layers]
    return replace(model, name=name, num_layers=layers, attention_window=windows)


def endless(cluster: str) -> Cluster:
    """The cluster with devices without an end."""
    return replace(load_cluster(cluster), hbm_bytes=ENDLESS)


def every_candidate(made: SearchJob) -> list[Candidate]:
    """All candidates, of the family that leaves none out."""
    deepest = max(made.space.choices, key=lambda choice: choice.layout.pp)
    group = bounds_at(made, deepest)
    probes = {s: p for s in made.variants if isinstance(p := group.probe(Candidate((s,))), Probe)}
    keeping = not made.request.only or "keep_all" in made.request.only
    return PlanFamily([probes], load_compare().most_methods, keeping=keeping, exact=True).candidates


def every_plan(made: SearchJob, candidates: Sequence[Candidate] = ()) -> Iterator[Named]:
    """Every layout with every candidate (or the given ones), at every step of the candidate's share
    and in all its pieces."""
    for choice, candidate in product(made.space.choices, candidates or every_candidate(made)):
        line = candidate.share.scalar if candidate.share else None
        steps = line.count(max(choice.sizes)) if line else 1
        for step, pieces in product(range(1, steps + 1), range(1, candidate.most_pieces + 1)):
            yield choice, candidate, candidate.text(step, pieces)


def bounds_at(made: SearchJob, choice: LayoutChoice) -> GroupBounds:
    """The bounds of one layout alone."""
    return GroupBounds([choice], made.problem(choice), made.registry)


def trials_at(made: SearchJob, choice: LayoutChoice) -> LayoutTrials:
    """The trials of one layout alone."""
    return LayoutTrials(made.job(choice), choice.states)


def everything(
    one: SearchRequest, most: int | None = None, candidates: Sequence[Candidate] = ()
) -> list[Trial]:
    """Every plan of the space (or `most` plans, drawn), tried: those that fit.  `candidates`: of
    these candidates alone."""
    made = SearchJob(one)
    plans = list(every_plan(made, candidates))
    if most is not None and most < len(plans):
        plans = Random(most).sample(plans, most)
    trials = (
        replace(
            trials_at(made, choice).trial(text, made.registry),
            candidate=candidate.text(1),
        )
        for choice, candidate, text in plans
    )
    return [one for one in trials if one.result.fits]


def some(one: SearchRequest, most: int, candidates: Sequence[Candidate] = ()) -> list[Trial]:
    """As `everything`, of a job with at least one plan."""
    found = everything(one, most, candidates)
    if not found:
        pytest.skip("none of its plans fits, on a device without an end")
    return found


def at_the_edge(one: SearchRequest, found: Sequence[Trial], share: float) -> SearchRequest:
    """The job on devices that hold about this share of the plans and the reserve."""
    needs = sorted(one.result.evaluation.reserved_bytes for one in found if one.result.evaluation)
    need = usable = needs[min(len(needs) - 1, int(share * len(needs)))]
    made = SearchJob(one)
    first = made.problem(made.space.choices[0])
    context = first.room_bytes - first.usable_bytes
    while (left := usable - reserve_bytes(usable + context)) < need:
        usable += need - left
    return replace(one, spec=one.spec.changed(hbm_bytes=usable + first.non_torch_bytes))


def fastest_that_fits(one: SearchRequest, found: Sequence[Trial]) -> Result | None:
    """The fastest of all plans on the job's devices; a step takes as long on any of them."""
    made = SearchJob(one)
    for known in sorted((one.result for one in found), key=lambda one: one.fitting_s):
        assert known.evaluation is not None
        choice = made.choice(known)
        problem = made.problem(choice)
        if max(known.evaluation.peak_device_bytes) > problem.usable_bytes:
            continue
        again = trials_at(made, choice).trial(known.method, made.registry).result
        if again.fits:
            return again
    return None


def searched_s(one: SearchRequest, candidates: Sequence[Candidate] = ()) -> float:
    """Seconds of the step that a search finds, of all candidates or of the given ones."""
    made = SearchJob(one)
    search = made.search_of(candidates) if candidates else made.search()
    results, _ = in_one_process(search, most_work=WORK)
    assert search.gap <= one.within or not search.queue
    return min((one.fitting_s for one in results), default=inf)


def fits(one: SearchRequest) -> bool:
    """Whether a search for any plan that fits finds one."""
    search = SearchJob(replace(one, any_fit=True)).search()
    for _ in search.run():
        if search.ended:
            break
    return search.best_s < inf


def held(
    gaps: Sequence[float],
    one: SearchRequest,
    found: Sequence[Trial],
    candidates: Sequence[Candidate] = (),
) -> None:
    """The law: no search loses more than its gap (each of `gaps`) to everything."""
    best = fastest_that_fits(one, found)
    best_s = best.fitting_s if best else inf
    for gap in gaps:
        least_s = searched_s(replace(one, within=gap), candidates)
        assert least_s == best_s or (1.0 - gap) * least_s <= best_s * (1 + 1e-9), (gap, best)
    assert candidates or best is None or fits(one), best


def nothing_faster_is_missed(one: SearchRequest, *, least: int = 2) -> list[Trial]:
    """The search of a job with experts finds a plan as fast as the fastest of 60 drawn ones, which
    it returns; `least`: so many degrees of experts are tried."""
    degrees = {(choice.layout.ep, choice.layout.etp) for choice in SearchJob(one).space.choices}
    assert len(degrees) >= least
    found = some(one, 60)
    edge = at_the_edge(one, found, SHARES[3])
    best = fastest_that_fits(edge, found)
    assert best is None or searched_s(edge) <= best.fitting_s * (1 + 1e-9)
    return found
