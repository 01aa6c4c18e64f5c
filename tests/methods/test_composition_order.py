"""What composes with what: in one order only, or where the base has left something to decide."""

from typing import Any

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.evaluate.evaluation import evaluate
from rematbench.evaluate.proof import check
from rematbench.plan import Fate, Offload, Plan, Recompute, Rule, Select, Split
from rematbench.problem import Problem
from rematbench.solve.kept import kept_activations, parted_activations
from tests.problems import all_methods, layers, on, plan_of, problem, refusal, remade, rule

SMALL = {"granularity": 256, "min_bytes": 512}
SETTINGS: dict[str, dict[str, Any]] = {
    "memo": {"alpha": 0.5, "exempt_layers": 1},
    "pp_offload": {"alpha": 0.6, **SMALL},
}


def pipeline(num_layers: int = 8, **degrees: Any) -> Problem:
    layout = {"pp": 4, "global_batch": 8, **degrees}
    return problem(model=layers(num_layers), seq_len=64, **layout)


def with_room(given: Problem, share: float) -> Problem:
    """On devices that hold so much of what keeping everything needs."""
    given = remade(given, evaluator=evaluate)
    usable = int(share * given.cost.peak_bytes(given.base_plan))
    return on(given, hbm_bytes=usable + given.non_torch_bytes)


def sound(given: Problem, spec: str, **settings: Any) -> Plan:
    """The plan, which lowers and is safe."""
    plan = plan_of(given, spec, **settings)
    check(lower(plan, given))
    return plan


def in_pieces(given: Problem, base: Plan) -> Plan:
    """Mini-sequences on a base of rules, which lowers and is safe."""
    (method,) = all_methods().resolve("mst", {"mlp_chunks": 3}).methods
    plan = method.plan(given, base)
    assert isinstance(plan, Plan), plan
    check(lower(plan, given))
    return plan


@pytest.mark.parametrize("offloads", SETTINGS)
def test_what_offloads_goes_first(offloads: str) -> None:
    sound(pipeline(), f"{offloads}+mst", mlp_chunks=3, **SETTINGS[offloads])


@pytest.mark.parametrize("min_bytes", [512, 1 << 30])
@pytest.mark.parametrize("alpha", [0.05, 0.6, 1.0])
@pytest.mark.parametrize("before", ["", "balanced_checkpointing+"])
def test_pieces_take_what_the_loss_saves_from_an_offloader(
    before: str, alpha: float, min_bytes: int
) -> None:
    """With one group of micro-batches the budget reaches the head too, whose largest tensor that
    is; a budget that spares small tensors has still matched it."""
    given = pipeline(vpp=2, global_batch=4)
    budget = {"alpha": alpha, "granularity": 256, "min_bytes": min_bytes}
    plan = sound(given, f"{before}pp_offload+mst", mlp_chunks=3, **budget)
    actions = [action for r in lower(plan, given).ranks for action, _, _ in r.actions()]
    kinds = {action.kind for action in actions if action.op in ("loss", "loss_saved")}
    assert Kind.RECOMPUTE in kinds
    assert Kind.D2H not in kinds
    assert "loss" in plan.fit if min_bytes == 512 else "loss" not in plan.fit


def test_a_rule_for_some_micro_batches_counts_too() -> None:
    """What the first micro-batch does not do, a later one may."""
    given = pipeline()
    base = given.base_plan.with_rules(
        rule(Offload(), "up_out", micro_batches=(1, 3)),
        rule(Recompute(), "gate_out", micro_batches=(0, 1)),
    )
    assert {"up_out", "gate_out"} <= kept_activations(given, base)
    assert parted_activations(given, base) == {"up_out"}
    in_pieces(given, base)


@pytest.mark.parametrize("fate", [Split(recompute=0.5), Split(offload=0.5), Offload()])
def test_pieces_are_cut_where_the_base_parts_nothing_but_the_loss(fate: Fate) -> None:
    """A user's own rules: rows of the loss's softmax or of an inner tensor that part ways."""
    given = pipeline()
    loss = Select(parts=("head",), activations=("loss_saved",))
    plan = in_pieces(given, given.base_plan.with_rules(Rule(loss, fate), rule(fate, "up_out")))
    assert [sequence.ops[0] for sequence in plan.mini_sequences] == ["lm_head"]
    assert str(plan.fit["mlp"]).endswith("part of up_out")


@pytest.mark.parametrize("offloads", SETTINGS)
@pytest.mark.parametrize("between", ["", "full_recompute+"])
def test_the_other_order_is_refused_by_name_and_says_which_to_take(
    offloads: str, between: str
) -> None:
    """Also where the base has rebuilt what is computed in pieces in some layers only."""
    more = {"mlp_chunks": 3, **SETTINGS[offloads]} | ({"method": "block"} if between else {})
    reason = refusal(pipeline(16), f"mst+{between}{offloads}", **more)
    assert "mini-sequences" in reason
    assert "name the offloading method before the mini-sequence method" in reason


def test_a_search_for_a_share_of_pieces_is_refused_unless_nothing_has_to_go() -> None:
    searched = {"mlp_chunks": 3, **SMALL}
    roomy, tight = (with_room(pipeline(), share) for share in (1.5, 0.5))
    assert sound(roomy, "mst+pp_offload", **searched).fit["alpha"] == 0.0
    assert "in mini-sequences" in refusal(tight, "mst+pp_offload", **searched)


@pytest.mark.parametrize("before", ["", "balanced_checkpointing+"])
def test_an_offloader_refuses_a_base_that_has_nothing_left_where_it_offloads(before: str) -> None:
    alphas = {"memo.alpha": 0.5, "pp_offload.alpha": 0.5}
    more = {"point": "full"} if before else {}
    reason = refusal(pipeline(16), f"{before}memo+pp_offload", **alphas, **more)
    assert reason == "pp_offload: the base keeps no activation of the chunks that are offloaded"


@pytest.mark.parametrize(
    ("base", "rebuilds", "settings"),
    [
        ("pp_offload", "lynx_opt", {"alpha": 0.3, **SMALL}),
        ("full_recompute", "lynx_heu", {"method": "block"}),
    ],
)
def test_a_rule_that_finds_nothing_in_its_layers_is_left_out(
    rebuilds: str, base: str, settings: dict[str, Any]
) -> None:
    """Kept somewhere is not kept in the layers that a rule is about."""
    sound(with_room(pipeline(), 0.6), f"{base}+{rebuilds}", **settings)


@pytest.mark.parametrize("share", [0.1, 0.5])
@pytest.mark.parametrize("rebuilds", ["lynx_heu", "lynx_opt"])
def test_where_the_base_rebuilds_all_nothing_is_chosen(rebuilds: str, share: float) -> None:
    """With half of the room some ranks fit, and their programme has no variable."""
    given = with_room(pipeline(), share)
    alone = sound(given, "full_recompute")
    both = sound(given, f"full_recompute+{rebuilds}")
    assert both.rules == alone.rules
    assert both.fit["bound"] == "no choice fits the device memory"


@pytest.mark.parametrize(("rebuilds", "num_layers"), [("lynx_heu", 2), ("lynx_opt", 3)])
def test_groups_of_layers_are_refused_where_windows_read_inputs_before_their_turn(
    rebuilds: str, num_layers: int
) -> None:
    given = with_room(pipeline(16, tp=2), 0.8)
    reason = refusal(given, f"{rebuilds}+full_recompute", num_layers=num_layers)
    assert f"num_layers=1, not {num_layers}" in reason
    for settings in ({}, {"num_layers": num_layers, "method": "block"}):
        plan_of(given, f"{rebuilds}+full_recompute", **settings)


def test_groups_of_which_nothing_is_left_are_left_out() -> None:
    """memo has taken all but each rank's last layers."""
    plan = sound(pipeline(16), "memo+full_recompute", num_layers=2, alpha=0.5)
    again = plan.rules[2:]
    assert {layer for rule in again for layer in rule.select.layers or ()} == {14, 15}


def test_every_nth_layer_of_fewer_than_n_is_refused() -> None:
    reason = refusal(problem(), "full_recompute", every=9)
    assert reason == "full_recompute: every=9 selects none of the 4 layers"
    assert "method=uniform" in refusal(problem(), "full_recompute", every=9, method="block")


@pytest.mark.parametrize("degrees", [{"pp": 2, "vpp": 2}, {"pp": 2, "vpp": 4}])
def test_bubbles_are_filled_in_chunks_that_have_some(degrees: dict[str, int]) -> None:
    """With one group of micro-batches only a rank's last chunk has a cool-down."""
    given = pipeline(tp=2, global_batch=degrees["pp"], **degrees)
    for share in (0.5, 0.8):
        sound(with_room(given, share), "lynx_opt")
