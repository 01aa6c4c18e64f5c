"""Every plan of a search's space, tried one by one: what a search is held against."""

from collections.abc import Iterator, Sequence
from itertools import product
from random import Random

from msgspec.structs import replace

from rematbench.advise.compare.candidates import load_compare
from rematbench.advise.search.candidates import Arm, Tree
from rematbench.advise.search.probes import Probe
from rematbench.advise.search.queue import most_pieces
from rematbench.advise.search.search_job import Asked, SearchJob
from rematbench.advise.search.shard_bounds import ShardBounds
from rematbench.advise.search.shards import Shard
from rematbench.advise.search.space import Choice
from rematbench.advise.search.trials import Site, Trial

Named = tuple[Choice, Arm, str]
"""A plan of a space: its layout, its arm, and the plan's text."""


def every_arm(made: SearchJob) -> list[Arm]:
    """All arms, of the tree that leaves none out."""
    deepest = max(made.space.choices, key=lambda choice: choice.layout.pp)
    shard = bounds_at(made, deepest).shard
    probes = {s: p for s in made.singles if isinstance(p := shard.probe(Arm((s,))), Probe)}
    keeping = not made.asked.only or "keep_all" in made.asked.only
    return Tree([probes], load_compare().most_methods, keeping=keeping, exact=True).arms


def every_plan(made: SearchJob, arms: Sequence[Arm] = ()) -> Iterator[Named]:
    """Every layout with every arm (or the given ones), at every step of the arm's line and in all
    its pieces."""
    for choice, arm in product(made.space.choices, arms or every_arm(made)):
        line = arm.line.scalar if arm.line else None
        steps = line.count(max(choice.sizes)) if line else 1
        for step, pieces in product(range(1, steps + 1), range(1, most_pieces(arm) + 1)):
            yield choice, arm, arm.text(step, pieces)


def bounds_at(made: SearchJob, choice: Choice) -> ShardBounds:
    """The bounds of one layout alone."""
    return ShardBounds(Shard([choice], made.problem(choice), made.registry))


def everything(one: Asked, most: int | None = None, arms: Sequence[Arm] = ()) -> list[Trial]:
    """Every plan of the space (or `most` plans, drawn), tried: those that fit.  `arms`: of these
    arms alone."""
    made = SearchJob(one)
    plans = list(every_plan(made, arms))
    if most is not None and most < len(plans):
        plans = Random(most).sample(plans, most)
    trials = (
        replace(Site(choice, made.problem(choice)).trial(text, made.registry), arm=arm.text(1))
        for choice, arm, text in plans
    )
    return [one for one in trials if one.result.fits]
