"""Bands of states that are exchanged between nodes: published speeds lie inside."""

from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.evaluate.evaluator import evaluate
from rematbench.evidence.bands import band_of
from rematbench.evidence.open_causes import CHECKED, PUBLISHED_LONGER
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model, load_system
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem
from rematbench.workload import Model
from tests.problems import make_problem, plan_of

LLAMA_70B = load_model("llama2-70b")
LLAMA_34B = replace(LLAMA_70B, name="llama-34b", num_layers=48, ffn=22016)
YI_34B = replace(
    LLAMA_70B, name="yi-34b", num_layers=60, hidden=7168, ffn=20480, num_heads=56, vocab=64000
)
LLAMA_7B = load_model("llama2-7b")
LLAMA_13B = replace(
    LLAMA_7B, name="llama-13b", num_layers=40, hidden=5120, ffn=13824, num_heads=40, num_kv_heads=40
)
XTUNER = {
    "norm": "fused", "norm_keeps_steps": False, "rope": "fused",
}  # fmt: skip


def job(model: Model, system: Any, cluster: str, seq_len: int, **layout: Any) -> Problem:
    dp = layout.pop("gpus")
    return make_problem(
        layout=Layout(dp=dp, zero_stage=3, **layout),
        model=model,
        cluster=cluster,
        system=system,
        seq_len=seq_len,
    )


def speed(given: Problem, method: str) -> tuple[float, Any]:
    found = evaluate(given, plan_of(given, method))
    return found.tokens_per_s_per_gpu, band_of(given, method)


@pytest.mark.parametrize(
    ("model", "published", "method", "layout"),
    [
        (LLAMA_7B, 3760, "keep_all", {"micro_batch": 2, "shard_degree": 8}),
        (LLAMA_13B, 1700, "keep_all", {"shard_degree": 8}),
        (LLAMA_34B, 772, "full_recompute", {"micro_batch": 8}),
        (LLAMA_70B, 380, "full_recompute", {"micro_batch": 6}),
    ],
)
def test_fsdp_and_hsdp_over_nodes_are_as_fast_as_published(
    model: Model, published: float, method: str, layout: dict[str, int]
) -> None:
    """fms-fsdp, README.md (0d31998): 4,096 tokens on 128 A100s of 16 nodes, read for this test."""
    batch = 128 * layout.get("micro_batch", 1)
    given = job(
        model, "fms-fsdp", "a100-80gb-roce400", 4096, gpus=128, global_batch=batch, **layout
    )
    predicted, band = speed(given, method)
    assert predicted == pytest.approx(published, rel=0.07)
    assert band.low(predicted) < published < band.high(predicted)
    assert not band.open_cause


@pytest.mark.parametrize("reduce_bytes", [2, 4])
def test_replicas_between_nodes_pay_with_the_width_of_the_reduction(reduce_bytes: int) -> None:
    """fms-fsdp reduces in bf16, torchtitan in fp32.  One micro-batch hides the all-reduce of a
    node's shards only in bf16: of shards of s bytes, eight ranks send 16 s through a node's NICs,
    as many as full sharding with its gathers of all layers, which run in the forward too."""
    stack = with_facts(load_system("torchtitan"), reduce_bytes=reduce_bytes)
    full, hybrid = (
        speed(
            job(
                LLAMA_13B, stack, "a100-80gb-roce400", 4096,
                gpus=128, global_batch=128, shard_degree=degree,
            ),
            "keep_all",
        )[0]
        for degree in (0, 8)
    )  # fmt: skip
    assert (hybrid > full) == (reduce_bytes == 2)


@pytest.mark.parametrize(
    ("model", "published", "batch", "ulysses", "seq_len"),
    [
        (LLAMA_70B, 216.8, 32, 1, 8192),
        (YI_34B, 485.1, 32, 1, 8192),
        (YI_34B, 491.5, 32, 2, 32768),
        (LLAMA_70B, 300.9, 32, 4, 32768),
    ],
)
def test_zero_3_of_deepspeed_over_nodes_is_published_inside_its_band(
    model: Model, published: float, batch: int, ulysses: int, seq_len: int
) -> None:
    """XTuner, docs/zh_cn/acceleration/benchmark.rst (4d2758e), on 32 A100s: one micro-batch a step,
    two, four."""
    system = with_facts(load_system("huggingface-deepspeed"), name="xtuner", **XTUNER)
    layout = {"gpus": 32, "global_batch": batch, "ulysses": ulysses}
    given = job(model, system, "a100-80gb-roce1600", seq_len, **layout)
    predicted, band = speed(given, "full_recompute")
    assert band.low(predicted) < published < band.high(predicted)
    assert f"{PUBLISHED_LONGER:.0%} longer" in band.evidence


def test_the_open_cause_is_of_exchanges_between_nodes_without_evidence() -> None:
    def band(system: str, gpus: int, **layout: Any) -> Any:
        given = job(
            LLAMA_7B, system, "a100-80gb-roce400", 4096,
            gpus=gpus, global_batch=gpus * layout.pop("m", 1), **layout,
        )  # fmt: skip
        return band_of(given, "keep_all")

    assert not band("huggingface-deepspeed", 8).open_cause
    assert band("huggingface-deepspeed", 16).open_cause
    assert not band("torchtitan", 16).open_cause
    assert band("torchtitan", 16, shard_degree=8).open_cause
    widths = [band("huggingface-deepspeed", 16, m=m).half_width for m in (1, 2, 4, 64)]
    assert widths == sorted(widths, reverse=True)
    assert not band("huggingface-deepspeed", 16, m=64).open_cause
    assert all(load_system(name) for name in CHECKED)
