"""The part `searched` of `measure-gpu`: the plans that a search returns, measured in turns.

`measure-gpu --predict --part searched` searches each job of the suite for each device memory and
writes the plans with their predictions. The measurement makes its cells from these lines, and
limits torch to the device memory of the search.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rematbench.advise.search.request import SearchRequest
from rematbench.advise.search.rounds import SearchJob, rounds
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import Result
from rematbench.host.console import CommandError
from rematbench.host.table import GIB
from rematbench.inputs.configfile import (
    ConfigError,
    convert,
    read_mapping,
    require_among,
    require_unique,
)
from rematbench.inputs.job import Job
from rematbench.measure.parts.layers import FEWEST, run_by_turns
from rematbench.measure.predicted_steps import PREDICTIONS, lines_of, predict
from rematbench.measure.records import Searched, Turn, by_cell
from rematbench.plan import Fraction
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import MethodError
from rematbench.workload import PositiveInt
from rematbench.worlds.packages.process import Device
from rematbench.worlds.records.suite_cells import Cell, is_selected, planned_cell

SHOWN = 200
"""The number of a search's first rows from which rows with different compositions are taken."""


class SearchedSuite(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs of one GPU. `beside`: methods whose best plan is also measured, as the choice of a
    person who does not search. `within`: the gap to prove, a share of the best step."""

    within: Fraction
    jobs: "tuple[OneGpuJob, ...]"
    beside: tuple[str, ...]


class OneGpuJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A job that is searched for each device memory. The first `rows` of each answer are measured;
    of rows that differ only in settings, only the first is taken."""

    name: str
    why: str
    model: str
    cluster: str
    system: str
    seq_len: PositiveInt
    global_batch: PositiveInt
    memory_gib: tuple[float, ...]
    rows: PositiveInt = 4

    def spec(self, memory_gib: float) -> Job:
        """The job for a device memory. States stay on the device, because turns share them."""
        return Job(
            model=self.model,
            cluster=self.cluster,
            system=self.system,
            gpus=1,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            hbm_bytes=round(memory_gib * GIB),
            optimizer="device",
        )

    def at(self, memory_gib: float) -> str:
        return f"{self.name}-{memory_gib:g}gib".replace(".", "_")


def load_searched(path: Path) -> SearchedSuite:
    """The suite of a file; ConfigError or RateError of one line for a wrong entry."""
    label = str(path)
    suite = convert(read_mapping(path, label), SearchedSuite, label)
    require_unique([job.name for job in suite.jobs], label, "jobs")
    require_among(suite.beside, list(discover().methods), (label, "beside", "method"))
    for job in suite.jobs:
        for memory in job.memory_gib:
            make_problem(job.spec(memory))
    return suite


def search_all(suite: SearchedSuite, processes: int) -> Iterator[Searched]:
    """Search every job for every memory; yield the plans to measure with their predictions."""
    for job in suite.jobs:
        for memory in job.memory_gib:
            asked = SearchRequest(spec=job.spec(memory), within=suite.within)
            *_, end = rounds(asked, shown=SHOWN, processes=processes)
            if not end.results:
                raise CommandError(f"{job.at(memory)}: no plan fits")
            *_, other = rounds(replace(asked, only=suite.beside), shown=1, processes=processes)
            search = SearchJob(asked)
            beside = [(one.method, search.choice(one)) for one in other.results[:1]]
            found = [(one.method, search.choice(one)) for one in different(end.results)[: job.rows]]
            places = {one: place for place, one in enumerate(found, 1)}
            for method, choice in dict.fromkeys((*found, *beside)):
                one, spec = (method, choice), search.spec(choice)
                place = places.get(one, 0)
                yield _line(job, memory, place, method, spec, beside=one in beside)


def different(results: Sequence[Result]) -> list[Result]:
    registry, first = discover(), dict[Any, Result]()
    for one in results:
        methods = frozenset(each.name for each in registry.resolve(one.method).methods)
        first.setdefault((methods, one.problem.layout), one)
    return list(first.values())


def _line(
    job: OneGpuJob, memory: float, place: int, method: str, spec: Job, *, beside: bool
) -> Searched:
    word = f"searched.{place}" if place else "beside.0"
    cell = _cell(f"{job.at(memory)}.{word}", spec, method)
    return Searched(
        job=job.name,
        memory_gib=memory,
        place=place,
        beside=beside,
        spec=spec,
        method=method,
        **msgspec.structs.asdict(predict(cell)),
    )


def _cell(name: str, spec: Job, method: str) -> Cell:
    problem = make_problem(spec)
    composed = discover().resolve(method, None, problem)
    return planned_cell(name, problem, composed)


def searched_cells(path: Path, only: Sequence[str] = ()) -> list[Cell]:
    """Return the cells of a file of predictions; `only`: names of cells or problems to take."""
    found = []
    for line in lines_of(path):
        assert isinstance(line, Searched)
        if is_selected(line.cell, only):
            try:
                found.append(_cell(line.cell, line.spec, line.method))
            except (ConfigError, MethodError) as error:
                raise CommandError(f"{path}: {line.cell}: {error}") from error
    if not found:
        raise CommandError(f"{path} has no cell named {' or '.join(only)} (--only)")
    return found


def measure_searched(only: Sequence[str], output: Path, device: Device, limit_s: float) -> None:
    """Run the plans of the folder's predictions in turns within `limit_s` seconds, each plan for
    the minimum number of turns."""

    def unsettled(live: list[Cell], turns: Sequence[Turn]) -> list[Cell]:
        had = by_cell(turns)
        return [cell for cell in live if len(had[cell.name]) < FEWEST]

    found = searched_cells(output / PREDICTIONS["searched"], only)
    run_by_turns(found, unsettled, output, "searched", device, limit_s)
