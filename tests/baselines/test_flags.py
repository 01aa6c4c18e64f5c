"""Printed flags are run: the baseline under them has the gradients of the method's own plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from rematbench.discover import discover
from rematbench.flags import Answer, flags_of
from rematbench.plan import Plan
from rematbench.torch.case import Case
from rematbench.torch.launch import execute_cases
from rematbench.torch.parameters import AdamW
from tests.baselines.cases import STEPS, Asked, Ran, asked_problem, run_all

FP32 = 1e-5
MEGATRON: dict[str, dict[str, Any]] = {
    "full_recompute": {"num_layers": "2"},
    "selective_recompute": {"activations": "attn_norm_out,mlp_norm_out"},
}


def answered(method: str, settings: dict[str, Any], baseline: str) -> tuple[Plan, Answer]:
    problem = asked_problem(Asked("one"))
    plan = discover().resolve(method, settings).plan(problem)
    assert isinstance(plan, Plan)
    return plan, flags_of(problem, plan, baseline)


def megatron_settings(arguments: str) -> dict[str, Any]:
    """The printed arguments as a person would type them, back into settings."""
    words, given = arguments.split(), {}
    for index, word in enumerate(words):
        values = []
        for value in words[index + 1 :]:
            if value.startswith("--"):
                break
            values.append(value)
        if word.startswith("--"):
            given[word] = values
    found: dict[str, Any] = {"recompute": given["--recompute-granularity"][0]}
    if "--recompute-method" in given:
        found["method"] = given["--recompute-method"][0]
        found["num_layers"] = int(given["--recompute-num-layers"][0])
    if "--recompute-modules" in given:
        found["modules"] = given["--recompute-modules"]
    return found


def same_as_the_plan(plan: Plan, ran: Ran) -> None:
    """Loss and every gradient norm of the method's own execution."""
    case = Case(
        name="plan",
        problem=asked_problem(Asked("one")),
        plan=plan,
        steps=STEPS,
        optimizer=AdamW(weight_decay=0.0),
        measure=False,
    )
    (own,) = execute_cases([case])
    assert own.status == "ok", own.reason
    seen = ran.record.observed
    assert seen is not None, ran.record.reason
    assert seen.losses == pytest.approx(own.losses, rel=FP32)
    assert seen.gradient_norms[0] == pytest.approx(own.gradient_norms[0], rel=10 * FP32, abs=1e-7)


@pytest.mark.parametrize("method", MEGATRON)
def test_megatron_core_under_the_printed_arguments(method: str, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    plan, answer = answered(method, MEGATRON[method], "megatron_core")
    assert not answer.missing
    settings = megatron_settings(answer.flags)
    assert settings["recompute"] == ("full" if method == "full_recompute" else "selective")
    (ran,) = run_all("megatron_core", [Asked("one", settings)], tmp_path)
    same_as_the_plan(plan, ran)


def test_deepspeed_under_the_printed_configuration(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    plan, answer = answered("full_recompute", {}, "deepspeed")
    assert not answer.missing
    printed = json.loads(answer.flags)
    inside = printed["activation_checkpointing"]
    assert inside == {"partition_activations": False, "cpu_checkpointing": False}
    assert printed["zero_optimization"]["stage"] == 1
    (ran,) = run_all("deepspeed", [Asked("one", {"checkpointing": "plain"})], tmp_path)
    same_as_the_plan(plan, ran)


def test_what_a_baseline_cannot_say_is_named() -> None:
    _, answer = answered("balanced_checkpointing", {}, "megatron_core")
    assert any(line.startswith("fc2_in: recomputed") for line in answer.missing)
    _, answer = answered("full_recompute", {"num_layers": "2"}, "deepspeed")
    assert any("group" in line for line in answer.missing)
