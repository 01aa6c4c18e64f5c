"""What a stack keeps beside the operator table is what its trace shows, layer for layer."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from rematbench.baselines.process import job as make_job
from rematbench.baselines.process import policy, run_jobs
from rematbench.baselines.stack import layer_tensors, stack_of
from rematbench.discover import Composition
from rematbench.evaluate import program_bytes
from rematbench.lower import lower
from rematbench.plan import Plan
from rematbench.problem import AttentionKind, Problem
from rematbench.workload import Model, Precision
from tests.baselines.cases import GPT, SEQ, TINY, Asked, asked_problem


class Stacked(NamedTuple):
    """A layout, a model, settings, and the kind of core attention."""

    layout: str
    model: Model
    settings: dict[str, Any]
    attention: AttentionKind = "flash"

    def problem(self, num_layers: int) -> Problem:
        model = replace(self.model, num_layers=num_layers)
        made = asked_problem(Asked(self.layout, model=model, precision="bf16"))
        return Problem(
            made.workload, made.cluster, made.system, made.layout, made.calibration, self.attention
        )


FUSED = {"bias_activation_fusion": True}
LEARNED = replace(TINY, position="learned", max_positions=SEQ)
CASES = [
    Stacked("one", TINY, {}),
    Stacked("one", TINY, FUSED),
    Stacked("tp2", TINY, {}),
    Stacked("cp2", TINY, {}),
    Stacked("one", GPT, {}),
    Stacked("one", GPT, {}, "unfused"),
    Stacked("tp2", GPT, {}, "unfused"),
    Stacked("one", replace(GPT, dropout=0.1), {}, "unfused"),
]


def test_one_more_layer_of_megatron_core_weighs_what_the_stack_says(tmp_path: Path) -> None:
    """Traced with four and with five layers: the difference is one layer's saved tensors."""
    pytest.importorskip("megatron.core", reason="megatron-core is installed by ./bench test")
    jobs = [
        make_job(case.problem(count), policy("megatron_core", case.settings), "traced")
        for case in CASES
        for count in (4, 5)
    ]
    records = run_jobs("megatron_core", jobs, tmp_path)
    traced, said = [], []
    for number, case in enumerate(CASES):
        few, more = (record.observed for record in records[2 * number : 2 * number + 2])
        assert few is not None, records[2 * number].reason
        assert more is not None
        traced.append(more.activation_peak_bytes[0] - few.activation_peak_bytes[0])
        problem = case.problem(4)
        method = policy("megatron_core", case.settings).methods[0]
        stack = stack_of("megatron_core", method, problem)
        assert stack is not None
        said.append(stack.problem(problem).layer(0).saved_bytes)
        listed = list(layer_tensors(problem, stack))
        saved = [held for held in listed if not held.why.startswith("in the backward")]
        assert sum(held.stack_bytes for held in saved) == said[-1]
        assert sum(held.table_bytes for held in listed) == problem.layer(0).saved_bytes
    assert traced == said


FULL = {"recompute": "full"}
LOSS = 4
"""Bytes of a scalar: the count of labels; per micro-batch the loss, its sum, copies, gradients."""


class Whole(NamedTuple):
    """A job, a stage of its pipeline, and the bytes of scalars alive at that stage's peak."""

    asked: Asked
    scalars: int
    stage: int = 0

    @property
    def messages(self) -> int:
        """Bytes of messages held beyond the plan's: a gradient that was sent is a variable of
        Megatron-core's loop until the next one; an output that was sent is freed at once, in the
        plan only when the next pass has been issued."""
        made = asked_problem(self.asked)
        size = SEQ * made.workload.model.hidden * made.workload.element_bytes
        return size * ((self.stage > 0) - (self.stage < made.layout.pp - 1))


WHOLE = [
    Whole(Asked("one", model=GPT), 6 * LOSS),
    Whole(Asked("tp2", FULL), 8 * LOSS),
    Whole(Asked("cp2", FULL), 8 * LOSS),
    Whole(Asked("cp2"), 8 * LOSS),
    Whole(Asked("one", precision="bf16"), 4 * LOSS),
    Whole(Asked("one", FULL, precision="bf16"), 6 * LOSS),
    Whole(Asked("one", model=GPT, precision="bf16"), 4 * LOSS),
    Whole(Asked("one", {"recompute": "selective"}), 10 * LOSS),
    Whole(Asked("one", {"recompute": "selective", "modules": ["mlp"]}), 6 * LOSS),
    Whole(Asked("one", model=LEARNED), 6 * LOSS),
    Whole(Asked("cp2", model=LEARNED), 8 * LOSS),
    Whole(Asked("one", model=replace(LEARNED, num_kv_heads=1)), 6 * LOSS),
    Whole(Asked("pp2"), 4 * LOSS),
    Whole(Asked("pp2"), 9 * LOSS, stage=1),
    Whole(Asked("pp4"), 5 * LOSS, stage=1),
    Whole(Asked("pp4", precision="bf16"), 6 * LOSS, stage=3),
]


def test_the_whole_peak_of_megatron_core_is_the_plans_and_some_scalars(tmp_path: Path) -> None:
    """No tensor is missing and none is too many, up to a message of a pipeline."""
    pytest.importorskip("megatron.core", reason="megatron-core is installed by ./bench test")
    problems = [asked_problem(case.asked) for case in WHOLE]
    policies = [policy("megatron_core", case.asked.settings) for case in WHOLE]
    jobs = [
        make_job(made, own, "traced", rank=case.stage * made.layout.gpus // made.layout.pp)
        for case, made, own in zip(WHOLE, problems, policies, strict=True)
    ]
    rest = []
    for number, record in enumerate(run_jobs("megatron_core", jobs, tmp_path)):
        assert record.observed is not None, record.reason
        case = WHOLE[number]
        said = _said("megatron_core", policies[number], problems[number], case.stage)
        rest.append(record.observed.activation_peak_bytes[0] - said - case.messages)
    assert rest == [case.scalars for case in WHOLE]


def _said(baseline: str, method: Composition, problem: Problem, stage: int = 0) -> int:
    """The activation peak of the policy's plan with the tensors of the baseline's stack."""
    stack = stack_of(baseline, method.methods[0], problem)
    assert stack is not None
    here = stack.problem(problem)
    plan = method.plan(here)
    assert isinstance(plan, Plan)
    peak = program_bytes(here, plan, lower(plan, here))[stage].activation_peak
    return peak + sum(stack.once.values())


PLAIN = {"checkpointing": "plain"}
DEEPSPEED: list[tuple[Model, dict[str, Any], Precision]] = [
    (TINY, {}, "fp32"),
    (TINY, {}, "bf16"),
    (GPT, {}, "fp32"),
    (GPT, {}, "bf16"),
    (TINY, PLAIN, "fp32"),
    (TINY, PLAIN, "bf16"),
]
SCALARS = 3 * 4
"""The scaled loss, its copy and its gradient."""


def test_one_more_layer_of_deepspeed_weighs_what_the_plan_says(tmp_path: Path) -> None:
    """Plan and stack against the trace, with so many rows that the peak is in the loss: one more
    layer to the byte, and without a policy in fp32 the whole peak."""
    pytest.importorskip("deepspeed", reason="deepspeed is installed by ./bench test")
    problems = [_wide(case, count) for case in DEEPSPEED for count in (4, 5)]
    policies = [policy("deepspeed", case[1]) for case in DEEPSPEED for _ in (4, 5)]
    jobs = [make_job(*pair, "traced") for pair in zip(problems, policies, strict=True)]
    traced, said = [], []
    for number, record in enumerate(run_jobs("deepspeed", jobs, tmp_path)):
        assert record.observed is not None, record.reason
        traced.append(record.observed.activation_peak_bytes[0])
        said.append(_said("deepspeed", policies[number], problems[number]))
    layers = [b - a for a, b in zip(traced[::2], traced[1::2], strict=True)]
    assert layers == [b - a for a, b in zip(said[::2], said[1::2], strict=True)]
    for number, (_, settings, precision) in enumerate(DEEPSPEED):
        if not settings and precision == "fp32":
            assert traced[2 * number] - said[2 * number] == SCALARS


def _wide(case: tuple[Model, dict[str, Any], Precision], num_layers: int) -> Problem:
    model, settings, precision = case
    asked = Asked("one", settings, replace(model, num_layers=num_layers), precision)
    found = asked_problem(asked, zero_stage=0, micro_batch=16, global_batch=16)
    # F.cross_entropy of fp32 logits keeps these beside its result; the executor's stack does not.
    system = replace(found.system, loss_keeps_logits=True)
    return dataclasses.replace(found, system=system)
