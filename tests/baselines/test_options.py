"""Options that say another job, or nothing, are refused by name before any process starts."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from baselines.common.interface import NotRunnable
from baselines.deepspeed.configuration import policy_of as configured
from baselines.deepspeed.plan import DeepSpeed
from baselines.megatron_core.arguments import parse, policy_of
from baselines.megatron_core.plan import MegatronCore
from tests.baselines.cases import GPT, Asked, asked_job, asked_problem
from tests.tables import tables

TABLES = tables(__file__)


def arguments(asked: Asked, change: str) -> str:
    """What `flags` prints, with (+) or without (-) some more."""
    own = MegatronCore().flags(asked_problem(asked))
    if change.startswith("+"):
        return f"{own} {change[1:]}"
    assert change[1:] in own
    return own.replace(change[1:], "")


@pytest.mark.parametrize(("job", "change", "words"), TABLES["arguments"])
def test_arguments_of_another_job_are_refused(job: Any, change: str, words: str) -> None:
    asked = Asked(**job)
    run = asked_job("megatron_core", asked).run
    policy_of(MegatronCore().flags(asked_problem(asked)), MegatronCore(), run)
    with pytest.raises(NotRunnable, match=words) as refusal:
        policy_of(arguments(asked, change), MegatronCore(), run)
    assert str(refusal.value).startswith("megatron_core: ")


def test_what_megatron_lm_takes_without_an_argument_may_be_left_out() -> None:
    run = asked_job("megatron_core", Asked("dp2-zero0")).run
    run = replace(run, layout=replace(run.layout, global_batch=2))
    assert (
        policy_of("--micro-batch-size=1 --seq-length=32", MegatronCore(), run).recompute == "none"
    )
    assert parse("--a=1 --b 2 3 --c") == {"a": ["1"], "b": ["2", "3"], "c": []}


@pytest.mark.parametrize(
    ("asked", "fused", "word"),
    [
        (Asked(), False, "--no-bias-swiglu-fusion"),
        (Asked(), True, ""),
        (Asked(model=GPT), False, "--no-bias-gelu-fusion"),
        (Asked(model=replace(GPT, qkv_bias=False, proj_bias=False, mlp_bias=False)), False, ""),
    ],
)
def test_the_activation_is_fused_unless_an_argument_says_no(
    asked: Asked, fused: bool, word: str
) -> None:
    """As Megatron-LM has it; GELU without biases has no fused function there."""
    made, run = asked_problem(asked), asked_job("megatron_core", asked).run
    policy = MegatronCore(bias_activation_fusion=fused)
    text = policy.flags(made)
    assert ("--no-bias" in text) == bool(word)
    assert word in text
    assert policy_of(text, MegatronCore(), run) == policy


def configuration(asked: Asked, changes: dict[str, Any], policy: DeepSpeed) -> str:
    """What `flags` prints, with some of it replaced (None: left out)."""
    made: dict[str, Any] = msgspec.json.decode(policy.flags(asked_problem(asked)))
    for name, value in changes.items():
        made[name] = {**made[name], **value} if name == "zero_optimization" else value
    return msgspec.json.encode({k: v for k, v in made.items() if v is not None}).decode()


@pytest.mark.parametrize(("given", "changes", "words"), TABLES["configured"])
def test_a_configuration_of_another_job_is_refused(
    given: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    asked = Asked(**given)
    job = asked_job("deepspeed", asked)
    own = configuration(asked, {}, DeepSpeed())
    assert configured(replace(job, options=own), DeepSpeed()) == DeepSpeed()
    with pytest.raises(NotRunnable, match=words):
        configured(replace(job, options=configuration(asked, changes, DeepSpeed())), DeepSpeed())


@pytest.mark.parametrize(
    "checkpointing", ["none", "plain", "partitioned", "cpu", "partitioned_cpu"]
)
def test_the_policy_of_a_configuration_is_read_for_the_guards(checkpointing: Any) -> None:
    asked = Asked("dp2-zero3")
    policy = DeepSpeed(
        checkpointing=checkpointing, offload_optimizer=True, offload_param=True, overlap_comm=True
    )
    job = replace(asked_job("deepspeed", asked), options=configuration(asked, {}, policy))
    assert configured(job, DeepSpeed()) == policy
    assert configured(job, policy) == policy
    other = replace(job, options=configuration(asked, {}, DeepSpeed()))
    with pytest.raises(NotRunnable, match=r"overlap_comm is True, but the options say False$"):
        configured(other, DeepSpeed(overlap_comm=True))
