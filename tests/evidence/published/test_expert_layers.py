"""Layers with experts that Megatron-LM measures alone on eight H100 (kernels_moe.csv): what changes
with the dispatcher.  The tolerance was written down after the differences were seen.

Orders where the published gap exceeds 5 %: alltoall against a dispatcher of one copy, 4 of 5 are
right (with two experts a token DeepEP is slower, by a start-up that is not modelled); DeepEP
against HybridEP, which are one here, 0 of 2.
"""

from math import fsum
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.problems import make_problem
from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model, load_system
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import Dispatcher, with_facts
from rematbench.problem import Problem
from rematbench.workload import Experts

SHAPE = "tokens=4096;h=7168;ffn=2048;experts=32;topk=8;shared=2048;ep=8"
EXPERTS = Experts(count=32, active=8, ffn=2048, shared_ffn=2048)
WORDS: dict[Dispatcher, str] = {"alltoall": "a2a", "deepep": "deepep"}


class Layer(NamedTuple):
    """Seconds of a pass and bytes of a layer's experts."""

    forward_s: float
    backward_s: float
    peak_bytes: float


def published(dispatcher: Dispatcher) -> Layer:
    rows = [
        row
        for row in read_sheet(data_dir("published") / "kernels_moe.csv")
        if row["shape"] == SHAPE and row["dtype"] == "bf16"
        if row["implementation"].endswith(f"dispatcher {WORDS[dispatcher]}")
    ]
    values = {row["what"]: float(row["value"]) for row in rows}
    return Layer(
        values["moe_layer_forward"] / 1e3,
        values["moe_layer_backward"] / 1e3,
        values["moe_layer_peak_allocated"],
    )


def given(dispatcher: Dispatcher) -> Problem:
    narrow = {"num_heads": 8, "num_kv_heads": 8, "head_dim": 64, "vocab": 1024}
    model = replace(
        load_model("llama-7b"), name="layer", num_layers=1, hidden=7168, experts=EXPERTS, **narrow
    )
    return make_problem(
        Job.at(
            Layout(dp=8, ep=8, zero_stage=1, global_batch=8),
            model=model,
            cluster="h100-80gb",
            system=with_facts(load_system("megatron-core-2026"), dispatcher=dispatcher),
            seq_len=4096,
        )
    )


def predicted(dispatcher: Dispatcher) -> Layer:
    found = given(dispatcher)
    ops, cost = found.layer(0).ops, found.cost
    ours = ops[[op.name for op in ops].index("router") :]
    forward = [cost.op_s(op, "forward", 1.0) for op in ours]
    forward += [cost.comm_s(op.reduce, 0) for op in ours if op.reduce]
    backward = [cost.op_s(op, "backward_input", 1.0) for op in ours]
    backward += [cost.op_s(op, "backward_weight", 1.0) for op in ours]
    backward += [cost.comm_s(op.grad_gather, 0) for op in ours if op.grad_gather]
    peak = evaluate(found, found.base_plan).ranks[0].activation_peak
    return Layer(fsum(forward), fsum(backward), peak)


def test_one_copy_of_a_token_saves_seconds_and_bytes() -> None:
    apart = [
        Layer(*(a - b for a, b in zip(of("alltoall"), of("deepep"), strict=True)))
        for of in (published, predicted)
    ]
    assert min(apart[0]) > 0
    assert apart[1].forward_s == pytest.approx(apart[0].forward_s, rel=0.25)
    assert apart[1].backward_s == pytest.approx(apart[0].backward_s, rel=0.25)
    assert apart[1].peak_bytes == pytest.approx(apart[0].peak_bytes, rel=0.25)
