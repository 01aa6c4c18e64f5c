"""How well predictions like one are validated: published cells found by declared rules.

The strictest rule with a cell that no constant was fitted to decides; its error is what the
accuracy targets accept for the groups of those cells, or, given predictions of the published
cells, their own mean error.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from typing import Any, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import asdict, replace

from rematbench.choose.outcome import Variant, system_variant
from rematbench.cost.constants import Calibration
from rematbench.plugins.registry import IDENTITY, Registry
from rematbench.problem import Problem
from rematbench.published.accuracy import (
    Accuracy,
    Group,
    Row,
    Split,
    load_accuracy,
    members,
    number,
    ratio_error,
    split_of,
)
from rematbench.published.sheets import PUBLISHED, bundle_of
from rematbench.spec.cluster import Cluster
from rematbench.spec.configfile import ConfigError
from rematbench.spec.load import calibration, load_cluster, load_system, names
from rematbench.spec.system import System

Made = TypeVar("Made", Cluster, System)

SPEED = "tokens_per_s_per_gpu"

RULES = (
    "method, stack, cluster and context",
    "method, stack and cluster",
    "method and GPU generation",
    "stack and GPU generation, any method",
    "GPU generation only",
)
"""What a published cell must share with a prediction, strictest rule first, from number 1."""

PREDICTED: tuple[Split, ...] = ("held-out", "in-sample")
"""Cells whose errors are errors of predictions, the better kind first."""


class Known(Struct, frozen=True, kw_only=True):
    """A published cell with a speed: what it ran on, how much of it the model has seen, and the
    error of its prediction (None without one)."""

    family: str
    system: str
    cluster: str
    generation: str
    seq_len: int
    gpus: int
    split: Split
    group: str
    accepted: float | None
    error: float | None


class Evidence(Struct, frozen=True, kw_only=True):
    """The evidence for a prediction.  `rule` counts from 1 (0: no cell at all); `error` is
    a fraction; `groups` are the accuracy groups of the cells."""

    grade: Split | None
    rule: int = 0
    cells: int = 0
    error: float | None = None
    groups: tuple[str, ...] = ()


def published_cells(rows: Sequence[Row], registry: Registry) -> list[Known]:
    """What is known of a sheet's published cells (rows that are ours left out)."""
    published = [row for row in rows if row.get("cell", PUBLISHED) == PUBLISHED]
    return known_cells(published, load_accuracy(), calibration(), registry)


def known_cells(
    rows: Sequence[Row], accuracy: Accuracy, calibration: Calibration, registry: Registry
) -> list[Known]:
    """Published cells with a speed, by the groups of the accuracy targets (each cell once)."""
    found: dict[int, Known] = {}
    for group in accuracy.groups:
        if group.metric != SPEED:
            continue
        for row in members(group, rows):
            if number(row, SPEED) is None:
                continue
            cell = _known(row, group, calibration, registry)
            if cell is not None:
                found.setdefault(id(row), cell)
    return list(found.values())


def family_of(method: str) -> str:
    """A method or bundle without the part that changes nothing."""
    return method.removeprefix(f"{IDENTITY}+")


def _known(row: Row, group: Group, calibration: Calibration, registry: Registry) -> Known | None:
    try:
        cluster = load_cluster(str(row["cluster"]))
        system = _system_name(str(row["system"]))
    except ConfigError:
        return None  # a cell that cannot be predicted says nothing about predictions
    family = bundle_of(row, registry)
    promise = group.promises.get("mean") or group.promises.get("max")
    return Known(
        family=family_of(family),
        system=system,
        cluster=cluster.name,
        generation=cluster.generation,
        seq_len=int(number(row, "seq_len") or 0),
        gpus=int(number(row, "gpus") or 0),
        split=split_of(row, group, calibration),
        group=group.name,
        accepted=promise.accepted if promise else None,
        error=ratio_error(row, SPEED),
    )


@cache
def _system_name(name: str) -> str:
    return load_system(name).name


NO_SPEED = frozenset(
    ("name", "version", "gpu", "sources", "constants", "hbm_bytes", "host_bytes", "non_torch_bytes")
)
"""Fields of a cluster or stack that change no step's seconds (constants are compared apart)."""


def published_cluster(problem: Problem) -> str:
    """The shipped cluster whose facts of speed and constants these are, whatever the name; "" where
    there is none."""
    mine, entry = problem.cluster, problem.calibration.network_entry
    return _twin(mine, (load_cluster(n) for n in names("cluster")), lambda c: entry(c.constants))


def published_stack(problem: Problem) -> str:
    """The shipped stack whose facts of speed and constants these are, with any of its own options
    switched on; "" where there is none."""
    mine, entry = problem.system, problem.calibration.system_entry
    if problem.attention == "flash":
        mine = replace(mine, attention=problem.kernel)
    return _twin(mine, _stacks(), lambda s: entry(s.constants))


@cache
def _stacks() -> tuple[System, ...]:
    """Shipped stacks, each also with its options."""
    plain = [load_system(name) for name in names("system")]
    options: tuple[Variant, ...] = get_args(Variant)
    chosen = [c for size in range(len(options) + 1) for c in combinations(options, size)]
    made = (system_variant(system, c) for system in plain for c in chosen)
    return tuple(system for system in made if isinstance(system, System))


def _twin(mine: Made, shipped: Iterable[Made], entry: Callable[[Made], str]) -> str:
    """Of the shipped ones that are alike, that of the same name, else the first."""
    alike = [
        other.name
        for other in shipped
        if entry(other) == entry(mine) and _speed(other) == _speed(mine)
    ]
    return mine.name if mine.name in alike else next(iter(alike), "")


def _speed(thing: Struct) -> dict[str, Any]:
    return {key: value for key, value in asdict(thing).items() if key not in NO_SPEED}


def evidence(
    problem: Problem, family: str, cells: Sequence[Known], context_factor: float
) -> Evidence:
    """The evidence for a method (composed name, parameters apart) on a problem."""
    fallback = Evidence(grade=None)
    for rule, alike in enumerate(_tests(problem, family, context_factor), start=1):
        matching = [cell for cell in cells if alike(cell)]
        for grade in PREDICTED:
            chosen = [cell for cell in matching if cell.split == grade]
            if chosen:
                return _graded(grade, rule, chosen)
        if matching and fallback.grade is None:
            fallback = _graded("fitted", rule, matching)
    return fallback


def _tests(problem: Problem, family: str, factor: float) -> tuple[Callable[[Known], bool], ...]:
    """One test per rule, in the order of RULES."""
    cluster, system = problem.cluster, published_stack(problem)
    where = published_cluster(problem)
    length = problem.workload.seq_len

    def near(cell: Known) -> bool:
        return length / factor <= cell.seq_len <= length * factor

    def place(cell: Known) -> bool:
        return cell.system == system and cell.cluster == where

    def generation(cell: Known) -> bool:
        return cell.generation == cluster.generation

    return (
        lambda cell: cell.family == family and place(cell) and near(cell),
        lambda cell: cell.family == family and place(cell),
        lambda cell: cell.family == family and generation(cell),
        lambda cell: cell.system == system and generation(cell),
        generation,
    )


def _graded(grade: Split, rule: int, cells: Sequence[Known]) -> Evidence:
    """Mean error of predicted cells; else the largest error accepted of their groups.  A fitted
    cell's error is no evidence."""
    errors = [abs(cell.error) for cell in cells if cell.error is not None]
    accepted = [cell.accepted for cell in cells if cell.accepted is not None]
    error = statistics.fmean(errors) if errors else max(accepted, default=None)
    return Evidence(
        grade=grade,
        rule=rule,
        cells=len(cells),
        error=None if grade == "fitted" else error,
        groups=tuple(dict.fromkeys(cell.group for cell in cells)),
    )
