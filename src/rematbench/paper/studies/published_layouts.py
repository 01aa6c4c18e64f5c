"""The loss of published layouts compared with the best layout: one search for each published
problem.

One model simulates the published layout and the best one, so a loss compares layouts and plans.
The table also has the model's error: the published speed and our prediction of it.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Any

from msgspec.structs import replace

from rematbench.advise.candidates.layouts import DEGREES
from rematbench.advise.search.job import search_row
from rematbench.advise.search.request import MINUTE, Progress, SearchRequest
from rematbench.advise.search.rounds import SearchJob, place_of, rounds
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.breakdown import parts_of
from rematbench.evaluate.result import evaluate_method
from rematbench.evidence.predict import method_of
from rematbench.evidence.published.row_cases import PublishedCase, read_case
from rematbench.evidence.published.sheets import Row, RowError, text
from rematbench.inputs.job import Job
from rematbench.inputs.load import Kind, load_model, load_system, names
from rematbench.plan import Plan
from rematbench.plugins.discover import discover
from rematbench.problem import Problem

NEVER = -1.0
"""A gap that no search can prove, so a count of faster layouts ends only when it is complete."""

JOB_COLUMNS = ("source", "table", "model", "gpus", "seq_len", "global_batch")


def against(rows: Sequence[Row], *, within: float, processes: int) -> Iterator[dict[str, Any]]:
    """A line for each row: the published speed, our prediction for the published layout, the best
    plan of the search, the share of the published layout's step lost against that plan (a
    fraction), and the part of the step with the largest loss (seconds)."""
    registry = discover()
    for row in rows:
        try:
            case = read_case(row, registry)
            problem = case.problem()
        except RowError as error:
            yield {**_job_cells(row), "reason": str(error)}
            continue
        result = evaluate_method(problem, method_of(case, problem, registry))
        if result.evaluation is None or result.plan is None:
            yield {**_job_cells(row), "reason": result.reason}
            continue
        question = search_question(case, within)
        *_, end = rounds(question, shown=1, processes=processes)
        step_s = result.evaluation.step_s
        yield {
            **_job_cells(row),
            "published_layout": "-".join(str(getattr(problem.layout, key)) for key in DEGREES),
            "published_tokens_per_s_per_gpu": text(row, "tokens_per_s_per_gpu"),
            "pred_tokens_per_s_per_gpu": result.evaluation.tokens_per_s_per_gpu,
            "pred_step_s": step_s,
            **_rank(question, problem, step_s, processes),
            **_best(question, end, problem, result.plan, step_s),
        }


def search_question(
    case: PublishedCase, within: float, reserve_gib: float | None = 0.0
) -> SearchRequest:
    """A search of the row's problem with open degrees.  `reserve_gib`: device memory that plans
    leave free; 0 because published plans fill the device, None for the usual reserve."""
    spec = Job(
        model=_typed("model", case.model, load_model),
        cluster=case.cluster,
        system=_typed("system", case.system, load_system),
        gpus=case.gpus,
        seq_len=case.work.seq_len,
        global_batch=case.degrees.global_batch,
        attention=case.stack.attention,
        precision=case.work.precision,
    )
    return SearchRequest(spec=spec, reserve_gib=reserve_gib, within=within)


def _typed(kind: Kind, thing: Any, load: Callable[[str], Any]) -> Any:
    """The name that the command line has for a model or a system; without a name, the object."""
    name: str = thing.name
    return name if name in names(kind) and load(name) == thing else thing


def _rank(
    question: SearchRequest, problem: Problem, step_s: float, processes: int
) -> dict[str, Any]:
    """The rank of the published layout among all layouts: 1 + the number of other layouts that have
    a plan faster than the published plan. "at least": the count ended before every layout was
    judged."""
    count = replace(question, within=NEVER, faster_than_s=step_s)
    *_, end = rounds(count, shown=1, processes=processes, most_rounds=3 * MINUTE)
    others = {place_of(one) for one in end.results if one.problem.layout != problem.layout}
    return {"rank": 1 + len(others), "ranked": "all" if end.bound_s == inf else "at least"}


def _best(
    question: SearchRequest, end: Progress, problem: Problem, plan: Plan, step_s: float
) -> dict[str, Any]:
    if not end.results:
        return {"reason": "the search found no plan that fits"}
    (best,) = SearchJob(question).completed(end.results[:1])
    theirs = parts_of(problem, lower(plan, problem), step_s)
    longer = {part: seconds - best.parts_s[part] for part, seconds in theirs.items()}
    decides = max(longer, key=longer.__getitem__)
    return {
        "gap": end.gap,
        "simulations": end.simulations,
        "loss": 1.0 - best.fitting_s / step_s,
        "decides": decides,
        "decides_s": longer[decides],
        **search_row(1, best),
    }


def _job_cells(row: Row) -> dict[str, Any]:
    return {key: text(row, key) for key in JOB_COLUMNS}
