"""Methods that place optimizer states: what they plan, and what they refuse."""

import dataclasses
from functools import cache
from typing import Any

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.evaluate.result import evaluate_method
from rematbench.evaluate.verdict import judge
from rematbench.evidence.bands import with_host_rates
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from rematbench.solve.state_pieces import shares
from tests.problems import all_methods, layers, on, problem, remade, tight
from tests.tables import tables

METHODS = ("zero_offload", "twinflow", "deep_optimizer_states", "optimizer_offload")
UNDER = ("full_recompute", "memo:alpha=0.5", "balanced_checkpointing", "mst", "lynx_heu")
SMALL: dict[str, str] = {
    "zero_offload": "zero_offload:size=4000",
    "twinflow": "twinflow:ratio=0.5,size=4000",
    "deep_optimizer_states": "deep_optimizer_states:size=4000",
    "optimizer_offload": "optimizer_offload:share=0.75,size=4000",
}


@cache
def given(rate: float | None = 1e9) -> Problem:
    made = problem(model=layers(4), dp=2, zero_stage=1, global_batch=2)
    return remade(on(made, host_update_parameters_per_s=rate), evaluator=evaluate)


def planned(spec: str, made: Problem, **settings: Any) -> Plan | Unsupported:
    return all_methods().resolve(spec, settings or None, made).plan(made)


@pytest.mark.parametrize("under", UNDER)
@pytest.mark.parametrize("name", METHODS)
def test_each_composes_with_every_method_of_activations(name: str, under: str) -> None:
    made = given()
    for spec in (f"{under}+{SMALL[name]}", f"{SMALL[name]}+{under}"):
        plan, alone = planned(spec, made), planned(under, made)
        if isinstance(alone, Unsupported):
            continue
        assert isinstance(plan, Plan), plan
        check(lower(plan, made))
        optimizer, rules = plan.state("optimizer"), plan.rules
        assert optimizer.pieces is not None
        assert rules == alone.rules
        whole, cut = evaluate(made, alone), evaluate(made, plan)
        assert cut.ranks[0].optimizer < whole.ranks[0].optimizer


def counts(plan: Plan | Unsupported, made: Problem) -> dict[str, float]:
    assert isinstance(plan, Plan)
    (count,) = shares(made, plan)
    found = plan.state("optimizer").counts(count)
    return {place: found[place] / count for place in found}  # type: ignore[index]


def test_shares_are_those_that_were_asked_for() -> None:
    made = given()
    assert counts(planned(SMALL["zero_offload"], made), made)["host"] == 1.0
    half = counts(planned(SMALL["twinflow"], made), made)
    assert half["device"] == pytest.approx(0.5, abs=0.1)
    every = counts(planned("deep_optimizer_states:interleave=4,size=500", made), made)
    assert every["visit"] == pytest.approx(0.25, abs=0.02)
    ours = planned("optimizer_offload:share=0.5,visiting=0.6,size=500", made)
    assert counts(ours, made)["visit"] == pytest.approx(0.3, abs=0.02)


def test_ours_takes_the_least_that_fits_and_nothing_if_all_fits() -> None:
    made = given()
    assert planned("optimizer_offload:size=500", made).state("optimizer").pieces is None  # type: ignore[union-attr]
    less = dataclasses.replace(tight(made, 0.8), evaluator=evaluate)
    plan = planned("optimizer_offload:size=500", less)
    assert isinstance(plan, Plan)
    assert plan.fit["bound"] == "device ledger"
    share = float(plan.fit["share"])
    assert 0.0 < share < 1.0
    assert less.cost.headroom_bytes(plan) >= 0
    (count,) = shares(less, plan)
    step = 1 / -(-count // 500)
    smaller = planned("optimizer_offload:size=500", less, share=share - step)
    assert isinstance(smaller, Plan)
    assert less.cost.headroom_bytes(smaller) < 0


def test_the_fraction_of_visits_ends_both_together() -> None:
    """No other fraction is faster by more than the length of a piece."""
    made = given()
    share = made.cost.visiting_share(two_way=True)
    steps = {
        f: evaluate(made, plan).step_s
        for f in (0.0, 0.25, share, 1.0)
        if isinstance(plan := planned("optimizer_offload:share=1,size=500", made, visiting=f), Plan)
    }
    assert steps[share] <= min(steps.values()) * 1.02


def test_a_visit_shortens_its_copy_by_the_delay_of_the_host() -> None:
    """f* = t_cpu / (t_cpu + t_copy - t_delay), in closed form."""
    cost, many = given().cost, 10**9
    cpu_s = cost.host_update_beside_s(many, 0.0)
    up_s, down_s = (
        cost.copy_s(cost.system.states.optimizer_bytes * many, way) for way in ("h2d", "d2h")
    )
    delay_s = cost.common.visit_delay_share * up_s
    assert delay_s > 0.0
    expected = cpu_s / (cpu_s + up_s + down_s - delay_s)
    assert cost.visiting_share(two_way=False) == pytest.approx(expected)


def test_without_a_host_rate_ours_visits_and_the_others_take_the_middle_of_known_rates() -> None:
    made = given(None)
    assert made.cost.visiting_share(two_way=True) == 1.0
    plan = planned("optimizer_offload:share=1,size=500", made)
    assert counts(plan, made)["visit"] == 1.0
    assert isinstance(plan, Plan)
    assert not evaluate(made, plan).not_timed
    for name in METHODS[:3]:
        untimed = evaluate_method(made, all_methods().resolve(SMALL[name]))
        assert untimed.not_timed
        found = with_host_rates(untimed)
        assert found.tokens_per_s_per_gpu
        assert found.error_band is not None
        assert "host rate" in found.error_band.outside
    other = evaluate_method(made.remade(backend="fa3"), all_methods().resolve(SMALL[METHODS[0]]))
    first = evaluate_method(made, all_methods().resolve(SMALL[METHODS[0]]))
    bands = [with_host_rates(each).error_band for each in (first, other)]
    assert bands[0] != bands[1]  # another attention kernel has another step


@pytest.mark.parametrize(("spec", "words"), tables(__file__)["refused"])
def test_what_is_not_lossless_or_placed_twice_is_refused(spec: str, words: str) -> None:
    refused = planned(spec, given())
    assert isinstance(refused, Unsupported)
    assert words in refused.reason


def test_short_host_memory_is_said_with_its_bytes() -> None:
    made = given()
    plan = planned(SMALL["zero_offload"], made)
    assert isinstance(plan, Plan)
    small = remade(on(made, host_bytes=2**30, host_other_bytes=3 * 2**30), evaluator=evaluate)
    verdict = judge(small, evaluate(small, plan))
    short = -verdict.host_headroom_bytes
    assert short == evaluate(small, plan).host_node_bytes - small.cost.host_room_bytes
    assert short > 0
    assert verdict.binds == f"host memory of a node: {short / 2**30:.2f} GiB short"
