"""The fastest plan of the whole space compared with the fastest plan that one package can
express."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, rounds
from rematbench.inputs.configfile import convert, read_mapping
from rematbench.plan import Fraction
from rematbench.workload import PositiveInt
from rematbench.worlds.records.suite import NamedProblem

Space = Literal["all", "megatron_core", "deepspeed"]


class SpaceJob(NamedProblem, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A problem with open degrees.  `published_mfu`: the published MFU (a fraction) by space, for
    spaces that have one; `stacks`: the stack by space, if a package does not run the problem's own
    stack."""

    source: str
    published_mfu: dict[Space, Fraction] = field(default_factory=dict)
    stacks: dict[Space, str] = field(default_factory=dict)


class Spaces(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs, and the spaces to search for each job.  `within`: the gap that each search proves, as a
    share of the best step; `most_rounds`: the rounds after which it ends without this proof."""

    within: Fraction
    most_rounds: PositiveInt = 60
    jobs: tuple[SpaceJob, ...]
    spaces: tuple[Space, ...]


def load_spaces(path: Path) -> Spaces:
    return convert(read_mapping(path, str(path)), Spaces, str(path))


def searched_spaces(declared: Spaces, *, processes: int) -> Iterator[dict[str, Any]]:
    """A line for each job and space.  Plans may fill the device, as published plans do."""
    for job in declared.jobs:
        for space in declared.spaces:
            stack = job.stacks.get(space, job.system)
            question = SearchRequest(
                spec=replace(job, system=stack),
                engine="" if space == "all" else space,
                reserve_gib=0.0,
                within=declared.within,
            )
            yield {
                "job": job.name,
                "source": job.source,
                "space": space,
                "system": stack,
                "published_mfu": job.published_mfu.get(space),
                **_best(question, processes, declared.most_rounds),
            }


def _best(question: SearchRequest, processes: int, most: int) -> dict[str, Any]:
    *_, end = rounds(question, shown=1, processes=processes, most_rounds=most)
    made = SearchJob(question)
    said = {"layouts": len(made.space.choices), "simulations": end.simulations}
    if not end.results:
        return {**said, "reason": "no plan fits"}
    return {**said, "gap": end.gap, **made.best_row(end.results[0])}
