"""Plans to show besides the fastest: the simplest that ties with it, and the best that a package
reaches with its own options.

Each comes from a separate search, so neither depends on how many plans a table shows."""

import math
from collections.abc import Iterator, Sequence
from itertools import product

from msgspec.structs import replace

from rematbench.advise.candidates.candidate import Trainer, load_compare
from rematbench.advise.search.job import SearchSpace
from rematbench.advise.search.request import MINUTE, Rounds, SearchRequest
from rematbench.evaluate.result import Result
from rematbench.evidence.bands import ratio_band
from rematbench.inputs.system import System
from rematbench.plugins.registry import IDENTITY, MethodError
from rematbench.worlds.packages.process import baselines

NEAREST = 10
"""The number of plans of a search, fastest first, that are checked for a tie.  A later plan may tie
although the first does not, because ties between layouts are wider than those at one layout."""
Simple = tuple[int, bool]
"""How complex a plan is: its number of methods, and whether it uses host memory."""


def simplest(job: SearchSpace, best: Result, run: Rounds) -> Result | None:
    """The simplest plan that ties with the fastest plan `best`: fewest methods, then without host
    memory, then fastest.  None if that is `best` or if a search of a minute finds no other."""
    methods = _methods(best)
    own = methods, bool(best.host_node_bytes)
    for level in product(range(0 if job.keeps else 1, methods + 1), (False, True)):
        if level >= own:
            return None
        if level == (0, True) and not any(choice.hosted for choice in job.space.choices):
            continue
        if (result := _tied(job, best, level, run)) is not None:
            return result
    return None


def _tied(job: SearchSpace, best: Result, level: Simple, run: Rounds) -> Result | None:
    """The fastest plan of a complexity `level` that ties with `best`; None without such a plan."""
    request = replace(job.request, most_methods=level[0], hosts=level[1])
    limit_s = best.fitting_s * math.exp(max(ratio_band(one_layout=item) for item in (True, False)))
    near = job.completed([best, *_fastest(request, run, limit_s)])
    return next((item for item in near[1:] if item.tied and _methods(item) <= level[0]), None)


def _methods(result: Result) -> int:
    """The number of a plan's methods, those that place states included."""
    return len([name for name in result.family.split("+") if name != IDENTITY])


def _fastest(
    request: SearchRequest, run: Rounds, limit_s: float, most_rounds: int | None = MINUTE
) -> Sequence[Result]:
    """The first plans of a search for steps below `limit_s`, which runs for `most_rounds` or until
    the gap is proved."""
    *_, end = run(request, shown=1, most_rounds=most_rounds, limit_s=limit_s)
    return end.results[:NEAREST]


def of_packages(
    job: SearchSpace, known: Sequence[Result], run: Rounds
) -> Iterator[tuple[str, Result | None]]:
    """Yield each package that runs the job's stack, with the fastest plan of its own policies (None
    if none fits).  The plan is proved like the job's, and no slower than those of the plans `known`
    that the package has options for."""
    for name, entry in baselines().items():
        if job.request.engine or not _runs(entry.declared("stacks", ()), job.system):
            continue
        request = replace(job.request, engine=name, only=())
        try:
            SearchSpace(request).ready()
        except MethodError:  # the package has no options for any of these layouts
            continue
        ours = [item for item in known if name in item.runs_on]
        least_s = min((item.fitting_s for item in ours), default=math.inf)
        result = _fastest(request, run, least_s * (1 - request.within), most_rounds=None)
        fastest = min((*result, *ours), key=lambda item: item.fitting_s, default=None)
        yield name, job.completed([known[0], fastest])[1] if fastest else None


def of_trainers(
    job: SearchSpace, known: Sequence[Result], run: Rounds
) -> Iterator[tuple[tuple[str, ...], str, Result | None]]:
    """Yield each group of trainers that run the job's stack and offer the same methods: their
    names, the configuration keys of the fastest plan of these methods (empty if none fits), and
    that plan."""
    request = job.request
    alike: dict[tuple[str, ...], list[Trainer]] = {}
    for trainer in load_compare().trainers:
        if not request.engine and not request.only and _runs(trainer.stacks, job.system):
            alike.setdefault(tuple(trainer.keys), []).append(trainer)
    for methods, trainers in alike.items():
        exact = tuple(name if ":" in name or name == IDENTITY else f"{name}:" for name in methods)
        found = _fastest(replace(request, only=exact, most_methods=1), run, math.inf, None)
        best = job.completed([known[0], found[0]])[1] if found else None
        method = best.method if best else ""
        said = [f"{one.name}: {one.keys[method]}" for one in trainers if method in one.keys]
        yield tuple(one.name for one in trainers), "; ".join(said), best


def _runs(stacks: Sequence[str], system: System) -> bool:
    return not {system.name, *system.constants}.isdisjoint(stacks)
