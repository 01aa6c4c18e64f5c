"""What is rebuilt where: groups and mini-sequences, windows and pieces, outputs that are kept."""

from collections import Counter

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import Program
from rematbench.evaluate.proof import check
from rematbench.plan import Group, MiniSequence, PlanError, Recompute, Rule, Select, Window
from tests.problems import LLAMA, half, layers, plan_of, problem, rule, transfers

MLP = ("mlp_norm", "fc1", "act", "mul", "fc2")


def of_kind(program: Program, kind: Kind) -> list[Action]:
    return [a for a, *_ in program.ranks[0].actions() if a.kind is kind]


@pytest.mark.parametrize("degrees", [{}, {"cp": 2}])
def test_a_group_of_layers_is_run_again_once_though_pieces_come_back_later(
    degrees: dict[str, int],
) -> None:
    """The second layer of a group is not run as a whole again in its own turn."""
    given = problem(model=layers(2), **degrees)
    plan = plan_of(given, "full_recompute", num_layers=2)
    plan = replace(plan, mini_sequences=(MiniSequence(MLP, 2),))
    program = lower(plan, given)
    check(program)
    again = Counter((a.part, a.op) for a in of_kind(program, Kind.RECOMPUTE))
    assert again["L0", "qkv"] == again["L1", "qkv"] == given.layout.num_micro_batches


def test_rules_share_a_group_and_groups_of_other_phases_are_others() -> None:
    given = problem(pp=2, global_batch=4, model=layers(4))
    shared = [rule(Recompute(scope=Group(0, 1)), name, layers=(0, 1)) for name in ("q", "fc2_in")]
    other = Rule(
        Select(parts=("layer",), layers=(1,), activations=("fc2_in",), phases=("cooldown",)),
        Recompute(scope=Group(1, 1)),
    )
    early = Rule(replace(other.select, layers=(0,)), Recompute(scope=Group(0, 0)))
    check(lower(given.base_plan.with_rules(*shared[1:], other, early), given))
    check(lower(given.base_plan.with_rules(*shared), given))


def test_a_window_beside_a_piece_rebuilds_whole_what_is_whole() -> None:
    """fc1's collective runs once for each piece; attention cannot run on a share of its rows."""
    given = problem(model=layers(2), tp=2, sp=False)
    pieces = MiniSequence(("fc1", "act", "mul", "fc2"), 3)
    beside = rule(Recompute(window=Window(op="fc1", direction="backward")), "lse", "act_out")
    program = lower(replace(given.base_plan.with_rules(beside), mini_sequences=(pieces,)), given)
    check(program)
    shares = {a.op: a.rows.fraction for a in of_kind(program, Kind.RECOMPUTE)}
    assert shares["attention"] == 1.0
    assert shares["act"] < 1.0


def test_a_gather_beside_its_gemm_is_waited_for_though_a_window_rebuilds_there() -> None:
    given = problem(
        model=layers(2), tp=2, system_changes={"tp_overlap": "gemm", "gemm_overlap_links": "all"}
    )
    beside = rule(Recompute(window=Window(op="proj", direction="backward")), "attn_norm_out")
    check(lower(given.base_plan.with_rules(beside), given))


def test_a_layer_run_again_whole_makes_no_collective_of_what_is_kept() -> None:
    given = problem(model=replace(layers(2), post_norm=True), tp=2, sp=False)
    whole = rule(Recompute(scope="layer", whole=True), "v")
    program = lower(given.base_plan.with_rules(whole), given)
    check(program)
    reduced = [a for a in of_kind(program, Kind.ALL_REDUCE) if a.stream == "tp"]
    assert reduced
    assert all(a.reads for a in reduced)


def test_one_slot_cannot_take_turns_with_itself() -> None:
    given = problem(model=replace(LLAMA, num_layers=4), pp=4, global_batch=8)
    plan = transfers(given.base_plan.with_rules(half()), reload_slots=1)
    with pytest.raises(PlanError, match=r"reload_slots 1: .*0 .* or at least 2"):
        lower(plan, given)
