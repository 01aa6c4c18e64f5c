"""The table of a run's bytes by pipeline rank."""

from itertools import groupby

from rich.table import Table

from rematbench.evaluate.evaluation import PlanEvaluation, RankBytes
from rematbench.evaluate.result import Result
from rematbench.host.console import gib, grid


def stages(result: Result, evaluation: PlanEvaluation, keep_all: PlanEvaluation | None) -> Table:
    """A table of the peak bytes of every pipeline rank, and of the device bytes that stay free."""
    usable = result.problem.usable_bytes
    table = grid(
        "rank (GiB)",
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "staging",
        "peak",
        "unallocated",
        "freed",
        "pinned host",
    )
    for first, last in runs(evaluation, keep_all):
        rank = evaluation.ranks[first]
        freed = gib(freed_bytes(evaluation, keep_all)[first]) if keep_all else "-"
        table.add_row(
            str(first) if first == last else f"{first}-{last}",
            *(gib(value) for value in _parts(rank)),
            gib(rank.device_peak),
            gib(usable - rank.device_peak),
            freed,
            gib(rank.host_peak),
        )
    return table


def runs(evaluation: PlanEvaluation, other: PlanEvaluation | None) -> list[tuple[int, int]]:
    """(first, last) of each run of neighbouring ranks with equal cells in the table."""

    def look(rank: int) -> tuple[object, ...]:
        beside = other.ranks[rank].device_peak if other else 0
        here = evaluation.ranks[rank]
        return (*_parts(here), here.host_peak, beside)

    alike = (list(ranks) for _, ranks in groupby(range(len(evaluation.ranks)), look))
    return [(ranks[0], ranks[-1]) for ranks in alike]


def _parts(rank: RankBytes) -> tuple[int, ...]:
    return (
        *(rank.parameter, rank.gradient_at_peak, rank.optimizer),
        *(rank.activation_peak, rank.pools),
    )


def freed_bytes(evaluation: PlanEvaluation, keep_all: PlanEvaluation) -> list[int]:
    """Device bytes of each rank that keep_all needs and this plan does not."""
    pairs = zip(evaluation.ranks, keep_all.ranks, strict=True)
    return [before.device_peak - rank.device_peak for rank, before in pairs]
