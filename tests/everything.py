"""Every plan of a search's space, tried one by one: what a search is held against."""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from msgspec.structs import replace

from rematbench.advise.compare.compositions import load_compare
from rematbench.advise.search.candidates import Candidate, Tree
from rematbench.advise.search.probes import Probe
from rematbench.advise.search.queue import most_pieces
from rematbench.advise.search.search_job import SearchJob, SearchRequest
from rematbench.advise.search.shard_bounds import ShardBounds
from rematbench.advise.search.shards import Shard
from rematbench.advise.search.space import Choice
from rematbench.advise.search.trials import Site, Trial

Named = tuple[Choice, Candidate, str]
"""A plan of a space: its layout, its candidate, and the plan's text."""


def every_candidate(made: SearchJob) -> list[Candidate]:
    """All candidates, of the tree that leaves none out."""
    deepest = max(made.space.choices, key=lambda choice: choice.layout.pp)
    shard = bounds_at(made, deepest).shard
    probes = {s: p for s in made.variants if isinstance(p := shard.probe(Candidate((s,))), Probe)}
    keeping = not made.request.only or "keep_all" in made.request.only
    return Tree([probes], load_compare().most_methods, keeping=keeping, exact=True).candidates


def every_plan(made: SearchJob, candidates: Sequence[Candidate] = ()) -> Iterator[Named]:
    """Every layout with every candidate (or the given ones), at every step of the candidate's share
    and in all its pieces."""
    for choice, candidate in product(made.space.choices, candidates or every_candidate(made)):
        line = candidate.share.scalar if candidate.share else None
        steps = line.count(max(choice.sizes)) if line else 1
        for step, pieces in product(range(1, steps + 1), range(1, most_pieces(candidate) + 1)):
            yield choice, candidate, candidate.text(step, pieces)


def bounds_at(made: SearchJob, choice: Choice) -> ShardBounds:
    """The bounds of one layout alone."""
    return ShardBounds(Shard([choice], made.problem(choice), made.registry))


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
            Site(choice, made.problem(choice)).trial(text, made.registry),
            candidate=candidate.text(1),
        )
        for choice, candidate, text in plans
    )
    return [one for one in trials if one.result.fits]
