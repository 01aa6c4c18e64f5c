"""Quantised linears: saved bytes and bytes of weights in closed form, refusals, seconds."""

from math import ceil
from typing import Any

import pytest

from rematbench.costs.operators.kernels import Elementwise, Gemm
from rematbench.engine.lowering.lower import lower
from rematbench.engine.lowering.states.state_shards import quantised_bytes, quantised_weights
from rematbench.evaluate.evaluator import evaluate
from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.inputs.kernel_rates import RateError
from rematbench.plan import (
    MiniSequence,
    Plan,
    PlanError,
    Recompute,
    Rule,
    Select,
    Split,
    Unsupported,
)
from rematbench.problem import Problem
from tests.problems import all_methods
from tests.tables import tables

HIDDEN, FFN, QKV, LAYERS = 4096, 14336, 6144, 32


def made(system: str = "megatron-core", model: str = "llama-3.1-8b", **facts: Any) -> Problem:
    usual = {"cluster": "h100-80gb", "gpus": 8, "seq_len": 4096, "global_batch": 8, "tp": 1}
    return make_problem(Job(model=model, system=system, **usual | {"zero_stage": 1} | facts))


def saved(problem: Problem, layer: int = 0) -> int:
    """Bytes a token that a layer saves."""
    return problem.layer(layer).saved_bytes // problem.workload.seq_len


BLACKWELL = {"cluster": "b200-180gb"}


@pytest.mark.parametrize(
    ("recipe", "bytes_of", "facts"),
    [
        ("fp8", lambda n: n, {}),
        ("fp8-block", lambda n: n + 4 * n // 128, {}),
        ("mxfp8", lambda n: n + n // 32, BLACKWELL),
        ("nvfp4", lambda n: n // 2 + n // 16, BLACKWELL),
    ],
)
def test_a_linear_saves_its_input_quantised(recipe: str, bytes_of: Any, facts: Any) -> None:
    """Both norm outputs and the input of fc2 in the recipe's bytes; the output of attention, which
    attention saves too, stays as it is."""
    plain, found = made(**facts), made(recipe=recipe, **facts)
    inputs = (HIDDEN, HIDDEN, FFN)
    assert saved(plain) - saved(found) == sum(2 * n - bytes_of(n) for n in inputs)
    assert found.head == plain.head


def test_delayed_scales_keep_the_output_of_attention_twice() -> None:
    assert saved(made(recipe="fp8-delayed")) - saved(made(recipe="fp8")) == HIDDEN


def test_a_current_scale_has_three_launches_in_front_of_the_cast() -> None:
    """Its element is cleared and found, and the scale computed; other scales come with the cast."""
    for recipe, facts, launches in (
        ("fp8", {}, 4),
        ("fp8-delayed", {}, 1),
        ("mxfp8", BLACKWELL, 1),
    ):
        found = made(recipe=recipe, **facts)
        ops = {op.name: op for op in found.layer(0).ops}
        assert found.cost.calls(ops["mlp_norm_out_quantised"], "forward") == launches


@pytest.mark.parametrize("recipe", ["fp8", "fp8-rows"])
def test_torchao_saves_nothing(recipe: str) -> None:
    facts = {"system": "torchtitan-compiled", "zero_stage": 3}
    assert saved(made(**facts)) == saved(made(recipe=recipe, **facts))


def test_torchao_casts_kernel_by_kernel_without_a_compiler() -> None:
    """33 bytes an element in six kernels, with two tensors in fp32; otherwise one kernel."""
    facts = {"recipe": "fp8", "zero_stage": 3}
    eager, compiled = (
        made(system=name, **facts).layer(0).op("fc2")
        for name in ("torchtitan", "torchtitan-compiled")
    )
    elements = 4096 * FFN
    assert eager.forward[0] == Elementwise(33 * elements, 6)
    assert compiled.forward[0] == Elementwise(3 * elements)
    extra = eager.scratch_forward_bytes - compiled.scratch_forward_bytes
    assert extra == 8 * elements


@pytest.mark.parametrize(("each", "facts"), tables(__file__)["held"])
def test_quantised_weights_are_held_beside_the_parameters(each: float, facts: Any) -> None:
    """TransformerEngine's copies, on Hopper with their transpose; one form where products read
    both layouts; by rows and by columns where scales differ."""
    found = made(**facts)
    weights = LAYERS * (HIDDEN * (QKV + HIDDEN) + 3 * HIDDEN * FFN)
    assert quantised_weights(found, found.base_plan, 0) == weights
    assert quantised_bytes(found, found.base_plan, 0) == each * weights
    plain = made(**{name: facts[name] for name in facts if name not in ("recipe", "fp8_params")})
    held = [evaluate(one, one.base_plan).ranks[0].parameter for one in (found, plain)]
    assert held[0] - held[1] == each * weights


def test_gathers_of_quantised_weights_move_and_hold_their_bytes() -> None:
    """FSDP2 with torchao: the linears of a layer in a byte, the rest in two."""
    facts = {"system": "torchtitan-compiled", "zero_stage": 3, "recipe": "fp8"}
    wide, narrow = (made(**facts, fp8_params=one) for one in (False, True))
    sizes = [
        {
            alloc.nbytes
            for block, _ in lower(each.base_plan, each).block_runs
            for action in block.actions
            if (action.kind.name, action.op, action.part.letter)
            == ("ALL_GATHER", "parameters", "L")
            for alloc in action.allocs
            if action.exchange.comm and action.exchange.comm.nbytes == alloc.nbytes
        }
        for each in (wide, narrow)
    ]
    table = wide.layer(0)
    assert sizes == [{2 * table.parameters}, {2 * table.parameters - table.quantised}]


def test_first_and_last_layers_stay_in_16_bits() -> None:
    found = made(recipe="fp8", bf16_ends=2)
    plain = made()
    kinds = [found.layer(i).saved_bytes == plain.layer(i).saved_bytes for i in range(LAYERS)]
    assert kinds == [True] * 2 + [False] * 28 + [True] * 2


def test_experts_gradients_and_gathers_are_quantised() -> None:
    """Gathers under sequence parallelism move the quantised bytes; a block's gradients move in two
    forms, which are as many bytes as 16 bits."""
    facts = {"tp": 2, "gpus": 16}
    plain, one, two = (made(**facts, **r) for r in ({}, {"recipe": "fp8"}, {"recipe": "fp8-block"}))
    sizes = [[p.layer(0).op(op) for p in (plain, one, two)] for op in ("qkv", "fc2")]
    gathers, gradients = ([op.gather for op in sizes[0]], [op.grad_gather for op in sizes[1]])
    whole = 4096 * HIDDEN * 2
    assert [c and c.nbytes for c in gathers] == [whole, whole // 2, ceil(whole * 33 / 64)]
    assert [c and c.nbytes for c in gradients] == [whole, whole // 2, whole]
    table = made(model="qwen3-30b-a3b", recipe="fp8", ep=8).layer(0)
    narrow = {op.name for op in table.ops for k in op.forward if type(k) is Gemm and k.narrow}
    assert narrow == {"qkv", "proj", "expert_fc1", "expert_fc2"}
    assert {"expert_in_quantised", "expert_fc2_in_quantised"} < {*table.saved}


def reductions(problem: Problem) -> dict[str, list[tuple[str, str, int]]]:
    """The reductions of largest elements in a program: operator, group and bytes, by block."""
    found: dict[str, list[tuple[str, str, int]]] = {}
    for block, _ in lower(problem.base_plan, problem).block_runs:
        for action in block.actions:
            comm = action.exchange.comm
            if comm is not None and comm.kind == "amax":
                assert action.kind.name == "ALL_REDUCE"
                found.setdefault(block.label, []).append((action.op, comm.group, comm.nbytes))
    return found


def test_largest_elements_are_reduced() -> None:
    """TransformerEngine: of the input of a linear that gathers it, and of the gradient that a
    linear gathers, over tensor-parallel ranks; with delayed scales those of a pass over the ranks
    of the stage, three numbers of each product, then two; of quantised parameters at the end."""
    facts = {"tp": 2, "gpus": 16, "seq_len": 64, "global_batch": 8}
    found = reductions(made(recipe="fp8", **facts))
    copies = ["attn_norm_out_quantised", "mlp_norm_out_quantised"]
    assert [{*found[label]} for label in "FB"] == [
        {(name, "tp", 4) for name in names} for names in (copies, ("fc2", "proj"))
    ]
    assert [len(found[label]) for label in "FB"] == [2 * LAYERS] * 2
    products = 4 * LAYERS
    delayed = reductions(made(recipe="fp8-delayed", fp8_params=True, **facts))
    sizes = {"F": ("stage", 12), "B": ("stage", 8), "amaxes": ("dp", 4)}
    assert delayed == {
        label: [("amaxes", group, each * products)] for label, (group, each) in sizes.items()
    }
    for without in ({"recipe": "fp8-block"}, {"recipe": "fp8", "sp": False}):
        assert reductions(made(**facts, **without)) == {}


@pytest.mark.parametrize(("facts", "words"), tables(__file__)["refused"])
def test_what_has_no_recipe_is_refused(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(RateError, match=words):
        made(**facts)


def test_products_are_faster_where_they_are_deep() -> None:
    """The loop over k runs at the recipe's speed, a tile's prologue as in 16 bits."""
    found = made(recipe="fp8").cost
    assert found.recipe is not None
    half_k, speed = found.gpu.gemm_half_k, found.recipe.gemm["hopper"].value
    for k in (1024, 8192):
        wide, narrow = (
            found.kernel_s(Gemm(8192, 8192, k, narrow=one), "forward") for one in (False, True)
        )
        gap = found.stack.gap_s
        share = (1 / speed + half_k / k) / (1 + half_k / k)
        assert (narrow - gap) / (wide - gap) == pytest.approx(share)


def test_nvfp4_has_bytes_and_no_seconds() -> None:
    found = made(recipe="nvfp4", **BLACKWELL)
    assert "no published rate of matrix products of recipe nvfp4" in found.untimed
    assert evaluate(found, found.base_plan).ranks[0].device_peak > 0


def test_a_tensor_with_one_scale_has_no_parts() -> None:
    """Its pieces and fractions have another largest element; rows with scales of their own do
    not, if blocks of rows stay whole."""
    mlp = MiniSequence(("fc1", "act", "mul", "fc2"), 4)
    rule = Rule(Select(activations=("fc2_in_quantised",)), Split(offload=0.5))

    def refused(recipe: str, **changes: Any) -> str:
        found = made(recipe=recipe, **(BLACKWELL if recipe == "mxfp8" else {}))
        plan = found.base_plan
        plan = (
            plan.with_rules(rule)
            if "part" in changes
            else type(plan)(
                partition=plan.partition,
                schedule=plan.schedule,
                states=plan.states,
                mini_sequences=(changes["pieces"],),
            )
        )
        try:
            lower(plan, found)
        except PlanError as error:
            return str(error)
        return ""

    assert "fc2_in_quantised has one scale" in refused("fp8", part=True)
    assert "needs all rows" in refused("fp8", pieces=mlp)
    assert refused("fp8-block", part=True) == refused("mxfp8", part=True) == ""
    assert refused("fp8-block", pieces=mlp) == refused("mxfp8", pieces=mlp) == ""
    odd = MiniSequence(mlp.ops, 1024)
    assert "a piece must have a multiple of 32 rows" in refused("mxfp8", pieces=odd)


def test_a_quantised_copy_is_rebuilt_without_its_linear() -> None:
    """Dropping the input of fc2 runs the activation and the quantisation again, and no product."""
    found = made(recipe="fp8")
    names = ("fc2_in_quantised",)
    plan = found.base_plan.with_rules(Rule(Select(activations=names), Recompute()))
    again = {
        action.op
        for block, _ in lower(plan, found).block_runs
        for action in block.actions
        if action.kind.name == "RECOMPUTE"
    }
    assert again == {"act", *names}


def test_narrow_experts_gain_less_than_dense_layers() -> None:
    def gain(**facts: Any) -> float:
        pair = [made(**facts, **recipe) for recipe in ({}, {"recipe": "fp8"})]
        plain, quantised = (evaluate(one, one.base_plan).step_s for one in pair)
        return plain / quantised

    experts = gain(model="qwen3-30b-a3b", ep=8)
    assert experts < 1.1 < gain() < gain(model="llama-3.1-70b", tp=4, pp=4, gpus=32)


def test_modules_of_megatron_drop_quantised_copies() -> None:
    """With scales from values now, the norm's outputs and their copies are made again; delayed
    scales refuse it in Megatron-core's words."""
    found = made(recipe="fp8")
    method = all_methods().resolve("selective_recompute", {"modules": ("layernorm",)})
    plan = method.plan(found, found.base_plan)
    assert isinstance(plan, Plan), plan
    assert plan.fit["dropped"] == "attn_norm_out_quantised, mlp_norm_out_quantised"
    delayed = made(recipe="fp8-delayed")
    refused = method.plan(delayed, delayed.base_plan)
    assert isinstance(refused, Unsupported)
    assert "Delayed scaling does not support moe_act and layernorm" in refused.reason
    balanced = all_methods().resolve("balanced_checkpointing", {})
    plan = balanced.plan(found, found.base_plan)
    assert isinstance(plan, Plan)
    assert "fc2_in_quantised" in str(plan.fit["dropped"])
