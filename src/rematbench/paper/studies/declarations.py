"""The declarations of config/claims.yaml: how each claim is computed, and its tolerance.

This file contains no results. Published values are read from results/published/claims.csv; our
values come from answers of studies (rematbench.paper.studies.answers).
"""

import re
from math import fsum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.inputs.configfile import ConfigError, convert, read_mapping
from rematbench.inputs.paths import data_dir
from rematbench.paper.studies.answers import StudyAnswer
from rematbench.paper.studies.study import Ask

LABEL = "config/claims.yaml"
Form = Literal["value", "ratio", "less_pct", "more_pct"]
Reduce = Literal["only", "max", "min", "mean"]
Basis = Literal["fitted", "in-sample", "own configuration", "held-out"]
"""`own configuration`: the source does not say what ran, so a part of it is our choice."""


Declared = Literal["before", "after"]


class Tolerance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest relative error that counts as agreement, with the reason for that limit.
    `declared`: whether the limit was written down before or after our value was computed."""

    value: float
    reason: str
    declared: Declared


class Query(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number that is computed from the answers of a study.

    `of`: workloads, each with its best layout and the best of `methods`. `to` and `to_methods`: the
    workloads and methods to compare with. `to` is empty (the same workloads), one workload for all,
    or one for each. `form`: `value` is the metric itself, `ratio` is `of` / `to`, `less_pct` and
    `more_pct` are the percent by which `of` lies below or above `to`. `reduce` says how the numbers
    of several workloads become one number. With `same_layout`, `of` and `to` share a layout and
    each layout counts; otherwise `of` and `to` have their best layouts. `scale` is a unit
    conversion.
    """

    study: str
    ask: Ask = "run"
    of: tuple[str, ...]
    methods: tuple[str, ...]
    metric: str
    to: tuple[str, ...] = ()
    to_methods: tuple[str, ...] = ()
    form: Form = "value"
    reduce: Reduce = "only"
    same_layout: bool = False
    only_if_short: str = ""
    may_not_fit: bool = False
    scale: float = 1.0


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number of a claim: the `number`-th number of the published text, from 0, and our
    number.

    `over`: the published number is divided by the number at this index. `beside`: words of the
    row's conditions; the published number is then the first number in these words, which come after
    the headline. `also`: a question that the claim does not ask; it never counts. `declared`:
    `after` if the question was written or changed after our value was computed.
    """

    query: Query
    number: int = 0
    over: int | None = None
    beside: str = ""
    also: bool = False
    declared: Literal["", "after"] = ""
    name: str = ""
    remark: str = ""


class Unscored(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers after a row's headline that are not scored, quoted in `words`, and the reason."""

    words: str
    reason: str


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one row of claims.csv is compared, or why it is not compared. If the basis is not
    held-out, `because` names the part of the model that the source influenced, or the part of the
    configuration that is ours. `unscored`: numbers after the headline that are not compared."""

    id: str
    parts: tuple[Part, ...] = ()
    tolerance: str = ""
    basis: Basis = "held-out"
    because: str = ""
    not_comparable: str = ""
    remark: str = ""
    unscored: tuple[Unscored, ...] = ()


class Claims(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/claims.yaml."""

    tolerances: dict[str, Tolerance]
    claims: tuple[Claim, ...]


def load_claims() -> Claims:
    """The committed declarations; ConfigError with the claim's name for a contradiction."""
    path = data_dir("config") / "claims.yaml"
    found = convert(read_mapping(path, LABEL), Claims, LABEL)
    seen: set[str] = set()
    for claim in found.claims:
        if problem := _problem(claim, found, seen):
            raise ConfigError(LABEL, claim.id, problem)
        seen.add(claim.id)
    return found


def _problem(claim: Claim, claims: Claims, seen: set[str]) -> str:
    if claim.id in seen:
        return "is declared twice"
    if bool(claim.parts) == bool(claim.not_comparable):
        return "needs either parts or not_comparable"
    if claim.parts and claim.tolerance not in claims.tolerances:
        return f"unknown tolerance {claim.tolerance!r} (known: {', '.join(claims.tolerances)})"
    if claim.basis != "held-out" and not claim.because:
        return f"basis {claim.basis} needs `because`"
    queries = (p for part in claim.parts if (p := _query_problem(part.query)))
    return _primary_problem(claim) or next(queries, "")


def _primary_problem(claim: Claim) -> str:
    asked = [part.beside or part.number for part in claim.parts if not part.also]
    if len(set(asked)) == len(asked) and (0 in asked or not claim.parts):
        return ""
    return "needs one primary question for each number; further questions need `also: true`"


def _query_problem(query: Query) -> str:
    if query.form != "value" and not (query.to_methods or query.to):
        return f"form {query.form} needs `to` or `to_methods`"
    if query.to and len(query.to) not in (1, len(query.of)):
        return f"`to` has {len(query.to)} workloads, but `of` has {len(query.of)}"
    if query.reduce == "only" and (len(query.of) > 1 or query.same_layout):
        return "several workloads or layouts need `reduce`"
    return ""


class Published(Struct, frozen=True):
    """A published value as printed: its text, its numbers, and whether it is a bound (`<`, `>`)."""

    text: str
    numbers: tuple[float, ...]
    bound: Literal["", "<", ">"]

    @property
    def prefix(self) -> str:
        """The text before every number of the claim: `up to`, or the sign of a bound."""
        return "up to" if self.text.strip().startswith("up to") else self.bound

    def part_number(self, part: Part, conditions: str = "") -> float | None:
        """The published number that a part asks about; None if the row has no such number."""
        if part.beside:
            numbers = published(part.beside).numbers
            return numbers[0] if numbers and part.beside in conditions else None
        if max(part.number, part.over or 0) >= len(self.numbers):
            return None
        below = 1.0 if part.over is None else self.numbers[part.over]
        return self.numbers[part.number] / below


def published(text: str) -> Published:
    """The published value of a text such as `1048576 / 655360`, `up to 1.37`, `1.02 to 1.53`, `>
    90`. The number after `up to` is not a bound: it is compared with our highest number."""
    numbers = tuple(float(word) for word in re.findall(r"\d+(?:\.\d+)?", text))
    first = text.strip()[:1]
    return Published(text, numbers, "<" if first == "<" else ">" if first == ">" else "")


class Ours(Struct, frozen=True, kw_only=True):
    """Our number for a query, and the answers behind it. `counted` of the `total` workloads (or
    layouts) entered the number; `problem` describes an error (empty: none)."""

    value: float | None
    answers: tuple[StudyAnswer, ...] = ()
    counted: int = 0
    total: int = 0
    problem: str = ""


def evaluate_query(query: Query, answers: list[StudyAnswer]) -> Ours:
    """Our number for a query. Plans that do not fit count only if no plan fits; the number then
    names that problem."""
    selected = [a for a in answers if a.study == query.study and a.ask == query.ask]
    found = _pairs(query, selected)
    if query.may_not_fit:
        found = [replace(pair, problem="") if pair.value is not None else pair for pair in found]
    fitting = [pair for pair in found if not pair.problem and pair.value is not None]
    counted = fitting or [pair for pair in found if pair.value is not None]
    if not counted:
        problem = found[0].problem if found else "the study has no such answer yet: run it"
        return Ours(value=None, total=len(found), problem=problem)
    values = [pair.value for pair in counted if pair.value is not None]
    made = {
        "only": values[0],
        "max": max(values),
        "min": min(values),
        "mean": fsum(values) / len(values),
    }
    chosen = [p for p in counted if query.reduce == "mean" or p.value == made[query.reduce]]
    return Ours(
        value=made[query.reduce] * query.scale,
        answers=tuple(a for pair in chosen for a in pair.answers),
        counted=len(fitting),
        total=len(found),
        problem="" if fitting else counted[0].problem,
    )


def _pairs(query: Query, answers: list[StudyAnswer]) -> list[Ours]:
    """One number per workload; with `same_layout`, one per workload and layout."""
    found = []
    for index, workload in enumerate(query.of):
        other = query.to[min(index, len(query.to) - 1)] if query.to else workload
        layouts: list[str | None] = [None]
        if query.same_layout:
            layouts = list(dict.fromkeys(a.layout for a in answers if a.workload == workload))
        for layout in layouts:
            if query.only_if_short and _fits(answers, workload, query.only_if_short, layout):
                continue
            one = _best(answers, workload, query.methods, layout, query.metric)
            if query.form == "value":
                found.append(_single(one, query.metric))
                continue
            against = _best(answers, other, query.to_methods or query.methods, layout, query.metric)
            found.append(_compared(query, one, against))
    return found


def _best(
    answers: list[StudyAnswer],
    workload: str,
    methods: tuple[str, ...],
    layout: str | None,
    metric: str,
) -> StudyAnswer | None:
    """The best answer whose plan fits; if none fits, the best answer that has the metric."""
    named = [
        a
        for a in answers
        if a.workload == workload and a.method in methods and layout in (None, a.layout)
    ]
    known = [a for a in named if metric in a.values]
    best = [a for a in known if a.status == "ok"] or known or named
    return max(best, key=lambda a: a.merit) if best else None


def _fits(answers: list[StudyAnswer], workload: str, method: str, layout: str | None) -> bool:
    """Whether a method fits a workload at a layout (at any layout, if `layout` is None)."""
    best = _best(answers, workload, (method,), layout, "step_s")
    return best is not None and best.status == "ok"


def _single(answer: StudyAnswer | None, metric: str) -> Ours:
    if answer is None:
        return Ours(value=None, problem="the study has no such answer yet: run it")
    value = answer.values.get(metric)
    number = float(value) if isinstance(value, int | float) else None
    problem = "" if answer.status == "ok" else f"{answer.method} {answer.status}: {answer.reason}"
    if number is None and not problem:
        problem = f"the answer has no number {metric!r}"
    return Ours(value=number, answers=(answer,), problem=problem)


def _compared(query: Query, numerator: StudyAnswer | None, denominator: StudyAnswer | None) -> Ours:
    left, right = _single(numerator, query.metric), _single(denominator, query.metric)
    answers = (*left.answers, *right.answers)
    problem = left.problem or right.problem
    if left.value is None or right.value is None:
        return Ours(value=None, answers=answers, problem=problem)
    if right.value == 0:
        return Ours(value=None, answers=answers, problem=problem or "the divisor is 0")
    ratio = left.value / right.value
    forms = {"ratio": ratio, "less_pct": 100 * (1 - ratio), "more_pct": 100 * (ratio - 1)}
    return Ours(value=forms[query.form], answers=answers, problem=problem)
