"""Blocks that neither Llama nor GPT has: every method plans them, parameters are counted once, and
the torch runtime and the packages refuse them by name."""

from dataclasses import replace as replaced
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.method_contract import check_plan
from rematbench.evaluate.proof import check
from rematbench.plugins.registry import build
from rematbench.problem import Problem, rank_parameters
from rematbench.workload import Model
from rematbench.worlds.records.refusals import refusals
from tests.problems import BLOCKS, GPT, LLAMA, all_methods, problem

METHODS = all_methods().methods
QUICK = sorted(METHODS.keys() - {"lynx_opt"})
LAYOUTS: tuple[dict[str, int], ...] = (
    {},
    {"pp": 2, "tp": 2, "global_batch": 4},
    {"tp": 2, "cp": 2},
    {"dp": 2, "zero_stage": 3, "global_batch": 4},
)


def given(name: str, system: str, layout: dict[str, int], base: Model = LLAMA) -> Problem:
    attention = "flash" if layout.get("cp", 1) > 1 else "unfused"
    model = replace(base, **BLOCKS[name])
    return problem(model=model, system=system, attention=attention, **layout)


@pytest.mark.parametrize("method", QUICK)
@pytest.mark.parametrize("name", BLOCKS)
def test_every_method_plans_every_block(name: str, method: str) -> None:
    plans = build(METHODS[method], {})
    for layout in LAYOUTS:
        stage = min(layout.get("zero_stage", 1), 1 if name == "experts" else 3)
        there = given(name, "rematbench", layout | {"zero_stage": stage})
        check_plan(plans, replaced(there, evaluator=evaluate))
    for layout in (LAYOUTS[0], LAYOUTS[1]):
        check_plan(plans, replaced(given(name, "huggingface", layout), evaluator=evaluate))


@pytest.mark.parametrize("base", [LLAMA, GPT], ids=["llama", "gpt"])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_tables_count_each_parameter_once(name: str, base: Model) -> None:
    whole = given(name, "rematbench", {}, replace(base, max_positions=32))
    model = whole.workload.model
    assert rank_parameters(whole, whole.base_plan, 0) == model.parameters
    assert check(lower(whole.base_plan, whole)).ranks == 1  # it raises where the order is wrong


EXECUTED = {"experts", "latent attention"}
"""The special feature that the runtime has."""


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_refused_by_name_where_it_is_not_built(name: str) -> None:
    p = given(name, "rematbench", {})
    words = p.workload.model.special_features
    assert words
    assert set(words) - EXECUTED <= set(refusals(p, p.base_plan))
    assert LLAMA.special_features == GPT.special_features == ()


def saved(name: str, **changes: Any) -> int:
    model = replace(LLAMA, **BLOCKS[name] | changes)
    return problem(model=model).layer(0).saved_bytes


def test_what_each_fact_adds_to_the_saved_bytes() -> None:
    """In elements of 2 bytes for each of 32 tokens."""
    plain = problem().layer(0).saved_bytes
    row, tokens = LLAMA.hidden * 2, 32
    assert saved("parallel") == plain - row * tokens  # both norms read the layer's input
    shared = {"qk_norm": False}
    assert saved("shared", **shared) == plain - 2 * row * tokens  # and one norm's output
    after = saved("after", qk_norm=False) - plain
    assert after == 0  # two norms' inputs in place of two norms' outputs
    relu = saved("embedding", mlp="gelu") - saved("embedding")
    assert relu == LLAMA.ffn * 2 * tokens
