"""Answers to a study's questions: one answer (or reason) per workload, layout and method."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rematbench.evaluate.evaluation import fullest_rank
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import Result, Status, evaluate_method
from rematbench.host.console import CommandError
from rematbench.inputs.configfile import ConfigError, read_text
from rematbench.inputs.job import Job
from rematbench.inputs.layout import LayoutError
from rematbench.paper.studies.longest import longest_sequence
from rematbench.paper.studies.measures import (
    attention_share,
    estimated_bytes,
    hidden_from,
    part_peak_bytes,
    plan_waste,
    saved_layer_bytes,
)
from rematbench.paper.studies.study import (
    Ask,
    Contender,
    Question,
    Study,
    StudyWorkload,
    layout_label,
)
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition, Registry, Value
from rematbench.problem import Problem
from rematbench.solve.search import first_true
from rematbench.worlds.records.suite import NamedProblem

SPEEDS = ("step_s", "tokens_per_s_per_gpu", "mfu_causal", "mfu_dense")
BYTES = ("reserved_bytes", "headroom_bytes", "host_node_bytes", "recompute_flop")
Number = int | float | str
Values = dict[str, Number]


class StudyAnswer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One cell of a study: numbers by name, or the reason why numbers are missing. Numbers are in
    SI units; `mfu_*` and `*_share` are fractions. `command` prints the same figures."""

    study: str
    ask: Ask
    workload: str
    method: str
    layout: str = ""
    model: str = ""
    cluster: str = ""
    status: Status = "ok"
    reason: str = ""
    values: Values = {}
    command: str = ""

    @property
    def merit(self) -> float:
        """The number by which the best layout is chosen: sequence length, speed, or 0."""
        for key in ("seq_len", "tokens_per_s_per_gpu"):
            if key in self.values and self.ask in ("run", "longest"):
                return float(self.values[key])
        return 0.0


def ask_study(study: Study, registry: Registry, path: str) -> list[StudyAnswer]:
    """All answers of a study, in the order of its questions; `path`: the file of the answers."""
    return [
        answer
        for question in study.questions
        for workload in study.of(question)
        for answer in _ask(study.name, question, workload, registry, path)
    ]


def _ask(
    study: str, question: Question, workload: StudyWorkload, registry: Registry, path: str
) -> Iterator[StudyAnswer]:
    for spec in workload.at_layouts():
        problem = cache(partial(make_problem, spec))  # methods often evaluate the same plans
        for contender in question.methods:
            blank = StudyAnswer(
                study=study,
                ask=question.ask,
                workload=workload.name,
                method=contender.label,
                layout=layout_label(spec),
                model=workload.model,
                cluster=workload.cluster,
                command=_command(path, question.ask, spec, contender),
            )
            yield _answer(blank, question, spec, problem, contender, registry)


def _command(path: str, ask: Ask, spec: NamedProblem, contender: Contender) -> str:
    """The command that prints or makes the answer; `path`: the file of all answers."""
    if ask == "run" and not contender.fewest:
        return shlex.join(["rematbench", "simulate", *contender.to_arguments(spec)])
    return f"rematbench make {path}"


def _answer(
    blank: StudyAnswer,
    question: Question,
    spec: Job,
    problem: Callable[[], Problem],
    contender: Contender,
    registry: Registry,
) -> StudyAnswer:
    """The answer of one cell: `blank` with numbers, or with a status and a reason. `problem` makes
    the problem of `spec`, or raises LayoutError."""
    settings: dict[str, Value] = dict(contender.settings)
    try:
        if question.ask in ("longest", "hidden_from"):
            method = registry.resolve(contender.method, settings)
            return _over_lengths(blank, question, spec, method)
        return _at_length(blank, problem(), question.ask, contender, registry)
    except (PlanError, LayoutError) as error:
        return replace(blank, status="failed", reason=str(error))


def _at_length(
    blank: StudyAnswer, problem: Problem, ask: Ask, contender: Contender, registry: Registry
) -> StudyAnswer:
    """The answer to a question at the workload's sequence length."""
    if contender.fewest:
        return _fewest(blank, problem, contender, registry)
    settings: dict[str, Value] = dict(contender.settings)
    method = registry.resolve(contender.method, settings)
    if ask == "run":
        return of_result(blank, evaluate_method(problem, method))
    plan = method.plan(problem)
    if isinstance(plan, Unsupported):
        return replace(blank, status="unsupported", reason=plan.reason)
    return replace(blank, values=MEASURES[ask](problem, plan))


MEASURES: dict[Ask, Callable[[Problem, Plan], Values]] = {
    "attention_share": attention_share,
    "saved": saved_layer_bytes,
    "parts": part_peak_bytes,
    "fragmentation": plan_waste,
    "estimate": estimated_bytes,
}


def of_result(blank: StudyAnswer, result: Result) -> StudyAnswer:
    """A simulated run as an answer. The numbers of a plan that does not fit are those on a larger
    device."""
    evaluation, plan = result.evaluation, result.plan
    if evaluation is None or plan is None:
        return replace(blank, status=result.status, reason=result.reason)
    row, rank = result.quick_row(), evaluation.ranks[fullest_rank(evaluation.ranks)]
    speeds = () if evaluation.not_timed else SPEEDS
    values: Values = {
        **{name: row[name] for name in speeds},
        "peak_device_bytes": row["peak_device_bytes"],
        **{f"{kind}_bytes": getattr(rank, kind) for kind in ("parameter", "gradient", "optimizer")},
        **{name: row[name] for name in BYTES},
        **{f"plan.{key}": value for key, value in plan.fit.items()},
    }
    return replace(blank, status=result.status, reason=result.reason, values=values)


def _fewest(
    blank: StudyAnswer, problem: Problem, contender: Contender, registry: Registry
) -> StudyAnswer:
    """The run at the smallest value of the setting `fewest` that fits, else at the largest value.
    Bisection finds the value, because a larger value frees more bytes."""
    lay, layers = problem.layout, problem.workload.model.num_layers
    tried: dict[int, Result] = {}

    def fits(count: int) -> bool:
        settings = {**contender.settings, contender.fewest: count}
        tried[count] = evaluate_method(problem, registry.resolve(contender.method, settings))
        return tried[count].status == "ok"

    most = -(-layers // lay.num_chunks)
    fewest = first_true(fits, 0, most) if fits(most) else most
    answer = of_result(blank, tried[fewest])
    return replace(answer, values={**answer.values, contender.fewest: fewest})


def _over_lengths(
    blank: StudyAnswer, question: Question, spec: Job, method: Composition
) -> StudyAnswer:
    """The answer to a question for a sequence length, in tokens."""
    steps = {"granularity": question.granularity, "limit": question.limit}

    def problem(seq_len: int) -> Problem:
        return make_problem(spec.changed(seq_len=seq_len))

    if question.ask == "longest":
        found = longest_sequence(problem, method, **steps)
        values: Values = {"seq_len": found.seq_len, "peak_device_bytes": found.peak_device_bytes}
        beyond = f"; a length below {found.never_from} may fit" * (
            found.never_from > found.fails_at
        )
        return replace(blank, values=values, reason=found.binds + beyond)
    if shortest := hidden_from(problem, method, **steps):
        return replace(blank, values={"seq_len": shortest})
    return replace(blank, status="failed", reason="never hidden up to the limit of the search")


def dump(answers: list[StudyAnswer]) -> bytes:
    """One JSON document with a line per answer, so that versions can be compared line by line."""
    lines = [msgspec.json.encode(answer, order="sorted") for answer in answers]
    return b"[\n" + b",\n".join(lines) + b"\n]\n"


def load_answers(paths: Iterable[Path]) -> list[StudyAnswer]:
    """The answers that `dump` wrote to files; CommandError for a file that cannot be read."""
    found = []
    for path in paths:
        try:
            found += msgspec.json.decode(read_text(path, str(path)), type=list[StudyAnswer])
        except (ConfigError, msgspec.DecodeError) as error:
            raise CommandError(f"{path}: cannot be read ({error})") from error
    return found
