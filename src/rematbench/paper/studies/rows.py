"""Shared code of the studies' tables: published numbers of answers."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from rematbench.paper.studies.answers import StudyAnswer
from rematbench.paper.studies.declarations import Claims, published

PublishedNumbers: TypeAlias = Mapping[tuple[str, str, str, str, str], float]
"""Published numbers in our units, by (study, ask, workload, method, metric)."""


def published_numbers(rows: Iterable[Mapping[str, str]], claims: Claims) -> PublishedNumbers:
    """The numbers of claims.csv about one answer, by the queries of config/claims.yaml."""
    texts = {row["id"]: (published(row["value"]), row["conditions"]) for row in rows}
    found: dict[tuple[str, str, str, str, str], float] = {}
    for claim in claims.claims:
        for part in claim.parts:
            query = part.query
            text, conditions = texts.get(claim.id, (None, ""))
            told = text.part_number(part, conditions) if text else None
            if told is None or query.form != "value" or len(query.of) != 1:
                continue
            for method in query.methods:
                key = (query.study, query.ask, query.of[0], method, query.metric)
                found.setdefault(key, told / query.scale)
    return found


def published_number(numbers: PublishedNumbers, answer: StudyAnswer, metric: str) -> float | None:
    """The published number for one metric of an answer; None if it was not published."""
    return numbers.get((answer.study, answer.ask, answer.workload, answer.method, metric))


def ratio(numerator: float | None, denominator: float | None) -> float | None:
    """The quotient if both numbers exist and are not zero, otherwise None."""
    return numerator / denominator if numerator and denominator else None


def number_of(answer: StudyAnswer | None, metric: str) -> float | None:
    value = answer.values.get(metric) if answer else None
    return float(value) if isinstance(value, int | float) else None
