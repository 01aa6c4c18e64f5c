"""Tiny problems and named plans that the engine's tests share: kilobytes per tensor, 1-4 layers."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.costs.operators.block import layer_table
from rematbench.costs.operators.ops import OpTable
from rematbench.engine.program.action import Action, Kind
from rematbench.evaluate import method_contract, problems
from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs import stackfacts
from rematbench.inputs.constants import Calibration, load_calibration
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_cluster, load_system, names
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import System, with_facts
from rematbench.plan import (
    ByteBudget,
    Fate,
    Keep,
    Offload,
    Plan,
    Recompute,
    Rule,
    Select,
    Split,
    Transfers,
    Unsupported,
)
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry
from rematbench.problem import Problem
from rematbench.solve.relocate import Relocation
from rematbench.workload import Experts, Latent, Model, Workload

LLAMA = replace(method_contract.LLAMA, name="test-llama")
GPT = replace(method_contract.GPT, name="test-gpt")
BLOCKS: dict[str, dict[str, Any]] = {
    "parallel": {"block": "parallel", "rotary_share": 0.5},
    "shared": {
        "block": "parallel_shared_norm",
        "norm_bias": False,
        "qk_norm": True,
        "qk_norm_weights": "each_head",
    },
    "after": {
        "pre_norm": False,
        "post_norm": True,
        "qk_norm": True,
        "qk_norm_weights": "width",
        "norm_in_fp32": True,
    },
    "embedding": {"embedding_norm": True, "position": "alibi", "mlp": "relu"},
    "unweighted": {"norm_weight": False, "mlp": "xielu", "activation_steps": 3.5},
    "experts": {
        "experts": Experts(count=4, active=2, ffn=64, shared_ffn=32, dense_layers=(0,)),
        "mlp": "swiglu",
    },
    "latent": {
        "latent": Latent(q_rank=24, kv_rank=16, nope=8, rope=4, v=6),
        "head_dim": 12,
        "num_kv_heads": LLAMA.num_heads,
    },
    "attention_dropout": {"attention_dropout": 0.1, "embedding_dropout": 0.0, "mlp": "relu2"},
}
"""Facts of blocks that neither Llama nor GPT has."""
ANY_LAYOUT: dict[str, Any] = {
    "model_parallel": ("tp", "pp", "vpp", "ep"),
    "zero_stages": (0, 1, 2, 3),
    "pipeline_zero_stages": (0, 1, 2, 3),
    "wide_attention": "fp64",
}
"""Facts with which a stack runs every layout, in every precision."""


@cache
def calibration() -> Calibration:
    """The repository's constants: no test of the engine depends on their values."""
    return load_calibration(data_dir("config") / "calibration.yaml")


@cache
def all_methods() -> Registry:
    """The methods of this checkout; to read their files takes 25 ms each time."""
    return discover()


def problem(
    *,
    model: Model = LLAMA,
    seq_len: int = 32,
    system: str = "rematbench",
    attention: Any = "flash",
    system_changes: dict[str, Any] | None = None,
    **layout: Any,
) -> Problem:
    """A problem on one-GPU nodes and a stack without limits, so that any degrees are a legal
    layout."""
    return Problem(
        Workload(model=model, seq_len=seq_len),
        replace(load_cluster("h800-80gb"), gpus_per_node=1),
        with_facts(load_system(system), **ANY_LAYOUT, **(system_changes or {})),
        Layout(**layout),
        calibration(),
        attention,
    )


def layer_of(work: Workload, stack: System, **layout: int) -> OpTable:
    """The operators of a layer, of those with experts where the model has some."""
    return layer_table(work, Layout(**layout), stack, fused_attention=True, window=0, dense=False)


def once(cases: Iterable[tuple[Any, ...]], facts: Callable[..., object]) -> list[Any]:
    """Cases as parameters; of those with equal facts all but the first are marked full."""
    found, seen = [], set()
    for case in cases:
        known = repr(facts(*case))
        found.append(pytest.param(*case, marks=[pytest.mark.full] if known in seen else []))
        seen.add(known)
    return found


def stacks(*facts: str) -> list[Any]:
    """The shipped stacks, once for each set of values of the facts that a test reads."""

    def values(name: str) -> list[Any]:
        known = stackfacts.defaults(name) | stackfacts.facts(name)
        return [known[fact].value for fact in facts]

    return once(((name,) for name in names("system")), values)


def remade(given: Problem, **parts: Any) -> Problem:
    """The problem with other parts, and nothing remembered of what it was."""
    return given.remade(**parts)


def on(given: Problem, **facts: Any) -> Problem:
    """The problem on a cluster that differs in some facts."""
    return remade(given, cluster=replace(given.cluster, **facts))


def tight(given: Problem, share: float) -> Problem:
    """The problem on a device with room for so much of what lies between lean and keep-all."""
    given = remade(given, evaluator=evaluate)
    lean = Relocation(given, given.base_plan, exact=False).smallest_plan(given.base_plan)
    least, most = (given.cost.peak_bytes(plan) for plan in (lean, given.base_plan))
    return on(given, hbm_bytes=int(least + share * (most - least)) + given.non_torch_bytes)


def make_problem(*, layout: Layout, **others: Any) -> Problem:
    """A problem with its evaluator, at a whole layout."""
    return problems.make_problem(Job.at(layout, **others))


def layers(num_layers: int, model: Model = LLAMA) -> Model:
    """The same model with another depth."""
    return replace(model, num_layers=num_layers)


def rule(fate: Fate, *activations: str, **select: Any) -> Rule:
    """A rule over activations of the layers (all saved tensors of the layers if none is named)."""
    return Rule(Select(parts=("layer",), activations=activations or None, **select), fate)


SCORES = ("attn_probs", "attn_probs_mask", "attn_probs_dropped")
"""What attention without flash kernels saves."""
BALANCED = rule(Recompute(), "attn_norm_out", "mlp_norm_out", "act_out", "fc2_in")
"""Both norms and SiLU x mul, rebuilt before their readers (ATC'24)."""
FULL = (rule(Recompute(scope="layer", whole=True)), rule(Keep(), "layer_input"))
"""Every layer recomputed from its input."""
SKELETAL = (
    rule(Split(offload=0.5, recompute=0.5, scope="layer")),
    rule(Offload(), "layer_input", "attn_out", "attn_heads", "lse", *SCORES),
)
"""MEMO's token split: the input and attention leave whole, the rest half and half."""


def half(alpha: float = 0.5) -> Rule:
    """Offload a share of the bytes that a chunk keeps; thresholds fit kilobyte tensors."""
    return Rule(Select(kept=True), ByteBudget(alpha=alpha, granularity=256, min_bytes=512))


def by_layer(plan: Plan, **transfers: Any) -> Plan:
    """The same plan with copies per layer."""
    return replace(plan, transfers=Transfers(granularity="layer", **transfers))


def transfers(plan: Plan, **changes: Any) -> Plan:
    """The same plan with other transfer settings."""
    return replace(plan, transfers=Transfers(**changes))


def slots(action: Action, rank: int) -> float:
    """A layer's forward takes 1 second, its backward 2, all else nothing: a slot is 3."""
    if action.op != "attention":
        return 0.0
    return {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 2.0}.get(action.kind, 0.0)


def plan_of(problem: Problem, spec: str, **settings: Any) -> Plan:
    """What a method or composition plans, which must be a plan."""
    plan = all_methods().resolve(spec, settings).plan(problem)
    assert isinstance(plan, Plan), plan
    return plan


def refusal(problem: Problem, spec: str, **settings: Any) -> str:
    """Why a method or composition has no plan."""
    answer = all_methods().resolve(spec, settings).plan(problem)
    assert isinstance(answer, Unsupported), answer
    return answer.reason
