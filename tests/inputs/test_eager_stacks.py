"""Methods on stacks whose eager norms save no layer input: what rebuilds from it holds it."""

from dataclasses import replace
from typing import Any

import pytest

from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.method_contract import check_plan
from rematbench.plan import Plan
from rematbench.plugins.registry import build
from tests.problems import all_methods, problem

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
LAYOUTS: tuple[dict[str, int], ...] = ({}, {"pp": 4, "tp": 2, "global_batch": 6})


@pytest.mark.parametrize("system", ["huggingface", pytest.param("mst-hf", marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_method_lowers_on_it(system: str, name: str, settings: dict[str, Any]) -> None:
    method = build(REGISTRY.methods[name], settings)
    for layout in LAYOUTS:
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
