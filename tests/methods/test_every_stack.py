"""Every method on every stack plans, or refuses in words that a user understands."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.storage import HOST
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.method_contract import check_plan
from rematbench.evaluate.proof import check
from rematbench.inputs.load import load_system, names
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import build
from rematbench.problem import Problem
from tests.problems import all_methods, layers, plan_of, problem, tight

METHODS = all_methods()
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "sharded": {"dp": 4, "zero_stage": 3, "global_batch": 8},
    "pipelined": {"pp": 4, "tp": 2, "global_batch": 6},
}
METHODS_OF = {"lynx_opt": ("rematbench", "huggingface-deepspeed")}
"""The stacks of a method that solves a program for each stack; others run on all stacks."""
OTHERS = [name for name in METHODS.methods if name not in ("memo", "lynx_opt")]
PAIRS = [pair for name in OTHERS for pair in (f"{name}+memo", f"memo+{name}")]
QUICK = ("memo", "mst+memo", "balanced_checkpointing+memo", "lynx_heu")
"""What runs on one eager stack in every run of the tests."""
INSIDE = re.compile(r"\b[LEH]\d*\.\w+|\w+Error|Traceback|<.*>")
"""Names of storages and of Python, which a refusal must not show."""


def on_stack(system: str, layout: str) -> Problem:
    """A model of 12 layers, so that each of 4 stages has more than memo exempts."""
    attention: Any = "unfused" if load_system(system).kernels.attention == "unfused" else "flash"
    given = problem(model=layers(12), system=system, attention=attention, **LAYOUTS[layout])
    return replace(given, evaluator=evaluate)


def require_plan_or_words(spec: str, given: Problem, **settings: Any) -> None:
    """The plan keeps the contract, or its refusal is in a user's words."""
    method = METHODS.resolve(spec, settings)
    answer = method.plan(given)
    if isinstance(answer, Unsupported):
        assert answer.reason
        assert not INSIDE.search(answer.reason), answer.reason
    elif len(method.methods) == 1:
        check_plan(method.methods[0], given)
    else:
        assert isinstance(answer, Plan)
        check(lower(answer, given))


@pytest.fixture(autouse=True)
def _few_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver stops after a few nodes: every plan that it returns must be sound."""
    monkeypatch.setattr("rematbench.solve.layer_policies.MAX_NODES", 5)


def cases() -> Iterator[Any]:
    """(method or pair, stack); those outside the quick slice are marked."""
    for spec in (*METHODS.methods, *PAIRS):
        for system in METHODS_OF.get(spec, names("system")):
            quick = spec in QUICK and system == "huggingface-deepspeed"
            yield pytest.param(spec, system, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("spec", "system"), [*cases()])
def test_it_plans_or_refuses_in_a_users_words(spec: str, system: str, layout: str) -> None:
    given = on_stack(system, layout)
    require_plan_or_words(spec, given)
    if spec in ("lynx_opt", "lynx_heu", "pp_offload"):  # what they drop depends on the device
        require_plan_or_words(spec, tight(given, 0.5))
    for settings in METHODS.methods["memo"].grid if spec == "memo" else ():
        require_plan_or_words(spec, given, **settings)


def offloaded(given: Problem, **settings: Any) -> set[str]:
    """The activations of a layer of which memo copies bytes to the host."""
    (rank,) = lower(plan_of(given, "memo", **settings), given).ranks
    made = (x.storage for block in rank.blocks for a in block.actions for x in a.allocs)
    return {storage.tensor for storage in made if storage.place == HOST}


def test_a_held_layer_input_leaves_whole_where_tokens_are_rebuilt() -> None:
    """An eager norm saves copies of its input, from which nothing can be rebuilt."""
    given = on_stack("huggingface-deepspeed", "one")
    assert "layer_input" not in given.layer(0).saved
    assert "layer_input" in offloaded(given, alpha=0.5)
    assert plan_of(given, "memo", alpha=0.5).held == ("layer_input",)
    assert plan_of(given, "memo", alpha=1.0).held == ()


# -- methods on stacks whose eager norms save no layer input: what rebuilds from it holds it -------


REGISTRY = all_methods()
KEEP = ("q", "attn_out")
SLOW = {"point": "front"}
"""A search of half a minute, for ./bench soak."""
MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "selective_recompute": (
        {"keep": KEEP},
        {"keep": KEEP, "scope": "layer"},
        {"activations": ("mlp_norm_scaled",), "scope": "layer"},
        {"ops": ("attn_norm",)},
    ),
    "balanced_checkpointing": ({"point": "full"}, SLOW),
    "full_recompute": ({"num_layers": 2}, {"method": "block"}, {"every": 2}),
}
CASES = [
    pytest.param(name, settings, marks=[pytest.mark.soak] if settings == SLOW else [])
    for name, entry in REGISTRY.methods.items()
    for settings in ({}, *entry.grid, *MORE.get(name, ()))
]
PLACES: tuple[dict[str, int], ...] = ({}, {"pp": 4, "tp": 2, "global_batch": 6})


@pytest.mark.parametrize("system", ["huggingface", pytest.param("mst-hf", marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_method_lowers_on_it(system: str, name: str, settings: dict[str, Any]) -> None:
    method = build(REGISTRY.methods[name], settings)
    for layout in PLACES:
        attention = "unfused" if system == "huggingface" else "flash"
        given = problem(system=system, attention=attention, **layout)
        check_plan(method, replace(given, evaluator=evaluate))


def held(name: str, **settings: Any) -> tuple[str, ...]:
    p = problem(system="huggingface", attention="unfused")
    plan = build(REGISTRY.methods[name], settings).plan(p, p.base_plan)
    assert isinstance(plan, Plan)
    return plan.held


def test_inputs_are_held_only_where_a_rebuild_starts_from_them() -> None:
    assert "layer_input" not in problem(system="huggingface").layer(0).saved
    assert held("selective_recompute") == ()
    assert held("selective_recompute", keep=KEEP) == ("layer_input",)
    assert held("selective_recompute", activations=("fc2_in",)) == ()
    assert held("balanced_checkpointing") == ("layer_input",)
    assert held("balanced_checkpointing", point="none") == ()
    assert held("full_recompute") == ("layer_input",)
