"""The speed lost on published sweeps by following the search, and the search's best plans."""

from collections.abc import Iterator, Sequence
from typing import Any

from rematbench.advise.search.request import MINUTE
from rematbench.advise.search.rounds import SearchJob, rounds
from rematbench.evaluate.result import Result
from rematbench.evidence.decisions import lost, regret, sweeps
from rematbench.evidence.peaks import reserve_bytes
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import SPEED, SWEEP, Row, RowError, number
from rematbench.paper.studies.published_layouts import search_question
from rematbench.plugins.discover import discover

MOST_ROUNDS = 10 * MINUTE
"""Rounds after which the search of a sweep ends with the gap that is proved by then."""


def searched_sweeps(
    rows: Sequence[Row], *, within: float, processes: int
) -> Iterator[dict[str, Any]]:
    """A line for each sweep of predicted rows.  `regret`: the share of the best measured speed lost
    by the row predicted fastest among the rows that leave the search's reserve free (1 if that row
    ran out of memory).  The line also has the best plan of the whole space and, if a row measured
    it, the share that the plan loses."""
    registry = discover()
    for key, own in sweeps(rows).items():
        said: dict[str, Any] = {**dict(zip(SWEEP, key, strict=True)), "rows": len(own)}
        pick, loses = _pick(own)
        said |= {"regret": loses, "regret_filled": regret(own)}
        try:
            case = read_case(own[0], registry)
        except RowError as error:
            yield {**said, "reason": str(error)}
            continue
        question = search_question(case, within, reserve_gib=None)
        job = SearchJob(question)
        *_, end = rounds(question, shown=1, processes=processes, most_rounds=MOST_ROUNDS)
        if not end.results:
            yield {**said, "reason": "no plan fits"}
            continue
        best = end.results[0]
        measured = next((row for row in own if _fits(row) and _is(row, best, job)), None)
        predicted = number(pick, f"pred_{SPEED}") if pick else None
        assert best.evaluation is not None
        speed = best.evaluation.tokens_per_s_per_gpu
        yield {
            **said,
            "pick_tokens_per_s_per_gpu": predicted,
            "over_pick": speed / predicted - 1.0 if predicted else None,
            "best_measured": "yes" if measured else "no",
            "best_regret": lost(measured, own) if measured else None,
            "gap": end.gap,
            "simulations": end.simulations,
            **job.best_row(best),
            **said,  # last, because best_row has other names of the job
        }


def _pick(rows: Sequence[Row]) -> tuple[Row | None, float]:
    """The row with the fastest prediction that leaves the reserve free, and the share of the best
    measured speed that it loses; (None, 1) where no row leaves the reserve free."""
    fitting = [row for row in rows if _fits(row) and _leaves(row)]
    pick = max(fitting, key=lambda row: number(row, f"pred_{SPEED}") or 0.0, default=None)
    return pick, 1.0 if pick is None else lost(pick, rows)


def _fits(row: Row) -> bool:
    return str(row["pred_status"]) == "ok"


def _leaves(row: Row) -> bool:
    total, left = number(row, "pred_device_total_bytes"), number(row, "pred_headroom_bytes")
    assert total is not None
    assert left is not None
    return reserve_bytes(int(total + left)) <= left


def _is(row: Row, best: Result, job: SearchJob) -> bool:
    """Whether a row ran the method and the layout of the search's best plan."""
    case, choice = read_case(row, job.registry), job.choice(best)
    same = job.registry.resolve(case.method, case.settings).text == best.method
    return choice.even and not choice.hosted and same and case.layout == choice.layout
