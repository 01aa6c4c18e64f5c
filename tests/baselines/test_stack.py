"""What a stack keeps beside the operator table is what its trace shows, layer for layer."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from baselines.deepspeed.stack import backward_gradient_bytes
from rematbench.inputs.system import with_facts
from rematbench.problem import AttentionKind, Problem
from rematbench.workload import Model, Precision
from rematbench.worlds.packages.process import job, policy, run_jobs
from rematbench.worlds.packages.stack import layer_tensors, stack_of
from tests.baselines.cases import GPT, SEQ, TINY, Asked, asked_problem, deep, weighed
from tests.baselines.random_jobs import draw
from tests.installed import needs
from tests.tables import tables


class Stacked(NamedTuple):
    """A layout, a model, settings, and the kind of core attention."""

    layout: str
    model: Model
    settings: dict[str, Any]
    attention: AttentionKind = "flash"

    def problem(self, num_layers: int) -> Problem:
        asked = Asked(self.layout, model=self.model, precision="bf16")
        return deep(asked, num_layers, attention=self.attention)


FUSED = {"bias_activation_fusion": True}
LEARNED = replace(TINY, position="learned", max_positions=SEQ)
CASES = [
    Stacked("one", TINY, FUSED),
    Stacked("cp2", TINY, {}),
    Stacked("tp2", GPT, {}, "unfused"),
    Stacked("one", replace(GPT, dropout=0.1), {}, "unfused"),
    Stacked("one", GPT, {}),
]
MORE_STACKED = [
    Stacked("one", TINY, {}),
    Stacked("tp2", TINY, {}),
    Stacked("one", GPT, {}, "unfused"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(CASES, id="few", marks=pytest.mark.full),
        pytest.param(MORE_STACKED, id="more", marks=pytest.mark.soak),
    ],
)
def test_one_more_layer_of_megatron_core_weighs_what_the_stack_says(
    cases: list[Stacked], tmp_path: Path
) -> None:
    """Traced with four and with five layers: the difference is one layer's saved tensors."""
    needs("megatron.core")
    jobs = [
        job(case.problem(count), policy("megatron_core", case.settings), "traced")
        for case in cases
        for count in (4, 5)
    ]
    records = run_jobs("megatron_core", jobs, tmp_path)
    traced, said = [], []
    for number, case in enumerate(cases):
        few, more = (record.measured for record in records[2 * number : 2 * number + 2])
        assert few is not None, records[2 * number].reason
        assert more is not None
        peaks = [one.ranks[0].activation_peak_bytes for one in (few, more)]
        traced.append(peaks[1] - peaks[0])
        problem = case.problem(4)
        method = policy("megatron_core", case.settings).methods[0]
        stack = stack_of("megatron_core", method, problem)
        said.append(stack.problem(problem).layer(0).saved_bytes)
        listed = list(layer_tensors(problem, stack))
        inside = ("in the backward", "in the forward")
        saved = [held for held in listed if not held.why.startswith(inside)]
        assert sum(held.stack_bytes for held in saved) == said[-1]
        assert sum(held.table_bytes for held in listed) == problem.layer(0).saved_bytes
    assert traced == said


LOSS = 4
"""Bytes of a scalar: the count of labels; per micro-batch the loss, its sum, copies, gradients."""


class Whole(NamedTuple):
    """A job, a stage of its pipeline, its core attention, and the bytes of scalars alive at that
    stage's peak; `exact`: no rule moves it that is not replayed (docs/packages.md)."""

    asked: Asked
    scalars: int
    stage: int = 0
    attention: AttentionKind = "flash"
    exact: bool = True

    @property
    def problem(self) -> Problem:
        return dataclasses.replace(asked_problem(self.asked), attention=self.attention)


WIDE = replace(TINY, hidden=128, ffn=384, head_dim=32, vocab=64, num_heads=4)
WIDE_GPT = replace(GPT, hidden=128, ffn=384, head_dim=32, vocab=64, num_heads=4)
NARROW = replace(WIDE_GPT, head_dim=8, ffn=32, dropout=0.1)
TIED = replace(TINY, name="tiny-tied", tied_embeddings=True)


def whole(
    layout: str,
    scalars: int,
    settings: Mapping[str, Any] = MappingProxyType({}),
    model: str = "TINY",
    changes: Mapping[str, Any] = MappingProxyType({}),
    precision: Precision = "fp32",
    **others: Any,
) -> Whole:
    """A row of the table: a model by its name above with changes, and a number of losses."""
    asked = Asked(layout, settings, replace(globals()[model], **changes), precision)
    return Whole(asked, scalars * LOSS, **others)


WHOLE, MORE = ([whole(**row) for row in tables(__file__)[name]] for name in ("whole", "more"))
PLAIN = {"checkpointing": "plain"}
Traced = tuple[Model, dict[str, Any], Precision]
DEEPSPEED: list[Traced] = [
    (TINY, {}, "fp32"),
    (GPT, PLAIN, "bf16"),
    (TINY, {}, "bf16"),
    (GPT, {}, "fp32"),
    (GPT, {}, "bf16"),
    (TINY, PLAIN, "fp32"),
    (TINY, PLAIN, "bf16"),
]
SCALARS = 3 * 4
"""The scaled loss, its copy and its gradient."""


@pytest.mark.full
def test_one_more_layer_of_deepspeed_weighs_what_the_plan_says(tmp_path: Path) -> None:
    """Plan and stack against the trace, with so many rows that the peak is in the loss: one more
    layer to the byte, and without a policy in fp32 the whole peak."""
    needs("deepspeed")
    problems = [_wide(case, count) for case in DEEPSPEED for count in (4, 5)]
    policies = [policy("deepspeed", case[1]) for case in DEEPSPEED for _ in (4, 5)]
    jobs = [job(*pair, "traced") for pair in zip(problems, policies, strict=True)]
    traced, said = [], []
    for number, record in enumerate(run_jobs("deepspeed", jobs, tmp_path)):
        assert record.measured is not None, record.reason
        traced.append(record.measured.ranks[0].activation_peak_bytes)
        known = weighed(policies[number], problems[number]).activation_peak
        gradients = backward_gradient_bytes(policies[number].methods[0], problems[number])  # type: ignore[arg-type]
        said.append(known + gradients)  # traced, they are no state
    layers = [b - a for a, b in zip(traced[::2], traced[1::2], strict=True)]
    assert layers == [b - a for a, b in zip(said[::2], said[1::2], strict=True)]
    for number, (_, settings, precision) in enumerate(DEEPSPEED):
        if not settings and precision == "fp32":
            assert traced[2 * number] - said[2 * number] == SCALARS


def _wide(case: Traced, num_layers: int) -> Problem:
    model, settings, precision = case
    asked = Asked("one", settings, replace(model, num_layers=num_layers), precision)
    found = asked_problem(asked, zero_stage=0, micro_batch=16, global_batch=16)
    # F.cross_entropy of fp32 logits keeps these beside its result; the executor's stack does not.
    system = with_facts(found.system, loss_keeps_logits=True)
    return dataclasses.replace(found, system=system)


# -- deepSpeed's plan and stack against traces of jobs that nobody chose ---------------------------


NEAR, FAR, TILED = 1e-3, 0.01, 0.03
"""Of the peak, states and all: most jobs; any; with tiles (docs/packages.md says why)."""
FAST = (28, 118, 133, 171)
"""ZeRO 3 with its optimizer on the host; ZeRO 2 with Ulysses, tied; ZeRO 0 and (tied) ZeRO 1 with
inputs on the host."""
MANY = range(40)
SHARE = 0.85
"""Of many jobs, at least, are near."""


def deviations(seeds: tuple[int, ...] | range, folder: Path) -> dict[int, float]:
    """Predicted over traced, less 1, by seed."""
    needs("deepspeed")
    drawn = {seed: draw(seed) for seed in seeds}
    jobs = [
        job(one.problem, policy("deepspeed", one.settings), "traced", timeout_s=300.0)
        for one in drawn.values()
    ]
    found = {}
    records = run_jobs("deepspeed", jobs, folder)
    for (seed, one), record in zip(drawn.items(), records, strict=True):
        seen = record.measured
        assert seen is not None, (seed, record.reason)
        traced = seen.ranks[0].peak_bytes
        method = policy("deepspeed", one.settings)
        found[seed] = weighed(method, one.problem).device_peak / traced - 1
    return found


@pytest.mark.full
def test_drawn_jobs_weigh_what_is_predicted(tmp_path: Path) -> None:
    far = {seed: off for seed, off in deviations(FAST, tmp_path).items() if abs(off) > NEAR}
    assert not far


@pytest.mark.soak
def test_most_of_many_drawn_jobs_weigh_what_is_predicted(tmp_path: Path) -> None:
    found = deviations(MANY, tmp_path)
    for seed, off in found.items():
        tiled = any(name.endswith("_tiles") for name in draw(seed).settings)
        assert abs(off) < (TILED if tiled else FAR), seed
    assert sum(abs(off) < NEAR for off in found.values()) >= SHARE * len(found)
