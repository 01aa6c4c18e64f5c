"""What a plan becomes beyond tests/golden: issue orders, and what is refused by name."""

import pickle
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import Program
from rematbench.evaluate.proof import check
from rematbench.plan import (
    Group,
    MiniSequence,
    Offload,
    Pass,
    Plan,
    PlanError,
    Recompute,
    Rule,
    Select,
    Split,
    StateFate,
    Window,
)
from tests.problems import (
    BALANCED,
    LLAMA,
    SKELETAL,
    by_layer,
    half,
    layers,
    plan_of,
    problem,
    rule,
    transfers,
)
from tests.program_text import parse_storage
from tests.strategies import grouped
from tests.tables import tables

TABLES = tables(__file__)


def steps(program: Program, rank: int) -> str:
    """The labels of a rank's steps."""
    of = program.ranks[rank]
    return " ".join(f"{of.blocks[s.block].label}{s.micro_batch}.{s.chunk}" for s in of.steps)


def actions(program: Program, *kinds: Kind) -> list[Action]:
    return [a for r in program.ranks for a, _, _ in r.actions() if not kinds or a.kind in kinds]


def block(program: Program, label: str) -> list[str]:
    """Kind and operator of the compute actions of a rank's first block of a label."""
    found = next(b for b in program.ranks[0].blocks if b.label == label)
    return [f"{a.kind.value} {a.op}" for a in found.actions if a.stream == "compute" and a.op]


def test_without_p2p_overlap_a_send_is_waited_for_at_once() -> None:
    changes = {"p2p_overlap": "none"}
    given = problem(model=layers(2), pp=2, global_batch=2, system_changes=changes)
    assert steps(lower(given.base_plan, given), 0) == (
        "F0.0 send_f0.0 free_sent_f0.0 F1.0 send_f1.0 free_sent_f1.0 recv_b0.0 B0.0 recv_b1.0 "
        "B1.0 OPT0.0"
    )


def test_literal_steps_of_chunk_offload() -> None:
    """D2H after the forward, freed a pass later (or when it comes back); H2D beside the previous
    backward, the first one's beside the last forward."""
    given = problem(model=layers(1), global_batch=3)
    plan = replace(given.base_plan, schedule="gpipe").with_rules(half())
    assert steps(lower(transfers(plan, release_lag=1), given), 0) == (
        "F0.0 D2H0.0 F1.0 D2H1.0 free_d2h0.0 H2D0.0 F2.0 D2H2.0 free_d2h1.0 H2D1.0 B0.0 "
        "free_d2h2.0 H2D2.0 B1.0 B2.0 OPT0.0"
    )


def test_scope_decides_when() -> None:
    """Consumer: just before its first reader in the backward; layer: when the layer's starts."""
    given = problem(model=layers(1))
    for scope, expected in (
        ("consumer", ["B fc1", "W fc1", "R mlp_norm", "B mlp_norm"]),
        ("layer", ["R mlp_norm", "B fc2"]),
    ):
        fate = Recompute(scope=scope)  # type: ignore[arg-type]
        trace = block(lower(given.base_plan.with_rules(rule(fate, "mlp_norm_out")), given), "B")
        at = trace.index("R mlp_norm")
        first = trace.index(expected[0] if scope == "layer" else "B fc1")
        assert at == first if scope == "layer" else at == first - 1


def test_a_group_is_rebuilt_once_in_forward_order() -> None:
    given = problem(model=layers(3))
    program = lower(given.base_plan.with_rules(*grouped(given.base_plan.partition)), given)
    order = [a.part for a in actions(program, Kind.RECOMPUTE) if a.op == "qkv"]
    assert order == ["L0", "L1", "L2"]
    trace = block(program, "B")
    assert trace.index("B final_norm") < trace.index("R attn_norm") < trace.index("B fc2")


def test_layer_copies_run_ahead_by_the_prefetch() -> None:
    given = problem(model=layers(4))
    for ahead in (1, 2):
        plan = by_layer(given.base_plan.with_rules(*SKELETAL), prefetch_layers=ahead)
        trace = [
            f"{a.kind.value} {a.part}"
            for a in next(b for b in lower(plan, given).ranks[0].blocks if b.label == "B").actions
            if a.op == "lse" or (a.kind is Kind.BACKWARD_INPUT and a.op == "attention")
        ]
        loads, backwards = [[t for t in trace if t[0] == kind] for kind in "HB"]
        assert loads == [f"H2D L{i}" for i in (3, 2, 1, 0)]
        assert trace.index("B L3") == ahead + 1
        assert backwards == [f"B L{i}" for i in (3, 2, 1, 0)]


# -- refusals -------------------------------------------------------------------------------------

ORPHAN = r"L\d\.layer_input: recomputation needs it, but it is dropped and no operator computes it"
ILLEGAL: list[tuple[str, tuple[Rule, ...], str]] = [
    ("chunk input, by consumer", (rule(Recompute(), "layer_input"),), ORPHAN),
    ("chunk input, whole layer", (rule(Recompute(scope="layer", whole=True)),), ORPHAN),
    ("chunk input, as a group", (rule(Recompute(scope=Group(first=0, last=3))),), ORPHAN),
    (
        "part of attention",
        (rule(Split(recompute=0.5), "attn_out"),),
        "attention needs all rows: recompute all of them or none",
    ),
    ("no such tensor", (rule(Offload(), "wing_out"),), r"matches no saved tensor: .*'wing_out'"),
    ("no such layer", (rule(Offload(), layers=(4,)),), r"matches no saved tensor: .*layers=\(4,\)"),
    (
        "groups that overlap",
        (
            rule(Recompute(scope=Group(0, 2)), "fc2_in", layers=(0, 1)),
            rule(Recompute(scope=Group(1, 3)), "gate_out", layers=(2, 3)),
        ),
        "group 0-2 and group 1-3 overlap",
    ),
    (
        "one layer in two groups",
        (
            rule(Recompute(scope=Group(0, 3)), "fc2_in"),
            rule(Split(recompute=0.5, scope=Group(2, 3)), "gate_out", layers=(2, 3)),
        ),
        "group 0-3 and group 2-3 overlap",
    ),
    (
        "a layer outside its group",
        (rule(Recompute(scope=Group(0, 1)), "fc2_in", layers=(3,)),),
        "fc2_in of layer 3 is rebuilt with group 0-1, which does not contain it",
    ),
    (
        "the head in a group",
        (Rule(Select(parts=("head",)), Recompute(scope=Group(0, 1))),),
        "of head is rebuilt with group 0-1, which does not contain it",
    ),
]


@pytest.mark.parametrize(("case", "rules", "message"), ILLEGAL, ids=[c[0] for c in ILLEGAL])
def test_illegal_rules(case: str, rules: tuple[Rule, ...], message: str) -> None:
    given = problem()
    with pytest.raises(PlanError, match=message):
        lower(given.base_plan.with_rules(*rules), given)


@pytest.mark.parametrize(("partition", "message"), TABLES["partitions"])
def test_illegal_partitions(partition: Any, message: str) -> None:
    given = problem(pp=2, global_batch=2)
    stages = tuple(tuple(map(tuple, rank)) for rank in partition)
    with pytest.raises(PlanError, match=message):
        lower(replace(given.base_plan, partition=stages), given)


def test_a_chunk_holds_something() -> None:
    given = problem(pp=2, vpp=2, global_batch=2)
    lower(replace(given.base_plan, partition=(((), (2, 3)), ((0, 1), ()))), given)
    with pytest.raises(PlanError, match="an empty chunk in the middle"):
        lower(replace(given.base_plan, partition=(((0, 1), (2, 3)), ((), ()))), given)


def test_optimizer_in_backward_needs_one_micro_batch() -> None:
    given = problem(global_batch=2)
    update = StateFate(kind="optimizer", update="backward")
    with pytest.raises(PlanError, match="needs one micro-batch per step, not 2"):
        lower(replace(given.base_plan, states=(update,)), given)


def test_a_problem_in_another_process_makes_its_own_chunks() -> None:
    """What lowering knows of a problem's chunks stays where it was made."""
    p = problem()
    plan = p.base_plan.with_rules(BALANCED)
    plan = replace(plan, mini_sequences=(MiniSequence(ops=("fc1", "act", "mul", "fc2"), count=4),))
    here = lower(plan, p)
    assert p.chunks
    sent = pickle.loads(pickle.dumps(p))
    assert not sent.chunks
    assert lower(plan, sent) == here
    sent.chunks.update(p.chunks)  # also of tables that are equal and not the same
    assert lower(plan, sent) == here


# -- what a plan's states and mini-sequences become: gathers, reductions, updates, pieces ----------


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
    with pytest.raises(PlanError, match="2 pipeline stages exchange the gradient of tied"):
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


@pytest.mark.parametrize(("ops", "count", "message"), TABLES["mini_sequences"])
def test_illegal_mini_sequences(ops: list[str], count: int, message: str) -> None:
    given = problem()
    plan = replace(given.base_plan, mini_sequences=(MiniSequence((*ops,), count),))
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


# -- what is rebuilt where -------------------------------------------------------------------------


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
