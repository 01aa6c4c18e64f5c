"""The grand matrix, simulated: every arm at one layout, and every arm at its best layout.

The two tables are never mixed: the first isolates the effect of a method, and the second shows the
layouts that a user would run.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from rematbench.advise.bounds.probes import ProbePrograms
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.evaluate.evaluator import Evaluator, without_cluster
from rematbench.evaluate.result import ROOMS, SPEEDS, Result, evaluate_method
from rematbench.evidence.published.sheets import Row
from rematbench.host.console import CommandError
from rematbench.host.workers import collect_rarely
from rematbench.paper.matrix.best import (
    ANY,
    BEST,
    CELL,
    SAME,
    Answers,
    CommittedPlan,
    cell_job,
    runs,
)
from rematbench.paper.matrix.spec import MatrixSpec
from rematbench.plugins.registry import Registry

TABLES = (SAME, BEST)
NOT_RUN = "not run"
ROUNDING = 1e-6
"""Largest difference of a step from the committed one, as a share of the step."""
LAYOUT = ("tp", "cp", "pp", "vpp", "dp", "ulysses")
PICKED = (
    *("status", "reason", "name", *LAYOUT, "global_batch", "partition", "run_with"),
    *("reserved_bytes", "usable_bytes", "host_node_bytes", *ROOMS[:2]),
)
"""Columns of a result that every line has."""
TIMED = (*SPEEDS, "recompute_flop", "offload_bytes")
"""Further columns of a result that fits."""

Line = dict[str, Any]
Cell = tuple[Line, Result | None]
"""A line with the result that it was made from (None: no layout of the cell fits the arm)."""


def run_matrix(
    spec: MatrixSpec, registry: Registry, answers: Iterable[Row] = ()
) -> Iterator[list[Line]]:
    """The result lines of every cell.  `answers`: committed lines of searches (`best`).  Their
    plans are simulated again; questions without a line are searched."""
    collect_rarely()
    known: dict[tuple[str, ...], dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in answers:
        known[tuple(row[key] for key in CELL)][row["table"], row["arm"]] = row
    for work in spec.works:
        for seq_len in spec.seq_lens:
            programs, probes = Evaluator(without_cluster), ProbePrograms()
            for cluster in spec.clusters:
                cell = cell_job(spec, work, cluster, seq_len, programs, probes)
                own = known[work.model, cluster, str(seq_len)]
                yield run_cell(Answers(cell, spec, registry, own), programs)


def run_cell(answers: Answers, programs: Evaluator) -> list[Line]:
    """The result lines of a cell: each arm at the one layout and at its best layout, and the
    fastest plan of all."""
    cells = [*_of_arms(answers, programs), _of_answer(answers, ANY, "", programs)]
    for table in TABLES:
        _add_parts([cell for cell in cells if cell[0]["table"] == table], programs)
    return [line for line, _ in cells]


def _of_arms(answers: Answers, programs: Evaluator) -> Iterator[Cell]:
    one_layout = answers.one_layout()
    for arm in answers.arms.values():
        if not runs(arm, answers.cell.request.spec.work.seq_len):
            for table in TABLES:
                yield {**_head(answers, table, arm.name), "status": NOT_RUN}, None
            continue
        text = answers.methods[arm.name].text
        one = _evaluated(answers, one_layout.choice, text, programs)
        if one and (arm.name, one_layout.name) == (answers.spec.baseline, text):
            _check_step(_head(answers, SAME, arm.name), one_layout, one)
        yield {**_head(answers, SAME, arm.name), **_line(one)}, one
        if arm.name in answers.searched:
            yield _of_answer(answers, BEST, arm.name, programs)
        else:
            yield {**_head(answers, BEST, arm.name), **_line(one)}, one


def _head(answers: Answers, table: str, name: str) -> Line:
    where = dict(zip(CELL, answers.at, strict=True))
    gpus = answers.cell.request.spec.gpus
    head = {"table": table, **where, "gpus": gpus, "arm": name}
    return {**head, "method": answers.methods[name].name} if name in answers.arms else head


def _of_answer(answers: Answers, table: str, name: str, programs: Evaluator) -> Cell:
    """The line of a searched answer, whose plan is simulated again."""
    answer = answers.best(name) if table == BEST else answers.any_plan()
    head = _head(answers, table, name) | answer.proof
    result = _evaluated(answers, answer.choice, answer.name, programs)
    if result is None:
        status = "oom" if answer.short else "failed" if answer.gap is None else "unsupported"
        return {**head, "status": status, "reason": answer.reason}, None
    _check_step(head, answer, result)
    return {**head, "method": result.family, **_line(result)}, result


def _evaluated(
    answers: Answers, choice: LayoutChoice | None, text: str, programs: Evaluator
) -> Result | None:
    """The result of a method at a layout of the cell (None without a layout). A method that fills
    the device leaves the reserve of the job's problem free."""
    if choice is None:
        return None
    job, method = answers.cell.job(choice), answers.registry.resolve(text)
    return evaluate_method(
        job.problem, method, job.base, words=job.words, text=text, shared=programs
    )


def _check_step(head: Line, answer: CommittedPlan, result: Result) -> None:
    where = " ".join(str(head[key]) for key in (*CELL, "arm"))
    if wrong := changed_step(f"matrix: {where}: {answer.name}", result, answer.step_s):
        raise CommandError(wrong)


def changed_step(what: str, result: Result, told_s: float) -> str:
    """A sentence if a plan no longer has the committed step of `told_s` seconds; otherwise ""."""
    step_s = result.fitting_s
    if abs(step_s - told_s) <= ROUNDING * told_s:
        return ""
    now = f"takes {step_s:.6g} s now" if result.fits else f"is {result.status} now"
    why = "the cost model has changed; search again (./bench reproduce --full)"
    return f"{what} {now}, not {told_s:.6g} s: {why}"


def _line(result: Result | None) -> Line:
    """The columns of a plan at a layout (None: no layout is known for the arm)."""
    if result is None:
        return {"status": "oom", "reason": "no arm fits at any layout of the cell"}
    row, verdict = result.quick_row() | {"run_with": result.command}, result.verdict
    line = {key: row[key] for key in (*PICKED, *(TIMED if result.fits else ()))}
    line |= {"alpha": result.plan.fit.get("alpha") if result.plan else None}
    short = verdict.short_bytes if verdict else {}
    return line | {f"{where}_short_bytes": nbytes for where, nbytes in short.items()}


def _add_parts(cells: list[Cell], programs: Evaluator) -> None:
    """Add the parts of the step, as shares, to the line of the fastest fitting arm."""
    fitting = [(line, result) for line, result in cells if result and result.fits]
    if not fitting:
        return
    line, result = max(fitting, key=lambda cell: cell[1].tokens_per_s_per_gpu or 0.0)
    assert result.plan is not None
    assert result.step_s is not None
    parts = programs.parts_s(result.problem, result.plan, result.step_s)
    line |= {f"part_{name}": seconds / result.step_s for name, seconds in parts.items()}
