"""What a plan's states and mini-sequences become: gathers, reductions, updates, pieces."""

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import Program
from rematbench.evaluate.proof import check
from rematbench.plan import MiniSequence, Pass, Plan, PlanError, Split, StateFate
from tests.problems import LLAMA, layers, problem, rule
from tests.program_text import parse_storage


def actions(program: Program, *kinds: Kind) -> list[Action]:
    return [a for r in program.ranks for a, _, _ in r.actions() if a.kind in kinds]


def with_state(plan: Plan, fate: StateFate) -> Plan:
    return replace(plan, states=(*(s for s in plan.states if s.kind != fate.kind), fate))


@pytest.mark.parametrize(("stage", "kind"), [(0, Kind.ALL_REDUCE), (1, Kind.REDUCE_SCATTER)])
def test_gradients_are_reduced_once_per_chunk(stage: int, kind: Kind) -> None:
    given = problem(model=layers(4), pp=2, vpp=2, dp=2, zero_stage=stage, global_batch=8)
    program = lower(given.base_plan, given)
    assert len([a for a in actions(program, kind) if a.op == "gradients"]) == 4
    gathers = [a for a in actions(program, Kind.ALL_GATHER) if a.op == "parameters"]
    assert len(gathers) == (4 if stage else 0)


def test_overlapped_reduction_goes_by_buckets() -> None:
    changes = {"reduce_overlap": True, "bucket_bytes": 1}
    given = problem(model=layers(3), dp=2, global_batch=4, system_changes=changes)
    reduces = [
        (a.part, mb)
        for a, mb, _ in lower(given.base_plan, given).ranks[0].actions()
        if a.op == "gradients" and a.exchange.comm
    ]
    assert reduces == [(part, 1) for part in ("H", "L2", "L1", "L0", "E")]


def test_any_order_gathers_in_its_first_forward_and_reduces_in_its_last_backward() -> None:
    changes = {"reduce_overlap": True, "gather_overlap": True, "bucket_bytes": 1}
    given = problem(model=layers(2), dp=2, zero_stage=1, global_batch=4, system_changes=changes)
    order = (Pass(True, 1, 0), Pass(True, 0, 0), Pass(False, 1, 0), Pass(False, 0, 0))
    program = lower(replace(given.base_plan, orders=(order,)), given)
    check(program)
    exchanged = [(a.op, a.part, mb) for a, mb, _ in program.ranks[0].actions() if a.stream == "dp"]
    parts = ("E", "L0", "L1", "H")
    assert [e for e in exchanged if e[0] == "parameters"] == [("parameters", p, 1) for p in parts]
    assert [e for e in exchanged if e[0] == "gradients"] == [
        ("gradients", part, 0) for part in reversed(parts)
    ]


@pytest.mark.parametrize("stage", [2, 3])
def test_tied_embeddings_on_one_rank_share_weight_and_gradient(stage: int) -> None:
    model = replace(layers(2), tied_embeddings=True)
    given = problem(model=model, dp=2, zero_stage=stage, global_batch=2)
    program = lower(given.base_plan, given)
    check(program)
    walk = [action for action, _, _ in program.ranks[0].actions()]
    heads = [a for a in walk if (a.part, a.op) == ("H", "lm_head") and a.stream == "compute"]
    assert {parse_storage("E.parameters") in a.reads for a in heads} == {stage == 3}
    gathers = [a.part for a in walk if a.kind is Kind.ALL_GATHER and a.op == "parameters"]
    if stage == 3:
        assert gathers.count("E") == 4  # its forward and backward, the head's forward and backward
    buffer = parse_storage("E.gradients")
    made = next(i for i, a in enumerate(walk) if a.allocs and a.allocs[0].storage is buffer)
    freed = next(i for i, a in enumerate(walk) if buffer in a.frees)
    weight = next(i for i, a in enumerate(walk) if a.kind is Kind.BACKWARD_WEIGHT and a.part == "H")
    assert made < weight < freed
    assert {a.part for a in walk[weight:freed]} >= {"H", "L1", "L0", "E"}


def test_an_embedding_that_stays_is_not_gathered_for_the_head() -> None:
    """As the root group of FSDP does."""
    model = replace(layers(2), tied_embeddings=True)
    given = problem(model=model, dp=2, zero_stage=3, global_batch=2)
    fate = replace(given.base_plan.state("parameter"), keeps_ends=True)
    program = lower(with_state(given.base_plan, fate), given)
    check(program)
    gathers = [a for a in actions(program, Kind.ALL_GATHER) if a.op == "parameters"]
    assert [a.part for a in gathers].count("E") == 1
    heads = [a for a in actions(program, Kind.FORWARD) if (a.part, a.op) == ("H", "lm_head")]
    assert all(parse_storage("E.parameters") in a.reads for a in heads)


def test_layers_that_are_never_released_are_refused() -> None:
    given = problem(model=layers(1), dp=2, zero_stage=3, global_batch=2)
    fate = replace(given.base_plan.state("parameter"), release="never")
    with pytest.raises(PlanError, match="gathered per layer must be released"):
        lower(with_state(given.base_plan, fate), given)


def test_tied_embeddings_exchange_their_gradient() -> None:
    given = problem(model=replace(layers(3), tied_embeddings=True), pp=3, global_batch=3)
    program = lower(given.base_plan, given)
    tied = [a for r in program.ranks for a, _, _ in r.actions() if a.op == "tied"]
    assert [a.kind for a in tied] == [Kind.SEND, Kind.RECV] * 2
    assert {a.nbytes for a in tied} == {4 * 128 * LLAMA.hidden}
    check(program)


@pytest.mark.parametrize("dp", [1, 2])
def test_optimizer_in_backward_updates_unit_by_unit(dp: int) -> None:
    """With peers each unit's gradients are reduced right before its update."""
    given = problem(model=layers(2), dp=dp, zero_stage=1, global_batch=dp)
    fate = replace(given.base_plan.state("optimizer"), update="backward")
    program = lower(with_state(given.base_plan, fate), given)
    check(program)
    found = [(a.kind, a.part) for a in actions(program, Kind.OPTIMIZER, Kind.REDUCE_SCATTER)]
    kinds = [Kind.OPTIMIZER] if dp == 1 else [Kind.REDUCE_SCATTER, Kind.OPTIMIZER]
    assert found == [(kind, part) for part in ("H", "L1", "L0", "E") for kind in kinds]


def test_tied_ends_of_a_pipeline_are_not_updated_before_their_exchange() -> None:
    tied = replace(layers(2), tied_embeddings=True)
    update = StateFate(kind="optimizer", update="backward")
    one, two = problem(model=tied), problem(model=tied, pp=2, global_batch=1)
    check(lower(replace(one.base_plan, states=(update,)), one))
    with pytest.raises(PlanError, match="tied embeddings over 2 pipeline stages"):
        lower(replace(two.base_plan, states=(update,)), two)


# -- mini-sequences -------------------------------------------------------------------------------


def test_a_ragged_tail_is_a_smaller_last_piece() -> None:
    """32 rows in 3 pieces: 11, 11, 10 (MsT drops no tail)."""
    given = problem(model=layers(1))
    plan = replace(given.base_plan, mini_sequences=(MiniSequence(("lm_head", "loss"), 3),))
    program = lower(plan, given)
    logits = given.head.activations["logits"]
    pieces = [a.allocs[0] for a in actions(program, Kind.FORWARD) if a.op == "lm_head"]
    assert [p.nbytes // logits.row_bytes for p in pieces] == [11, 11, 10]
    assert [str(p.storage) for p in pieces] == ["H.logits%0", "H.logits%1", "H.logits%2"]


@pytest.mark.parametrize(
    ("ops", "count", "message"),
    [
        (("attention",), 2, "attention is not row-local"),
        (("fc1", "fc2"), 2, "operators must be contiguous"),
        (("lm_head",), 33, "33 pieces of 32 rows"),
        (("conv",), 2, "matches no operator of this model"),
        (("fc2", "mlp_add"), 2, "mlp_add returns whole gradients"),
        (("attn_add", "mlp_norm"), 2, "attn_add returns whole gradients"),
    ],
)
def test_illegal_mini_sequences(ops: tuple[str, ...], count: int, message: str) -> None:
    given = problem()
    plan = replace(given.base_plan, mini_sequences=(MiniSequence(ops, count),))
    with pytest.raises(PlanError, match=message):
        lower(plan, given)


def test_an_operator_is_in_one_mini_sequence_only() -> None:
    runs = (MiniSequence(("fc1", "act"), 2), MiniSequence(("act", "mul"), 2))
    given = problem()
    with pytest.raises(PlanError, match="act is in two mini-sequences"):
        lower(replace(given.base_plan, mini_sequences=runs), given)


def test_a_part_of_what_pieces_make_cannot_be_rebuilt() -> None:
    given = problem(model=replace(LLAMA, post_norm=True))
    mlp = MiniSequence(("mlp_norm", "fc1", "act", "mul", "fc2"), 2)
    plan = replace(given.base_plan, mini_sequences=(mlp,))
    split = rule(Split(recompute=0.5), "fc2_out")
    with pytest.raises(PlanError, match=r"L\d.fc2_out is computed in a mini-sequence"):
        lower(plan.with_rules(split), given)
    inside = rule(Split(recompute=0.5), "fc2_in")
    with pytest.raises(PlanError, match=r"L\d.fc2_in is inside a mini-sequence"):
        lower(plan.with_rules(inside), given)
