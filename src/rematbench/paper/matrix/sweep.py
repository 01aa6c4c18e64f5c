"""The grand matrix, simulated: every arm at one layout, and every arm at its best layout.

The two tables are never mixed: the first isolates the effect of a method, the second has the
layouts that a user would run.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rematbench.advise.search.probe_problems import ProbePrograms
from rematbench.evaluate.breakdown import busiest
from rematbench.evidence.accuracy import Row
from rematbench.host.console import CommandError
from rematbench.host.workers import collect_rarely
from rematbench.paper.matrix.best import ANY, BEST, CELL, SAME, Answer, Answers, CellJob, runs
from rematbench.paper.matrix.cell import ArmTried, Numbers, tried
from rematbench.plugins.registry import Registry
from rematbench.worlds.records.matrix_spec import MatrixSpec

TABLES = (SAME, BEST)
NOT_RUN = "not run"
ROUNDING = 1e-6
"""Largest difference of a step from the committed one, as a share of the step."""
LAYOUT = ("tp", "cp", "pp", "vpp", "dp", "ulysses")

Line = dict[str, Any]
Result = tuple[Line, ArmTried | None]


def run_matrix(
    spec: MatrixSpec, registry: Registry, answers: Iterable[Row] = ()
) -> Iterator[list[Line]]:
    """The result lines of every cell.  `answers`: committed lines of searches (`best`), whose plans
    are simulated again; what has no such line is searched."""
    collect_rarely()
    known: dict[tuple[str, ...], dict[tuple[str, str], Row]] = defaultdict(dict)
    for row in answers:
        known[tuple(row[key] for key in CELL)][row["table"], row["arm"]] = row
    for work in spec.works:
        for seq_len in spec.seq_lens:
            programs, probes = Numbers(), ProbePrograms()
            for cluster in spec.clusters:
                cell = CellJob(spec, work, cluster, seq_len, programs, probes)
                own = known[work.model, cluster, str(seq_len)]
                yield run_cell(Answers(cell, spec, registry, own), programs)


def run_cell(answers: Answers, programs: Numbers) -> list[Line]:
    """The result lines of a cell: each arm at the one layout and at its best, and the fastest plan
    of all."""
    results = [*_of_arms(answers, programs), _of_answer(answers, ANY, "", programs)]
    for table in TABLES:
        _add_parts([result for result in results if result[0]["table"] == table], programs)
    return [line for line, _ in results]


def _of_arms(answers: Answers, programs: Numbers) -> Iterator[Result]:
    cell, one_layout = answers.cell, answers.one_layout()
    shared = one_layout.choice
    for arm in answers.arms.values():
        if not runs(arm, cell.at[-1]):
            for table in TABLES:
                yield {**_head(answers, table, arm.name), "status": NOT_RUN}, None
            continue
        method = answers.methods[arm.name]
        one = tried(cell.job(shared), method, programs) if shared else None
        result = _result(one, method.text)
        if one and (arm.name, one_layout.name) == (answers.spec.baseline, method.text):
            _check_step(_head(answers, SAME, arm.name), one_layout, one)
        yield {**_head(answers, SAME, arm.name), **result}, one
        if arm.name in answers.searched:
            yield _of_answer(answers, BEST, arm.name, programs)
        else:
            yield {**_head(answers, BEST, arm.name), **result}, one


def _head(answers: Answers, table: str, name: str) -> Line:
    """The columns that say which cell and arm a line is of."""
    where = dict(zip(CELL, answers.cell.at, strict=True))
    gpus = answers.cell.asked.spec.gpus
    head = {"table": table, **where, "gpus": gpus, "arm": name}
    if name not in answers.arms:
        return head
    return {**head, "of": answers.arms[name].of, "method": answers.methods[name].name}


def _of_answer(answers: Answers, table: str, name: str, programs: Numbers) -> Result:
    """The line of a searched answer, whose plan is simulated again."""
    answer = answers.best(name) if table == BEST else answers.any_plan()
    head = _head(answers, table, name) | answer.proof
    if answer.choice is None:
        status = "oom" if answer.short else "failed" if answer.gap is None else "unsupported"
        return {**head, "status": status, "reason": answer.reason}, None
    method = answers.registry.resolve(answer.name)
    found = tried(answers.cell.job(answer.choice), method, programs)
    _check_step(head, answer, found)
    return {**head, "method": method.name, **_result(found, answer.name)}, found


def _check_step(head: Line, answer: Answer, found: ArmTried) -> None:
    step_s = found.evaluation.step_s if found.evaluation else 0.0
    if abs(step_s - answer.step_s) > ROUNDING * answer.step_s:
        where = " ".join(str(head[key]) for key in (*CELL, "arm"))
        now = f"takes {step_s:.6g} s now" if step_s else f"is {found.status} now"
        raise CommandError(
            f"matrix: {where}: {answer.name} {now}, not {answer.step_s:.6g} s: "
            "costs have changed, search again (./bench reproduce --full)"
        )


def _result(found: ArmTried | None, name: str) -> Line:
    """The columns of a plan at a layout (None: no layout is known for the arm)."""
    if found is None:
        return {"status": "oom", "reason": "the cell has no layout that any arm fits"}
    problem, plan, weight = found.job.problem, found.plan, found.weight
    lay = problem.layout
    line: Line = {"status": found.status, "reason": found.reason, "name": name}
    line |= {key: getattr(lay, key) for key in LAYOUT}
    line |= {"micro_batches": lay.num_micro_batches, "global_batch": lay.global_batch}
    line |= {"partition": found.job.facts()["partition"], "run_with": found.job.run_with(name)}
    if plan is None or weight is None:
        return line
    line |= {
        "alpha": plan.fit.get("alpha"),
        "peak_device_bytes": weight.peak_bytes,
        "reserved_bytes": weight.reserved_bytes,
        "usable_bytes": problem.usable_bytes,
        "headroom_bytes": problem.usable_bytes - weight.reserved_bytes,
        "host_node_bytes": weight.host_node_bytes,
        "host_headroom_bytes": problem.cost.host_room_bytes - weight.host_node_bytes,
    }
    line |= {f"{where}_short_bytes": short for where, short in weight.missing(problem).items()}
    evaluation = found.evaluation
    if evaluation is None:
        return line
    busy, _ = busiest(evaluation.simulation)
    return line | {
        "step_s": evaluation.step_s,
        "tokens_per_s_per_gpu": evaluation.tokens_per_s_per_gpu,
        "mfu_causal": evaluation.mfu_causal,
        "mfu_dense": evaluation.mfu_dense,
        "hfu": evaluation.hfu,
        "recompute_flop": evaluation.recompute_flop,
        "offload_bytes": evaluation.offload_bytes,
        "idle_share": 1.0 - busy / evaluation.step_s,
    }


def _add_parts(results: Sequence[Result], programs: Numbers) -> None:
    """Add the parts of the step, as shares, to the line of the fastest fitting arm."""
    fitting = [(line, found) for line, found in results if found and found.evaluation]
    if not fitting:
        return
    line, found = max(fitting, key=lambda result: result[1].speed)
    assert found.plan is not None
    parts = programs.parts(found.job.problem, found.plan)
    line |= {f"part_{name}": seconds / line["step_s"] for name, seconds in parts.items()}
