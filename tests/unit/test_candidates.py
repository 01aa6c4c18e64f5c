"""What `compare` tries, and how well it says predictions are validated: rules without names."""

import dataclasses
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.choose.candidates import (
    KINDS,
    Candidate,
    Made,
    changed_kinds,
    clash,
    composed,
    compositions,
    load_compare,
)
from rematbench.cost.constants import FitRule
from rematbench.plan import (
    MiniSequence,
    Offload,
    Plan,
    Recompute,
    Rule,
    Select,
    Split,
    Transfers,
)
from rematbench.plugins.discover import discover
from rematbench.plugins.policies import Policy, present
from rematbench.problem import Problem
from rematbench.published.accuracy import Accuracy, Group, Promise
from rematbench.published.evidence import Known, evidence, known_cells
from rematbench.spec.layout import Layout
from rematbench.spec.load import calibration
from tests.problems import make_problem


def demo(system: str = "megatron-kwai") -> Problem:
    layout = Layout(pp=4, vpp=2, global_batch=8, zero_stage=1)
    return make_problem(
        model="llama-7b", cluster="a800-80gb", system=system, layout=layout, seq_len=12288
    )


# -- the rule of compositions -----------------------------------------------------------------


def made(name: str, *kinds: Any, tuned: bool = False) -> Made:
    candidate = Candidate(name=name, origin="method", methods=(name,), method=name)
    return Made(candidate=candidate, plan=demo().base_plan, kinds=frozenset(kinds), tuned=tuned)


def named(groups: list[tuple[Made, ...]]) -> set[str]:
    return {"+".join(made.candidate.name for made in group) for group in groups}


def test_methods_compose_when_they_change_different_things() -> None:
    a, b, c = made("a", "rebuild"), made("b", "offload"), made("c", "ends", "pieces")
    assert named(compositions([c, b, a], 3)) == {"a+b", "a+c", "b+c", "a+b+c"}
    assert named(compositions([a, b, c], 2)) == {"a+b", "a+c", "b+c"}
    both = made("d", "rebuild", "offload")
    assert named(compositions([b, both, a], 3)) == {"a+b", "a+d"}
    assert named(compositions([both, c], 3)) == {"d+c"}
    assert compositions([a, made("nothing")], 3) == []


def test_only_one_of_a_composition_is_tuned_to_fit() -> None:
    one, two = made("a", "rebuild", tuned=True), made("b", "offload", tuned=True)
    assert compositions([one, two], 2) == []
    assert named(compositions([one, replace(two, tuned=False)], 2)) == {"a+b"}


def test_kinds_are_read_off_the_plan() -> None:
    base = demo().base_plan
    layer = Select(parts=("layer",))
    cases: list[tuple[Any, set[str]]] = [
        (base, set()),
        (base.with_rules(Rule(layer, Recompute())), {"rebuild"}),
        (base.with_rules(Rule(layer, Offload())), {"offload"}),
        (base.with_rules(Rule(layer, Split(offload=0.5, recompute=0.5))), {"offload", "rebuild"}),
        (base.with_rules(Rule(Select(parts=("head",)), Recompute())), {"ends"}),
        (replace(base, mini_sequences=(MiniSequence(("fc1",), 2),)), {"pieces"}),
        (replace(base, schedule="gpipe"), {"partition"}),
        (base.noting(alpha=1.0), set()),
    ]
    for plan, kinds in cases:
        assert changed_kinds(base, plan) == kinds
    assert {kind for _, kinds in cases for kind in kinds} | {"states"} == set(KINDS)


def test_a_composition_plans_on_the_plan_before_it() -> None:
    group = (made("a", "rebuild"), made("b", "offload"))
    base = demo().base_plan.noting(mark=1.0)
    candidate = composed(group, base)
    assert (candidate.method, candidate.base, candidate.family) == ("b", base, "a+b")


def test_operators_that_a_model_has_not_are_left_out() -> None:
    settings = present(
        {"ops": ["fc1", "act", "mul"], "scope": "layer"}, demo(system="megatron-core")
    )
    assert settings == {"ops": ["fc1", "act"], "scope": "layer"}


def test_policies_name_known_methods_and_say_why() -> None:
    registry = discover()
    for policy in load_compare().policies:
        assert isinstance(policy, Policy)
        registry.resolve(policy.method, policy.settings)
        assert policy.name.partition(":")[0] == policy.method
        assert policy.why.strip()


# -- evidence ---------------------------------------------------------------------------------


def cell(**changes: Any) -> Known:
    given: dict[str, Any] = {
        "family": "memo", "system": "megatron-kwai", "cluster": "a800-80gb",
        "generation": "ampere", "seq_len": 12288, "gpus": 8, "split": "held-out", "group": "g",
        "accepted": 0.05, "error": None,
    }  # fmt: skip
    return Known(**{**given, **changes})


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({}, 1),
        ({"seq_len": 4096}, 2),
        ({"cluster": "a100-80gb-selene", "system": "megatron-lm"}, 3),
        ({"family": "mst"}, 4),
        ({"family": "mst", "system": "megatron-lm"}, 5),
        ({"generation": "hopper", "cluster": "h800-80gb"}, 0),
    ],
)
def test_the_strictest_rule_with_a_cell_decides(changes: dict[str, Any], rule: int) -> None:
    found = evidence(demo(), "memo", [cell(**changes)], 2.0)
    assert found.rule == rule
    assert found.grade == ("held-out" if rule else None)


def test_held_out_cells_come_before_in_sample_and_fitted_are_no_evidence() -> None:
    p = demo()
    fitted, shaped = cell(split="fitted"), cell(split="in-sample", accepted=0.01)
    assert evidence(p, "memo", [fitted, shaped, cell()], 2.0).grade == "held-out"
    assert evidence(p, "memo", [fitted, shaped], 2.0).error == 0.01
    alone = evidence(p, "memo", [fitted], 2.0)
    assert (alone.grade, alone.error) == ("fitted", None)
    far = cell(seq_len=1024, accepted=0.2)
    assert evidence(p, "memo", [fitted, far], 2.0).rule == 2


@pytest.mark.parametrize(
    ("section", "changes", "rule"),
    [
        ("cluster", {}, 1),
        ("cluster", {"name": "mine", "hbm_bytes": 1 << 36}, 1),
        ("cluster", {"peak_flop_per_s": 1.2e14}, 3),
        ("cluster", {"constants": ()}, 3),
        ("system", {"name": "mine"}, 1),
        ("system", {"constants": ()}, 3),
        ("system", {"tp_overlap": "none"}, 3),
        ("system", {"attention": "fa1"}, 3),
    ],
)
def test_cells_are_alike_by_facts_and_constants_not_by_names(
    section: str, changes: dict[str, Any], rule: int
) -> None:
    p = demo()
    made = replace(getattr(p, section), **changes)
    given = dataclasses.replace(p, **{section: made})
    assert evidence(given, "memo", [cell()], 2.0).rule == rule


def test_errors_of_predicted_cells_replace_what_is_accepted() -> None:
    cells = [cell(error=0.02), cell(error=-0.04)]
    found = evidence(demo(), "memo", cells, 2.0)
    assert found.error == pytest.approx(0.03)
    assert found.cells == 2


def test_published_cells_are_known_once_with_their_split() -> None:
    promise = Promise(target=0.1, accepted=0.1, reason="", date="2026-01-01")  # type: ignore[arg-type]
    group = Group(name="g", rule=FitRule(source="S"), metric="tokens_per_s_per_gpu",
                  promises={"mean": promise})  # fmt: skip
    row = {
        "source": "S 2024", "table": "T", "system": "megatron-kwai", "cluster": "a800-80gb",
        "status": "ok", "tp": "1", "recompute": "balanced", "offload_fraction": "0.3",
        "seq_len": "4096", "tokens_per_s_per_gpu": "100", "pred_tokens_per_s_per_gpu": "110",
        "gpus": "4", "model": "m", "note": "", "cp": "1", "pp": "4",
    }  # fmt: skip
    rows = [row, {**row, "tokens_per_s_per_gpu": ""}, {**row, "cluster": "moon"}]
    twice = Accuracy(groups=(group, replace(group, name="h")))
    found = known_cells(rows, twice, calibration(), discover())
    assert [(c.family, c.group) for c in found] == [("balanced_checkpointing+pp_offload", "g")]
    assert found[0].error == pytest.approx(0.1)


def test_a_composition_may_not_overrule_its_base() -> None:
    """Judged by the composed plan: what the base left whole may change, what it decided may not."""
    p = demo()
    rebuilt = Rule(Select(parts=("layer",), activations=("fc2_in",)), Recompute())
    base = p.base_plan.with_rules(rebuilt)
    moved = Select(parts=("layer",), activations=("fc2_in",))
    cases: list[tuple[Plan, str]] = [
        (base.with_rules(Rule(Select(parts=("layer",), kept=True), Offload())), ""),
        (base.with_rules(Rule(moved, Offload())), "fc2_in"),
        (p.base_plan.with_rules(Rule(moved, Offload())), "rules"),
    ]
    for plan, what in cases:
        assert clash(p, base, plan) == what
    offloading = p.base_plan.with_rules(Rule(Select(parts=("layer",)), Offload()))
    assert (
        clash(p, offloading, replace(offloading, transfers=Transfers(release_lag=3))) == "transfers"
    )
    other = replace(p.base_plan, partition=p.base_plan.partition[::-1])
    assert clash(p, other, p.base_plan) == "partition"
    assert clash(p, p.base_plan, other) == ""
