"""One tiny model on many layouts: a single run of the project's executor is the reference for all.

Layouts differ in degrees only: the same weights from one seed and the same global batch.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import RankBytes, program_bytes
from rematbench.plan import Plan
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.workload import Model, Precision
from rematbench.worlds.packages.process import PackageJob, job, policy, run_jobs
from rematbench.worlds.packages.stack import StackProblem, activation_peak, package_problem
from rematbench.worlds.records.record import Record
from rematbench.worlds.torch.case import Case, Result
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.problems import problem, remade
from tests.tables import tables
from tests.worlds.torch.cases import TINY as TWO_LAYERS
from tests.worlds.torch.cases import TINY_GPT as TWO_LAYERS_GPT

TINY = replace(TWO_LAYERS, num_layers=4)
GPT = replace(TWO_LAYERS_GPT, num_layers=4)
ODD = replace(TINY, name="tiny-odd-vocabulary", vocab=TINY.vocab - 1)
SEQ = 32
STEPS = 2
PATIENCE_S = 240.0
"""For a job of tiny tensors on a busy machine; only one that hangs takes as long."""
LEFT_OUT = 0.035
"""Of a peak, states and all: what of Megatron-core is not replayed moves none of 100 drawn jobs by
more (docs/packages.md)."""
LAYOUTS: dict[str, dict[str, Any]] = tables(__file__)["layouts"]


class Asked(NamedTuple):
    """A job of a baseline in a few words."""

    layout: str = "one"
    settings: Mapping[str, Any] = MappingProxyType({})
    model: Model = TINY
    precision: Precision = "fp32"
    ignored: float = 0.0

    def __str__(self) -> str:
        words = [self.layout, *(f"{k}={v}" for k, v in self.settings.items())]
        words += [self.model.name] * (self.model is not TINY) + [self.precision] * (
            self.precision != "fp32"
        )
        return " ".join(words)


def asked_of(module: str) -> dict[str, list[Asked]]:
    """Tables of jobs in the file beside a test module: in a row what differs from `Asked()`."""
    models = {model.name: model for model in (TINY, GPT, ODD)}
    return {
        name: [Asked(**row | {"model": models[row.get("model", TINY.name)]}) for row in rows]
        for name, rows in tables(module).items()
    }


def asked_problem(asked: Asked, **changes: Any) -> Problem:
    """The problem of a layout: global batch 4, whatever the degrees."""
    made = problem(
        model=asked.model,
        seq_len=SEQ,
        system="deepspeed" if "ulysses" in asked.layout else "rematbench",
        **{"global_batch": 4, **LAYOUTS[asked.layout], **changes},
    )
    return remade(made, workload=replace(made.workload, precision=asked.precision))


def deep(asked: Asked, num_layers: int, **parts: Any) -> Problem:
    """The problem of another depth."""
    model = replace(asked.model, num_layers=num_layers)
    return remade(asked_problem(asked._replace(model=model)), **parts)


def asked_job(baseline: str, asked: Asked, **options: Any) -> PackageJob:
    """The job; every one writes its gradients."""
    method = policy(baseline, asked.settings)
    options = {"gradients": True, "ignored": asked.ignored, "timeout_s": PATIENCE_S, **options}
    return job(asked_problem(asked), method, steps=STEPS, **options)


def printed_settings(flags: str) -> dict[str, Any]:
    """The configuration that `flags` prints: JSON, or the arguments of recomputation and
    offloading, each named after a field of TransformerConfig."""
    if flags.startswith("{"):
        return dict(msgspec.json.decode(flags))
    found: dict[str, Any] = {}
    for name, *words in (argument.split() for argument in flags.split("--") if argument):
        field = name.replace("-", "_")
        names = "recompute_", "fine_grained_", "offload_", "min_offloaded_", "distribute_"
        if field.startswith(names):
            values = [int(word) if word.isdecimal() else word for word in words]
            found[field] = values if field.endswith("modules") else (*values, True)[0]
    return found


class Ran(NamedTuple):
    """A record and the first step's gradients."""

    record: Record
    gradients: dict[str, torch.Tensor]


def run_all(baseline: str, asked: list[Asked], folder: Path) -> list[Ran]:
    """All in one launch of the baseline's process."""
    return run_together(baseline, [asked_job(baseline, item) for item in asked], folder)


def run_together(baseline: str, jobs: Sequence[PackageJob], folder: Path) -> list[Ran]:
    """Jobs in one launch of the baseline's process."""
    found = []
    for number, record in enumerate(run_jobs(baseline, jobs, folder)):
        path = folder / f"{number}.gradients.pt"
        found.append(Ran(record, torch.load(path) if path.exists() else {}))
    return found


Numbers = tuple[Model, Precision, float]
"""What decides losses and gradients: a model, a precision, and the share of ignored labels."""
USUAL: tuple[Numbers, ...] = ((TINY, "fp32", 0.0), (GPT, "fp32", 0.0), (TINY, "fp32", 0.3))


def reference(model: Model, precision: Precision, ignored: float) -> Result:
    """The project's own executor on one process; one launch for all that are usual."""
    asked = (model, precision, ignored)
    return references(USUAL if asked in USUAL else (asked,))[asked]


@cache
def references(asked: tuple[Numbers, ...]) -> dict[Numbers, Result]:
    """All in one launch."""
    cases = []
    for model, precision, ignored in asked:
        made = asked_problem(Asked("one", {}, model, precision))
        case = Case(name="reference", problem=made, plan=made.base_plan, gradients=True)
        cases.append(dataclasses.replace(case, steps=STEPS, ignored=ignored, measure=False))
    results = execute_cases(cases)
    assert [result.status for result in results] == ["ok"] * len(cases), results[0].reason
    return dict(zip(asked, results, strict=True))


def assert_equal(asked: Asked, ran: Ran, tolerance: float, want: Result | None = None) -> None:
    """Losses and whole gradient norms of both steps, and every parameter's first gradient (of rows
    that a padded vocabulary adds: none), against a run of the executor or else the reference."""
    assert ran.record.status == "ok", ran.record.reason
    seen = ran.record.measured
    want = want or reference(asked.model, asked.precision, asked.ignored)
    assert seen.losses == pytest.approx(want.losses, rel=tolerance)
    norms = [sum(v * v for v in step.values()) ** 0.5 for step in want.gradient_norms]
    # Adam's first step is about the gradient's sign: rounding in the first moves the second more.
    assert seen.gradient_norms[0] == pytest.approx(norms[0], rel=tolerance)
    assert seen.gradient_norms[1] == pytest.approx(norms[1], rel=10 * tolerance)
    assert ran.gradients.keys() == want.gradients[0].keys()
    for name, gradient in ran.gradients.items():
        expected = want.gradients[0][name].double()
        # one rounding scale for all: a bias of keys has no gradient but rounding
        limit = 10 * tolerance * max(float(expected.norm()), 1e-2 * norms[0])
        rows = len(expected)
        assert float((gradient[:rows] - expected).norm()) <= limit, name
        assert not gradient[rows:].any(), name


def weighed(method: Composition, problem: Problem, stage: int = 0) -> RankBytes:
    """Bytes of a rank under a baseline's policy as its package holds them."""
    here = package_problem(method, problem)
    assert isinstance(here, StackProblem)
    plan = method.plan(here)
    assert isinstance(plan, Plan)
    program = lower(plan, here)
    held = program_bytes(here, plan, program)[stage]
    peak = activation_peak(method.methods[0], here, program.ranks[stage], held)
    return replace(held, activation_peak=peak)
