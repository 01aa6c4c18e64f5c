"""A fact acts on a job where another value of it changes bytes or seconds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.evaluate.effects import acting
from rematbench.evaluate.evaluator import evaluate
from rematbench.evaluate.unread import unread, unread_facts
from rematbench.inputs.configfile import ASSUMED
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster, load_system
from rematbench.inputs.stackfacts import NO_FACTS
from rematbench.inputs.system import FACTS, Accepts, with_facts
from rematbench.plan import MiniSequence, Offload, Plan, Recompute
from rematbench.problem import Problem
from rematbench.workload import Experts, Model, Workload
from tests.problems import LLAMA, calibration, rule
from tests.tables import tables

WIDE = {"hidden": 1024, "num_heads": 8, "head_dim": 128, "num_layers": 2, "vocab": 32003}
MODEL = replace(LLAMA, **WIDE, num_kv_heads=2, ffn=2816)
MIXTURE = replace(MODEL, experts=Experts(count=16, active=4, ffn=512))
CLUSTER = replace(load_cluster("h100-80gb-dos"), gpus_per_node=4)
JOBS: list[dict[str, Any]] = [
    row | ({"model": MIXTURE} if "model" in row else {}) for row in tables(__file__)["jobs"]
]
MLP = ("fc1", "act", "mul", "fc2")
HEAD = ("lm_head", "loss")
WHERE_MADE = ("fp32_copy", "prediction_layers")
"""The facts that are used before a problem exists: by its precision (inputs/precision.py), and by
the choice of the layers that train (evaluate/problems.py)."""


def job(
    stack: str, model: Model = MODEL, facts: dict[str, Any] | None = None, **others: Any
) -> tuple[Problem, Plan]:
    """A job, and its plan, which moves and rebuilds some activations unless all are `kept`."""
    rules = [rule(Offload(), "fc2_in"), rule(Recompute(), "up_out")]
    rules = [] if others.pop("kept", False) else rules
    count = others.pop("pieces", 0)
    pieces = tuple(MiniSequence(ops, count) for ops in (MLP, HEAD) if count)
    seq_len, precision = others.pop("seq_len", 4096), others.pop("precision", "bf16")
    work = Workload(model=model, seq_len=seq_len, precision=precision)
    system = with_facts(load_system(stack), **(facts or {}))
    given = Problem(work, CLUSTER, system, Layout(**others), calibration(), evaluator=evaluate)
    return given, replace(given.base_plan.with_rules(*rules), mini_sequences=pieces)


def test_every_fact_acts_somewhere_but_what_a_stack_accepts() -> None:
    idle = {*FACTS} - {*NO_FACTS}
    for one in JOBS:
        idle -= {*acting(*job(**one), idle)}
    assert idle == {*Accepts.__struct_fields__, *WHERE_MADE}


@pytest.mark.parametrize(
    ("fact", "here", "there"),
    [
        ("p2p_synchronous", {"pp": 2, "dp": 2}, {"dp": 4}),
        ("tp_overlap", {"tp": 2, "dp": 2}, {"dp": 4}),
        ("gather_bytes", {"dp": 4, "zero_stage": 1}, {"dp": 4, "zero_stage": 0}),
        ("dispatcher", {"dp": 4, "ep": 4, "model": MIXTURE}, {"dp": 4, "model": MIXTURE}),
        ("host_pinned", {"dp": 4, "facts": {"optimizer_on_host": True}}, {"dp": 4}),
    ],
)
def test_a_fact_acts_only_where_it_changes_numbers(
    fact: str, here: dict[str, Any], there: dict[str, Any]
) -> None:
    stack = "deepspeed" if fact == "host_pinned" else "megatron-core-0.16"
    base: dict[str, Any] = {"stack": stack, "zero_stage": 1, "global_batch": 8, "kept": True}
    assert acting(*job(**base | here), [fact]) == [fact]
    assert acting(*job(**base | there), [fact]) == []


def test_an_assumed_fact_of_a_stack_that_overlaps_exchanges_is_said() -> None:
    """On one GPU of the job, where nothing is exchanged."""
    given, _ = job(**JOBS[-4])
    sources = {"norm": f"{ASSUMED}a test", "reduce_bytes": f"{ASSUMED}a test"}
    system = with_facts(given.system, sources=sources)
    found = unread_facts(dataclasses.replace(given, system=system))
    assert found == {"norm": "a test", "reduce_bytes": "a test"}


def test_a_fact_that_contradicts_another_value_has_its_default() -> None:
    """DeepSpeed's loss is not in place; a fused loss is."""
    one, shared = (
        job("deepspeed", global_batch=2),
        job("deepspeed", dp=8, zero_stage=3, global_batch=16),
    )
    assert not one[0].system.loss.loss_in_place
    facts = ["fused_loss", "data_parallel"]
    assert acting(*one, facts) == ["fused_loss"]
    assert acting(*shared, facts) == facts


@pytest.mark.parametrize(("stated", "tp"), [("", 4), ("", 1), ("nics_per_node: 4", 4)])
def test_a_network_that_nobody_stated_is_asked_for(tmp_path: Path, stated: str, tp: int) -> None:
    """With what half of its rate costs a job between nodes."""
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nbase: h100-80gb\nsource: mine\ngpus_per_node: 2\n{stated}\n")
    given, _ = job("megatron-core", tp=tp, dp=2 if tp > 1 else 1, global_batch=4)
    said = unread(dataclasses.replace(given, cluster=load_cluster(path), _memo={}))
    assert ("GB/s a node assumed: a step is " in said) == (tp > 1 and not stated)
