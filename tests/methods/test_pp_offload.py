"""pp_offload: what leaves, when, how much, and the three ways to choose alpha."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rematbench.costs.offload_estimate import PipelineOffloadEstimator
from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster
from rematbench.problem import Problem
from rematbench.solve.kept import kept_activations
from tests.problems import all_methods, layers, make_problem, plan_of, problem, refusal

REGISTRY = all_methods()


def pipeline(**changes: Any) -> Problem:
    made: dict[str, Any] = {"pp": 4, "vpp": 2, "global_batch": 8, "system": "megatron-kwai"}
    p = problem(model=layers(8), **{**made, **changes})
    return replace(p, evaluator=evaluate)


SMALL = {"granularity": 64, "min_bytes": 256}


def test_offload_needs_three_stages_and_a_stack_that_can() -> None:
    assert "pp >= 3" in refusal(pipeline(pp=2), "pp_offload", alpha=0.5)
    assert "megatron-lm" in refusal(pipeline(system="megatron-lm"), "pp_offload", alpha=0.5)


def test_offload_spares_the_last_chunk_of_the_last_rank() -> None:
    p = pipeline()
    ranks = lower(plan_of(p, "pp_offload", alpha=1.0, **SMALL), p).ranks
    copied = [
        {step.chunk for step in r.steps if "D2H" in r.blocks[step.block].label} for r in ranks
    ]
    assert copied == [{0, 1}] * 3 + [{0}]


def test_nothing_is_spared_when_all_forwards_come_first() -> None:
    """One group of micro-batches: Megatron runs every forward before the first backward."""
    p = pipeline(global_batch=4)
    ranks = lower(plan_of(p, "pp_offload", alpha=1.0, **SMALL), p).ranks
    copied = {step.chunk for step in ranks[3].steps if "D2H" in ranks[3].blocks[step.block].label}
    assert copied == {0, 1}


@pytest.mark.parametrize("base", ["keep_all", "balanced_checkpointing", "full_recompute"])
def test_offload_budgets_what_the_base_keeps(base: str) -> None:
    p = pipeline()
    plan = plan_of(p, f"{base}+pp_offload", alpha=1.0, **SMALL)
    under = plan_of(p, base)
    table = p.layer(0)
    wanted = [n for n in kept_activations(p, under) if table.activations[n].nbytes >= 256]
    one = sum(table.activations[n].nbytes for n in wanted)
    passes_out = 4 * 2 * 8 - 8  # (rank, chunk, micro-batch), less the spared chunk
    assert evaluate(p, plan).offload_bytes == one * passes_out
    assert evaluate(p, plan).recompute_flop == evaluate(p, under).recompute_flop


def test_ledger_fit_is_the_smallest_that_fits() -> None:
    layout = Layout(tp=2, cp=2, pp=8, vpp=5, dp=8, global_batch=256)
    p = make_problem(
        model="llama-65b", cluster="h800-80gb", system="megatron-kwai", layout=layout, seq_len=8192
    )
    plan = plan_of(p, "pp_offload")
    alpha = plan.fit["alpha"]
    assert isinstance(alpha, float)
    assert 0.2 < alpha < 0.3  # Figure 7: 0.2 did not fit, 0.3 did
    assert plan.fit["bound"] == "device ledger"
    assert p.cost.headroom_bytes(plan) >= 0
    less = plan_of(p, "pp_offload", alpha=round(alpha - 0.001, 3))
    assert p.cost.headroom_bytes(less) < 0


def test_ledger_fit_says_when_nothing_fits() -> None:
    cluster = load_cluster("h800-80gb")
    full = msgspec.structs.replace(cluster, gpus_per_node=1, non_torch_bytes=cluster.hbm_bytes - 1)
    p = replace(pipeline(), cluster=full)
    plan = plan_of(p, "pp_offload", **SMALL)
    assert plan.fit["alpha"] == 1.0
    assert plan.fit["bound"] == "no share fits the device memory"


def test_the_paper_estimate_is_linear_in_alpha() -> None:
    e = PipelineOffloadEstimator(
        parameters=10, state_shards=4, chunks_in_flight=12, chunk_bytes=100
    )
    assert e.state_bytes == 90
    assert e.peak_bytes(0.0) == 90 + 1200
    assert e.peak_bytes(1.0) == 90 + 400
    assert e.smallest_alpha(890) == 0.5
    assert (e.smallest_alpha(1290), e.smallest_alpha(0)) == (0.0, 1.0)
