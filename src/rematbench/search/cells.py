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
from rematbench.plugins.registry import Registry
from rematbench.published.accuracy import Row, number
from rematbench.search.answer import judged, line
from rematbench.search.halves import rounds
from rematbench.search.job import Asked, SearchJob
from rematbench.search.space import Choice, Fixed, partitions
from rematbench.search.trial import Tried, tried_plan

Line = dict[str, Any]

MOST_ROUNDS = 20
"""Rounds of a cell: a minute or two of a core."""


def searched_cells(
    spec: MatrixSpec,
    registry: Registry,
    fastest: Iterable[Row],
    *,
    within: float,
    processes: int,
) -> Iterator[Line]:
    """A line for each cell: the fastest of the list, the fastest of the search, the proved gap, and
    what of the search's plan the list has not."""
    commands = Commands(spec, registry)
    gpus = {work.model: work.gpus for work in spec.works}
    for row in fastest:
        problem = spec.problem(
            int(row["seq_len"]), model=row["model"], cluster=row["cluster"], gpus=gpus[row["model"]]
        )
        fixed = Fixed(micro_batch=spec.micro_batch, zero_stage=spec.zero_stage)
        asked = Asked(spec=problem, fixed=fixed, within=within)
        made = SearchJob(asked)
        known = _known(made, row, commands)
        known_s = known.step_s if known else inf
        *_, end = rounds(
            asked, shown=0, processes=processes, known_s=known_s, most_rounds=MOST_ROUNDS
        )
        faster = [one for one in end.found[:1] if one.step_s < known_s]
        best = faster[0] if faster else known
        lines = [line(1, one) for one in judged(made, [best])] if best else []
        speed = number(row, "tokens_per_s_per_gpu")
        yield {
            "model": row["model"],
            "cluster": row["cluster"],
            "seq_len": row["seq_len"],
            "list_arm": row["arm"],
            "list_layout": row["layout"],
            "list_tokens_per_s_per_gpu": speed,
            "list_fits": row["fits"],
            "layouts": len(made.space.choices),
            "simulations": end.simulations,
            "gap": end.gap if best else None,
            "gain": lines[0]["tokens_per_s_per_gpu"] / speed - 1.0 if speed and lines else None,
            "changed": _changed(faster[0], known, row, registry) if faster else "",
            **(lines[0] if lines else {}),
        }


def _known(made: SearchJob, row: Row, commands: Commands) -> Tried | None:
    """The fastest of the list, simulated as the search does; None where too little stays free."""
    if not row["arm"]:
        return None
    layout = commands.problem(row).layout
    choice = next(partitions(layout, made.model.num_layers))
    method = commands.names[row["arm"]]
    tried = tried_plan(choice, made.problem(choice), method, 0.0, made.registry)
    return tried if tried.evaluation else None


def _changed(best: Tried, known: Tried | None, row: Row, registry: Registry) -> str:
    """What the search's plan has that the fastest of the list has not."""
    if known is None:
        return "leaves the reserve free" if row["arm"] else "fits"
    same = registry.resolve(best.method).name == registry.resolve(known.method).name
    words = ["layout"] if _where(best.choice) != _where(known.choice) else []
    return " and ".join([*words, *(["settings"] if same else ["method"])])


def _where(choice: Choice) -> tuple[object, ...]:
    return choice.layout, choice.sizes
