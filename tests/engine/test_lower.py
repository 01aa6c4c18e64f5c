"""What a plan becomes beyond tests/golden: issue orders, and what is refused by name."""

import pickle
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import Program
from rematbench.plan import (
    Group,
    MiniSequence,
    Offload,
    PlanError,
    Recompute,
    Rule,
    Select,
    Split,
    StateFate,
)
from tests.problems import BALANCED, SKELETAL, by_layer, half, layers, problem, rule, transfers
from tests.strategies import grouped


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

ORPHAN = r"L\d\.layer_input: recomputation needs it, but it is dropped and has no producer"
ILLEGAL: list[tuple[str, tuple[Rule, ...], str]] = [
    ("chunk input, by consumer", (rule(Recompute(), "layer_input"),), ORPHAN),
    ("chunk input, whole layer", (rule(Recompute(scope="layer", whole=True)),), ORPHAN),
    ("chunk input, as a group", (rule(Recompute(scope=Group(first=0, last=3))),), ORPHAN),
    (
        "part of attention",
        (rule(Split(recompute=0.5), "attn_out"),),
        "attention is not row-local: recompute all of its rows or none",
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


@pytest.mark.parametrize(
    ("partition", "message"),
    [
        ((((0, 1),), ((2,),)), "contain every layer once, in order"),
        ((((0, 1),), ((2, 2, 3),)), "contain every layer once, in order"),
        ((((2, 3),), ((0, 1),)), "contain every layer once, in order"),
        ((((0, 1, 2, 3),),), r"\[1\] chunks per rank, but the layout needs \[1, 1\]"),
        ((((0, 1), (2, 3)), ((), ())), r"\[2, 2\] chunks per rank, but the layout needs \[1, 1\]"),
    ],
)
def test_illegal_partitions(partition: Any, message: str) -> None:
    given = problem(pp=2, global_batch=2)
    with pytest.raises(PlanError, match=message):
        lower(replace(given.base_plan, partition=partition), given)


def test_a_chunk_holds_something() -> None:
    given = problem(pp=2, vpp=2, global_batch=2)
    lower(replace(given.base_plan, partition=(((), (2, 3)), ((0, 1), ()))), given)
    with pytest.raises(PlanError, match="a chunk that holds nothing"):
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
