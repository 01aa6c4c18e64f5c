"""Every plan of a search's space, tried one by one: what a search is held against."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from random import Random

from msgspec.structs import replace

from rematbench.advise.bounds.group_bounds import GroupBounds
from rematbench.advise.bounds.lines import Probe
from rematbench.advise.candidates.candidate import Candidate, load_compare
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.advise.candidates.trials import LayoutTrials, Trial
from rematbench.advise.search.families import PlanFamily
from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, rounds

ALONE = partial(rounds, processes=1)
"""A search in one process."""

Named = tuple[LayoutChoice, Candidate, str]
"""A plan of a space: its layout, its candidate, and the plan's text."""


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
