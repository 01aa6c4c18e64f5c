"""The declarations of config/claims.yaml: how each claim is computed, and its tolerance.

Nothing here holds a result.  Published values are read from results/published/claims.csv; ours come
from answers of studies (rematbench.studies.answers).
"""

import re
from math import fsum
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.spec.configfile import ConfigError, convert, read_mapping
from rematbench.spec.paths import data_dir
from rematbench.studies.answers import Answer
from rematbench.studies.study import Ask

LABEL = "config/claims.yaml"
Form = Literal["value", "ratio", "less_pct", "more_pct"]
Reduce = Literal["only", "max", "min", "mean"]
Basis = Literal["fitted", "in-sample", "held-out", "untested"]


Declared = Literal["before", "after"]


class Tolerance(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Largest relative error that counts as agreement, why, and whether it was written down before
    our value was known."""

    value: float
    reason: str
    declared: Declared


class Query(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number from the answers of a study.

    `of`: workloads, each with the best of its layouts and of `methods`; `to`, `to_methods`: what
    they are compared with (the same, or one for each).  `value` is the metric, `ratio` of / to,
    `less_pct` and `more_pct` what of lies below and above to, in percent.  `reduce` says what is
    made of several workloads, `same_layout` that of and to share a layout (each one counts) instead
    of having their own best; `scale` is a unit conversion.
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
    """One number of a claim: the `number`-th of its published text (from 0), divided by its
    `over`-th if that is given, and ours.

    `beside`: words of the row's conditions, whose first number it is instead (what the row says
    beside its headline).  `also`: asked in another way than the claim's words, never counted.
    `declared`: after, where the question was put, or changed, when our value was known.
    """

    query: Query
    number: int = 0
    over: int | None = None
    beside: str = ""
    also: bool = False
    declared: Literal["", "after"] = ""
    name: str = ""
    remark: str = ""


class Claim(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one row of claims.csv is compared, or why it is not.

    `because` says what in the model the source shaped, where the basis is not held-out.
    """

    id: str
    parts: tuple[Part, ...] = ()
    tolerance: str = ""
    basis: Basis = "held-out"
    because: str = ""
    not_comparable: str = ""
    remark: str = ""


class Claims(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything config/claims.yaml says."""

    tolerances: dict[str, Tolerance]
    claims: tuple[Claim, ...]


def load_claims() -> Claims:
    """The committed declarations; a contradiction is an error with the claim's name."""
    path = data_dir("config") / "claims.yaml"
    found = convert(read_mapping(path, LABEL), Claims, LABEL)
    seen: set[str] = set()
    for claim in found.claims:
        problem = _problem(claim, found, seen)
        if problem:
            raise ConfigError(LABEL, claim.id, problem)
        seen.add(claim.id)
    return found


def _problem(claim: Claim, claims: Claims, seen: set[str]) -> str:
    if claim.id in seen:
        return "is given twice"
    if bool(claim.parts) == bool(claim.not_comparable):
        return "needs either parts or not_comparable"
    if claim.parts and claim.tolerance not in claims.tolerances:
        return f"unknown tolerance {claim.tolerance!r} (known: {', '.join(claims.tolerances)})"
    if claim.parts and claim.basis == "untested":
        return "what is compared is not untested"
    if claim.basis in ("fitted", "in-sample") and not claim.because:
        return f"basis {claim.basis} needs `because`"
    queries = (p for part in claim.parts if (p := _query_problem(part.query)))
    return _primary_problem(claim) or next(queries, "")


def _primary_problem(claim: Claim) -> str:
    asked = [part.beside or part.number for part in claim.parts if not part.also]
    if len(set(asked)) == len(asked) and (0 in asked or not claim.parts):
        return ""
    return "has one primary question for each number; others say `also: true`"


def _query_problem(query: Query) -> str:
    if query.form != "value" and not (query.to_methods or query.to):
        return f"form {query.form} needs `to` or `to_methods`"
    if query.to and len(query.to) not in (1, len(query.of)):
        return f"`to` has {len(query.to)} workloads for {len(query.of)}"
    if query.reduce == "only" and (len(query.of) > 1 or query.same_layout):
        return "several workloads or layouts need `reduce`"
    return ""


class Published(Struct, frozen=True):
    """A published value as printed: its numbers, and whether it is a bound (`<`, `>`)."""

    text: str
    numbers: tuple[float, ...]
    bound: Literal["", "<", ">"]

    @property
    def prefix(self) -> str:
        """The word before every number: a bound, or `up to`."""
        return "up to" if self.text.strip().startswith("up to") else self.bound

    def told(self, part: Part, conditions: str = "") -> float | None:
        """The number that a part is about; None if the row has no such number."""
        if part.beside:
            numbers = published(part.beside).numbers
            return numbers[0] if numbers and part.beside in conditions else None
        if max(part.number, part.over or 0) >= len(self.numbers):
            return None
        below = 1.0 if part.over is None else self.numbers[part.over]
        return self.numbers[part.number] / below


def published(text: str) -> Published:
    """Read `1048576 / 655360`, `up to 1.37`, `1.02 to 1.53`, `> 90`.  The highest value of an `up
    to` is a number as any other: it is compared with our highest."""
    numbers = tuple(float(word) for word in re.findall(r"\d+(?:\.\d+)?", text))
    first = text.strip()[:1]
    return Published(text, numbers, "<" if first == "<" else ">" if first == ">" else "")


class Ours(Struct, frozen=True, kw_only=True):
    """Our number, the answers behind it, how many of the workloads (or layouts) counted, and what
    is wrong with it (empty: nothing)."""

    value: float | None
    answers: tuple[Answer, ...] = ()
    counted: int = 0
    asked: int = 0
    problem: str = ""


def evaluate_query(query: Query, answers: list[Answer]) -> Ours:
    """Our number for a query; a plan that does not fit gives its number with the problem named,
    unless other workloads are left to reduce over."""
    own = [a for a in answers if a.study == query.study and a.ask == query.ask]
    found = _pairs(query, own)
    if query.may_not_fit:
        found = [replace(pair, problem="") if pair.value is not None else pair for pair in found]
    fitting = [pair for pair in found if not pair.problem and pair.value is not None]
    counted = fitting or [pair for pair in found if pair.value is not None]
    if not counted:
        problem = found[0].problem if found else "no such answer: run the study"
        return Ours(value=None, asked=len(found), problem=problem)
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
        asked=len(found),
        problem="" if fitting else counted[0].problem,
    )


def _pairs(query: Query, own: list[Answer]) -> list[Ours]:
    """One number per workload (per layout of it, if the layout is to be the same)."""
    found = []
    for index, workload in enumerate(query.of):
        other = query.to[min(index, len(query.to) - 1)] if query.to else workload
        layouts: list[str | None] = [None]
        if query.same_layout:
            layouts = list(dict.fromkeys(a.layout for a in own if a.workload == workload))
        for layout in layouts:
            if query.only_if_short and _fits(own, workload, query.only_if_short, layout):
                continue
            one = _best(own, workload, query.methods, layout, query.metric)
            if query.form == "value":
                found.append(_single(one, query.metric))
                continue
            against = _best(own, other, query.to_methods or query.methods, layout, query.metric)
            found.append(_compared(query, one, against))
    return found


def _best(
    own: list[Answer], workload: str, methods: tuple[str, ...], layout: str | None, metric: str
) -> Answer | None:
    """The best fitting answer; the best that has a number where none fits."""
    named = [
        a
        for a in own
        if a.workload == workload and a.method in methods and layout in (None, a.layout)
    ]
    known = [a for a in named if metric in a.values]
    best = [a for a in known if a.status == "ok"] or known or named
    return max(best, key=lambda a: a.merit) if best else None


def _fits(own: list[Answer], workload: str, method: str, layout: str | None) -> bool:
    """Whether a method fits at a layout (at any, if none is named)."""
    best = _best(own, workload, (method,), layout, "step_s")
    return best is not None and best.status == "ok"


def _single(answer: Answer | None, metric: str) -> Ours:
    if answer is None:
        return Ours(value=None, problem="no such answer: run the study")
    value = answer.values.get(metric)
    number = float(value) if isinstance(value, int | float) else None
    problem = "" if answer.status == "ok" else f"{answer.method} {answer.status}: {answer.reason}"
    if number is None and not problem:
        problem = f"the answer has no number {metric!r}"
    return Ours(value=number, answers=(answer,), problem=problem)


def _compared(query: Query, one: Answer | None, other: Answer | None) -> Ours:
    left, right = _single(one, query.metric), _single(other, query.metric)
    answers = (*left.answers, *right.answers)
    problem = left.problem or right.problem
    if left.value is None or right.value is None:
        return Ours(value=None, answers=answers, problem=problem)
    if right.value == 0:
        return Ours(value=None, answers=answers, problem=problem or "nothing to divide by (0)")
    ratio = left.value / right.value
    forms = {"ratio": ratio, "less_pct": 100 * (1 - ratio), "more_pct": 100 * (ratio - 1)}
    return Ours(value=forms[query.form], answers=answers, problem=problem)
