"""A pipeline engine that holds the outputs of micro-batches in flight."""

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem
from rematbench.workload import Model
from tests.problems import FULL, layers, make_problem, plan_of, problem, remade

GB, GIB = 1e9, 2**30
GPT_181B = Model(
    name="gpt-181b", num_layers=72, hidden=14336, num_heads=64, num_kv_heads=64, head_dim=224,
    ffn=57344, vocab=250880, mlp="gelu", norm="layernorm", position="alibi", tied_embeddings=True,
    qkv_bias=True, proj_bias=True, mlp_bias=True,
)  # fmt: skip


def held(given: Problem, *, holds: bool) -> Problem:
    return remade(given, system=with_facts(given.system, holds_outputs=holds))


@pytest.mark.parametrize("vpp", [1, 2])
@pytest.mark.parametrize("p2p", ["always", "none"])
def test_an_output_stays_from_its_forward_to_its_backward(vpp: int, p2p: str) -> None:
    """With everything else recomputed, a rank holds one output more for each micro-batch in flight
    but the one at work; no second moves."""
    given = problem(
        model=layers(4 * vpp), pp=4, vpp=vpp, global_batch=8, system_changes={"p2p_overlap": p2p}
    )
    results = []
    for holds in (False, True):
        made = held(given, holds=holds)
        plan = made.base_plan.with_rules(*FULL)
        check(lower(plan, made))
        results.append(evaluate(made, plan))
    without, with_outputs = results
    assert without.step_s == with_outputs.step_s
    output = given.layer(0).activations["layer_input"].nbytes
    more = [
        (a - b) // output
        for a, b in zip(with_outputs.peak_device_bytes, without.peak_device_bytes, strict=True)
    ]
    if vpp == 1:
        assert more[-1] == 0
        assert more == sorted(more, reverse=True)
        assert 2 <= more[0] <= 4
    assert all(n >= 0 for n in more)


@pytest.mark.parametrize(("micro_batch", "measured"), [(1, 29), (2, 37), (4, 49), (8, 69)])
def test_181b_on_384_gpus_as_measured(micro_batch: int, measured: float) -> None:
    """Megatron-DeepSpeed, fp16, full recomputation, TP 8, PP 12: the fullest node, as nvidia-smi
    reports it (a published table of memory by micro-batch)."""
    cluster = replace(load_cluster("a100-80gb-selene"), gpus_per_node=8)
    given = make_problem(
        layout=Layout(tp=8, sp=False, pp=12, dp=4, micro_batch=micro_batch, global_batch=2048),
        model=GPT_181B, cluster=cluster, system="megatron-deepspeed", seq_len=2048,
        precision="fp16", attention="unfused",
    )  # fmt: skip
    found = evaluate(given, plan_of(given, "full_recompute"))
    predicted = (max(found.peak_device_bytes) + given.non_torch_bytes) / GB
    assert predicted == pytest.approx(measured, rel=0.08)
