"""The fastest plan of every cell of the matrix, by search: what the list of layouts misses.

The matrix tries each arm on a list of layouts; a search of the same cell, on equal terms, begins
with the fastest of them and ends when no plan of its space is faster by more than the gap, or after
a fixed amount of work, with the gap that is proved until then.
"""

from collections.abc import Iterable, Iterator
from math import inf
from typing import Any

from rematbench.matrix.commands import Commands
from rematbench.matrix.spec import MatrixSpec
from rematbench.matrix.verdicts import by_cell
from rematbench.matrix.verdicts import speed as speed_of
from rematbench.plugins.registry import Registry
from rematbench.published.accuracy import Row, number
from rematbench.search.answer import best_line
from rematbench.search.halves import MINUTE, rounds
from rematbench.search.job import Asked, SearchJob
from rematbench.search.space import Fixed, partitions
from rematbench.search.trial import Tried, tried_plan

Line = dict[str, Any]


def searched_cells(
    spec: MatrixSpec,
    registry: Registry,
    listed: Iterable[Row],
    *,
    within: float,
    processes: int,
) -> Iterator[Line]:
    """A line for each cell of the table of best layouts: the fastest of the list that leaves the
    search's reserve free, the fastest of the search, the proved gap, and what of the search's plan
    the list has not."""
    commands = Commands(spec, registry)
    for (model, cluster, seq_len), rows in by_cell([dict(row) for row in listed]).items():
        gpus = commands.gpus[model]
        problem = spec.problem(int(seq_len), model=model, cluster=cluster, gpus=gpus)
        fixed = Fixed(micro_batch=spec.micro_batch, zero_stage=spec.zero_stage)
        asked = Asked(spec=problem, fixed=fixed, within=within)
        made = SearchJob(asked)
        row, known = _fastest(made, rows, commands)
        known_s = known.step_s if known else inf
        *_, end = rounds(asked, shown=0, processes=processes, known_s=known_s, most_rounds=MINUTE)
        faster = [one for one in end.found[:1] if one.step_s < known_s]
        best = faster[0] if faster else known
        told = best_line(made, best) if best else {}
        speed = number(row, "tokens_per_s_per_gpu")
        yield {
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
            "changed": _changed(faster[0], known, registry) if faster else "",
            **told,
        }


def _fastest(made: SearchJob, rows: Iterable[Row], commands: Commands) -> tuple[Row, Tried | None]:
    """The fastest line of the list whose plan leaves the reserve free, simulated as the search
    does; nothing where there is none."""
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
    """What the search's plan has that the fastest of the list has not."""
    if known is None:
        return "fits"
    same = registry.resolve(best.method).name == registry.resolve(known.method).name
    words = ["layout"] if best.choice != known.choice else []
    return " and ".join([*words, *(["settings"] if same else ["method"])])
