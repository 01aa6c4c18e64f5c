"""KARMA: which layers leave on equal layers in closed form, what binds, and that it is safe."""

from itertools import pairwise
from math import floor, fsum
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.evaluate.proof import check
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import load_model
from rematbench.inputs.system import with_facts
from rematbench.plan import Offload, Plan, Recompute
from rematbench.problem import Problem
from rematbench.solve.kept import kept_activations
from rematbench.solve.layer_costs import forward_s
from tests.problems import make_problem, plan_of, refusal, remade

EIGHT = replace(load_model("llama2-7b"), num_layers=8)
LONG, SHORT = 131_072, 1_024
"""Tokens of a sequence at which every copy hides behind attention, and at which few do."""


def one(seq_len: int, *, model: Any = "llama2-7b", **layout: Any) -> Problem:
    return make_problem(
        model=model,
        cluster="a100-40gb-pcie",
        system="rematbench",
        layout=Layout(**{"global_batch": 4, **layout}),
        seq_len=seq_len,
    )


def chosen(plan: Plan, fate: type) -> list[int]:
    """The layers with a rule of this fate."""
    rules = [rule for rule in plan.rules if isinstance(rule.fate, fate)]
    return [layer for rule in rules for layer in rule.select.layers or ()]


def share(p: Problem) -> float:
    """t_forward / t_copy of a layer."""
    table = p.layer(0)
    kept = kept_activations(p, p.base_plan)
    copy_s = fsum(p.cost.copy_s(table.activations[name].nbytes, "d2h") for name in kept)
    return forward_s(p, table) / copy_s


@pytest.mark.parametrize("seq_len", [SHORT, 4 * SHORT, LONG // 4, LONG])
def test_the_swapped_share_of_equal_layers_is_forward_over_copy(seq_len: int) -> None:
    """Below the last layer, which nothing hides, floor(n share) of n layers leave."""
    p = one(seq_len)
    plan = plan_of(p, "karma", resident=0)
    swapped, rebuilt = chosen(plan, Offload), chosen(plan, Recompute)
    assert sorted(swapped + rebuilt) == list(range(32))
    assert 31 in rebuilt
    assert len(swapped) == floor(31 * min(1.0, share(p)))


def test_swaps_are_spread_evenly() -> None:
    p = one(SHORT)
    swapped = chosen(plan_of(p, "karma", resident=0), Offload)
    gaps = {b - a for a, b in pairwise(swapped)}
    assert max(gaps) - min(gaps) <= 1
    assert plan_of(p, "karma", resident=0).transfers.prefetch_layers == max(gaps)


def test_the_last_layers_stay_and_no_more_leave_than_memory_asks() -> None:
    p = one(SHORT, model=EIGHT, dp=4)
    assert plan_of(p, "karma").rules == ()
    short_by = p.cost.peak_bytes(p.base_plan) - p.cost.peak_bytes(plan_of(p, "karma", resident=0))
    room = p.cost.headroom_bytes(p.base_plan) + short_by // 2
    tight = remade(p, reserve_bytes=room)
    plan = plan_of(tight, "karma")
    left = sorted(chosen(plan, Offload) + chosen(plan, Recompute))
    assert left == list(range(len(left)))
    assert 0 < len(left) < 8
    assert tight.cost.headroom_bytes(plan) >= 0
    assert tight.cost.headroom_bytes(plan_of(tight, "karma", resident=8 - len(left) + 1)) < 0


def test_where_nothing_fits_it_says_so() -> None:
    p = one(LONG)
    assert plan_of(p, "karma").fit["bound"] == "no choice fits the device memory"


@pytest.mark.parametrize(
    "layout", [{}, {"pp": 2}, {"tp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "zero_stage": 3}], ids=str
)
def test_the_plan_is_proved_and_moves_and_rebuilds(layout: dict[str, int]) -> None:
    p = one(LONG, model=replace(EIGHT, num_layers=16), **layout)
    program = lower(plan_of(p, "karma", resident=0), p)
    check(program)
    kinds = {action.kind for rank in program.ranks for action, _, _ in rank.actions()}
    assert {Kind.RECOMPUTE, Kind.D2H, Kind.H2D} <= kinds


@pytest.mark.parametrize("seq_len", [SHORT, LONG])
def test_it_takes_its_rebuilds_and_less_than_rebuilding_all(seq_len: int) -> None:
    p = one(seq_len, model=EIGHT)
    base, plan = p.cost.step_s(p.base_plan), plan_of(p, "karma", resident=0)
    again = p.layout.num_micro_batches * forward_s(p, p.layer(0))
    more = p.cost.step_s(plan) - base
    assert len(chosen(plan, Recompute)) * again <= more
    assert more < p.cost.step_s(plan_of(p, "full_recompute")) - base


def test_rebuilds_cost_less_than_stalls() -> None:
    """With few copies hidden, a swap of every layer (memo's whole share) is slower."""
    p = one(SHORT, model=EIGHT)
    swaps = plan_of(p, "memo", alpha=1.0, exempt_layers=1)
    assert p.cost.step_s(plan_of(p, "karma", resident=1)) < p.cost.step_s(swaps)


def test_what_it_refuses() -> None:
    p = one(SHORT)
    without = remade(p, system=with_facts(p.system, features=()))
    assert "has no activation offload" in refusal(without, "karma")
    assert "keeps no activation to swap" in refusal(p, "memo:alpha=1,exempt_layers=0+karma")
