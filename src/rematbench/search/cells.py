"""The fastest plan of every cell of the matrix, by search: what the list of layouts misses.

The matrix tries each arm on a list of layouts.  A search of the same cell, on equal terms, begins
with the fastest listed plan.  It ends when it proves that no plan is faster by more than the gap,
or after a fixed amount of work, with the gap that it has proved by then.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from rematbench.host.console import CommandError
from rematbench.host.garbage import collect_rarely
from rematbench.host.workers import Pool
from rematbench.matrix.commands import Commands
from rematbench.matrix.spec import MatrixSpec
from rematbench.matrix.verdicts import by_cell
from rematbench.matrix.verdicts import speed as speed_of
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry
from rematbench.published.accuracy import Row, number
from rematbench.search.answer import best_line
from rematbench.search.halves import LIMIT_S, MINUTE_OF_ONE, in_one_process
from rematbench.search.job import Asked, SearchJob
from rematbench.search.probe import Known
from rematbench.search.space import Fixed, partitions
from rematbench.search.trial import Tried, tried_plan

Line = dict[str, Any]
Where = tuple[str, ...]
Cell = tuple[Where, list[Line]]
"""(model, cluster, sequence length) of a cell, and the cell's rows of the matrix."""


def searched_cells(
    spec: MatrixSpec, listed: Iterable[Row], *, within: float, processes: int
) -> Iterator[Line]:
    """A line for each cell of the table of best layouts: the fastest listed plan that leaves the
    search's reserve free, the fastest plan of the search, the proved gap, and how the search's plan
    differs from the listed one.  One process searches all cells of one model and length, because
    the programs of these cells are the same on every cluster."""
    cells = by_cell([dict(row) for row in listed])
    works: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for where, rows in cells.items():
        works[where[0], where[2]].append((where, rows))
    waiting = list(cells)
    found: dict[Where, Line] = {}
    pool: Pool[list[Cell], list[Line]] = Pool(processes, Cells, (spec, within), LIMIT_S)
    pool.add(works.values())
    try:
        for own, lines in pool.run():
            if isinstance(lines, str):
                why = f"took {LIMIT_S} CPU seconds" if lines == "late" else "died (out of memory?)"
                raise CommandError(f"a process {why} with the cells of {' '.join(own[0][0])}")
            found |= {where: line for (where, _), line in zip(own, lines, strict=True)}
            while waiting and waiting[0] in found:
                yield found.pop(waiting.pop(0))
    finally:
        pool.close()


class Cells:
    """Searches cells in a worker process, the cells of one model and length at a time."""

    def __init__(self, spec: MatrixSpec, within: float) -> None:
        collect_rarely()
        self.spec, self.within = spec, within
        self.registry = discover()
        self.commands = Commands(spec, self.registry)

    def __call__(self, cells: list[Cell]) -> list[Line]:
        """The lines of the cells, in their order."""
        known: Known = {}
        return [self._line(where, rows, known) for where, rows in cells]

    def _line(self, where: Where, rows: list[Line], known: Known) -> Line:
        spec, (model, cluster, seq_len) = self.spec, where
        gpus = self.commands.gpus[model]
        problem = spec.problem(int(seq_len), model=model, cluster=cluster, gpus=gpus)
        fixed = Fixed(micro_batch=spec.micro_batch, zero_stage=spec.zero_stage)
        made = SearchJob(Asked(spec=problem, fixed=fixed, within=self.within), known)
        row, listed = _fastest(made, rows, self.commands)
        known_s = listed.step_s if listed else inf
        end = in_one_process(made, known_s, MINUTE_OF_ONE)
        faster = [one for one in end.found[:1] if one.step_s < known_s]
        best = faster[0] if faster else listed
        told = best_line(made, best) if best else {}
        speed = number(row, "tokens_per_s_per_gpu")
        return {
            "model": model,
            "cluster": cluster,
            "seq_len": seq_len,
            "list_arm": row.get("arm", ""),
            "list_layout": row.get("layout", ""),
            "list_tokens_per_s_per_gpu": speed,
            "layouts": len(made.space.choices),
            "simulations": end.simulations,
            "gap": end.gap if best else None,
            "gain": told["tokens_per_s_per_gpu"] / speed - 1.0 if speed and told else None,
            "changed": _changed(faster[0], listed, self.registry) if faster else "",
            **told,
        }


def _fastest(made: SearchJob, rows: Iterable[Row], commands: Commands) -> tuple[Row, Tried | None]:
    """The fastest listed row whose plan leaves the reserve free, and the plan as the search
    simulates it; ({}, None) where no row does."""
    for row in sorted(rows, key=speed_of, reverse=True):
        if row["status"] == "ok":
            layout = commands.problem(row).layout
            choice = next(partitions(layout, made.model.num_layers))
            method = commands.names[row["arm"]]
            tried = tried_plan(choice, made.problem(choice), method, 0.0, made.registry)
            if tried.evaluation:
                return row, tried
    return {}, None


def _changed(best: Tried, known: Tried | None, registry: Registry) -> str:
    """What differs between the search's plan and the fastest listed plan: "layout", "method" or
    "settings"; "fits" where no listed plan fits."""
    if known is None:
        return "fits"
    same = registry.resolve(best.method).name == registry.resolve(known.method).name
    words = ["layout"] if best.choice != known.choice else []
    return " and ".join([*words, *(["settings"] if same else ["method"])])
