"""A cell (one method on one problem, planned), and the cells of a suite."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from rematbench.engine.lowering.lower import lower
from rematbench.inputs.configfile import ConfigError
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Composition, Registry
from rematbench.problem import Problem
from rematbench.worlds.records.plan_replay import spec_problem
from rematbench.worlds.records.record import Record
from rematbench.worlds.records.suite import Suite, Variant, bundles, load_suite


class Cell(msgspec.Struct, frozen=True):
    """One method on one problem, with its plan or the reason why there is none. `name`: the stem of
    the record's file; `base`: the plan that the method starts from (None: the problem's)."""

    name: str
    problem: Problem
    method: Composition
    plan: Plan | Unsupported
    base: Plan | None = None


def cells(suite: Suite, folders: Sequence[Path] = (), only: Sequence[str] = ()) -> list[Cell]:
    """The cells of every problem with every method and variant, in the suite's order. `only`: names
    of the wanted cells, or PROBLEM or PROBLEM.METHOD for all cells that begin so (empty: all)."""
    registry = discover(folders)
    problems = {spec.name: spec.problem() for spec in suite.problems}
    found = []
    for name, at, variant in _asked(suite, registry, only):
        method = registry.resolve(variant.method, dict(variant.settings), problems[at])
        found.append(planned_cell(name, problems[at], method))
    return found


def single_cell(suite: Path, name: str, folders: Sequence[Path] = ()) -> Cell:
    """The cell that `name` selects in a suite; ConfigError unless it selects exactly one."""
    found = cells(load_suite(suite), folders, [name])
    if len(found) != 1:
        raise ConfigError(
            str(suite), name, f"{len(found)} cells match this name; it must match exactly one"
        )
    return found[0]


def cell_names(suite: Suite, only: Sequence[str] = ()) -> list[str]:
    """The names of the cells that `cells` returns, without planning."""
    return [name for name, _, _ in _asked(suite, discover(), only)]


def recorded_cell(name: str, record: Record, registry: Registry, cluster: str = "") -> Cell:
    """The cell of a record, planned again with the constants, the stack and the cluster (or the
    file `cluster`) of the present config/, so that its numbers show the effect of changes there."""
    spec = record.spec
    problem = replace(spec_problem(spec, cluster), reserve_bytes=spec.start.reserve_bytes)
    given = spec.parameters.items()
    words = {f"{part}.{key}": value for part, keys in given for key, value in keys.items()}
    method = registry.resolve(spec.method, words)
    return planned_cell(name, problem, method, spec.start.plan(problem))


def planned_cell(
    name: str, problem: Problem, method: Composition, base: Plan | None = None
) -> Cell:
    """The cell of a method on a problem: with a plan that lowers, or the reason for having none."""
    return Cell(name, problem, method, _plan(problem, method, base), base)


def problem_of(name: str) -> str:
    """The name of the problem in a cell's name."""
    return name.split(".", maxsplit=1)[0]


def _asked(
    suite: Suite, registry: Registry, only: Sequence[str]
) -> Iterator[tuple[str, str, Variant]]:
    for spec in suite.problems:
        for bundle, variants in bundles(suite, registry).items():
            for number, variant in enumerate(variants):
                name = f"{spec.name}.{bundle}.{number}"
                elsewhere = variant.problems and spec.name not in variant.problems
                if not elsewhere and is_selected(name, only):
                    yield name, spec.name, variant


def _plan(problem: Problem, method: Composition, base: Plan | None = None) -> Plan | Unsupported:
    try:
        plan = method.plan(problem, base)
        if isinstance(plan, Plan):
            lower(plan, problem)
    except PlanError as error:
        return Unsupported(str(error))
    return plan


def is_selected(name: str, only: Sequence[str]) -> bool:
    """Whether `only` is empty or has the cell's name, its PROBLEM or its PROBLEM.METHOD."""
    return not only or any(name == word or name.startswith(f"{word}.") for word in only)
