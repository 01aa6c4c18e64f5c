"""Optimizer states in host memory and in pieces, executed: AdamW on a thread of its own, equal
weights after each step, and the ledger's bytes."""

import dataclasses
import threading
from collections.abc import Iterable, Iterator
from functools import cache

import pytest
import torch
from msgspec.structs import replace

from rematbench.costs.states import shard
from rematbench.engine.lowering import lower as lowering
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import HOST_UPDATE, STATES_DOWN, WEIGHTS_UP, Action, Kind
from rematbench.engine.program.program import Block, Program
from rematbench.evaluate.proof import CheckError, check
from rematbench.inputs.system import with_facts
from rematbench.plan import Pieces, Plan
from rematbench.problem import rank_parameters
from rematbench.workload import Precision
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch import piece_states, worker
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.parameters import Parameter
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.engine.test_ready_pieces import EARLY, one_unit_early
from tests.engine.test_state_pieces import MIXES, in_pieces
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.threads import ThreadStreams

STEPS, PARTS = 3, 7
PLACES = ("hosted", *MIXES, *(f"early {mix}" for mix in EARLY))
"""Where the optimizer's states are: in host memory, in pieces, or in pieces that start in the last
backward."""


def hosted(plan: Plan) -> Plan:
    """The plan with its optimizer in host memory."""
    kept = tuple(state for state in plan.states if state.kind != "optimizer")
    return replace(plan, states=(*kept, replace(plan.state("optimizer"), home="host")))


def pair(
    place: str, layout: str, plan: str, precision: Precision = "fp32", *also: str
) -> tuple[Case, Case]:
    """A plan as it is, and with its optimizer states at one of PLACES (pieces are of odd sizes); on
    equal batches.  `also`: further kinds of states in host memory."""
    whole = cases.case(layout, plan, precision=precision)
    if place == "hosted":
        moved = hosted(whole.plan)
    else:
        mix, early = place.removeprefix("early "), place.startswith("early ")
        shards = whole.plan.state("optimizer").shards
        ranks = range(whole.problem.layout.pp)
        least = min(shard(rank_parameters(whole.problem, whole.plan, n), shards) for n in ranks)
        pieces: Pieces = replace(MIXES[mix], size=least // PARTS | 1)
        pieces = replace(pieces, start="ready", clip=False) if early else pieces
        moved = in_pieces(whole.plan, pieces, *also)
    return whole, dataclasses.replace(whole, name=f"{whole.name} {place}", plan=moved)


def weights(given: Case, delay_s: float = 0.0) -> Iterator[list[torch.Tensor]]:
    """All weights after each of some steps of a case with one rank."""
    device = torch.device("cpu")
    groups = worker._groups(given, 0, {})
    model = RankModel(given.problem, given.plan, groups.place, device, given.seed)
    streams = ThreadStreams(0, delay_s) if delay_s else None
    program = lower(given.plan, given.problem).ranks[0]
    executor = Executor(program, model, groups, optimizer=given.optimizer, streams=streams)
    for step in range(STEPS):
        worker._load(given, executor, step)
        executor.run_step()
        yield [parameter.flat.clone() for parameter in model.parameters.values()]


@cache
def whole_weights(plan: str, precision: Precision) -> list[list[torch.Tensor]]:
    return list(weights(cases.case("one", plan, precision=precision)))


def same(whole: Iterable[list[torch.Tensor]], given: Iterable[list[torch.Tensor]]) -> list[bool]:
    """Whether all weights are equal bit by bit, after each step."""
    return [all(map(torch.equal, a, b)) for a, b in zip(whole, given, strict=True)]


@pytest.mark.parametrize(
    ("place", "plan", "precision", "delay_s"),
    [
        *((place, "keep", kind, 0.0) for place in ("hosted", *MIXES) for kind in ("fp32", "bf16")),
        *(("hosted", "offload-layers", kind, 0.0) for kind in ("fp32", "bf16")),
        *(
            (f"early {mix}", "offload-layers", "fp32", delay)
            for mix in EARLY
            for delay in (0, 0.002)
        ),
        ("hosted", "keep", "fp32", 0.01),
        ("k5", "offload-layers", "fp32", 0.005),
    ],
)
def test_the_same_weights_after_each_step(
    place: str, plan: str, precision: Precision, delay_s: float
) -> None:
    """Also where copies are late."""
    _, given = pair(place, "one", plan, precision)
    whole = whole_weights(plan, precision)
    assert same(whole, weights(given, delay_s=delay_s)) == [True] * STEPS


def test_updates_run_on_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    update = Parameter.update

    def noted(self: Parameter, *given: object) -> None:
        seen.append(threading.current_thread().name)
        update(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Parameter, "update", noted)
    for case, own in zip(pair("hosted", "one", "keep"), (False, True), strict=True):
        seen.clear()
        list(weights(case))
        assert {name.startswith("host_update") for name in seen} == {own}


def test_a_failure_on_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Parameter, *given: object) -> None:
        raise RuntimeError("no update")

    monkeypatch.setattr(Parameter, "update", fails)
    _, given = pair("hosted", "one", "keep")
    with pytest.raises(Exception, match="no update"):
        next(weights(given))


@pytest.mark.parametrize("place", ["hosted", *MIXES, "early k2", "early all three"])
def test_bytes_are_the_ledgers(place: str) -> None:
    """And 12 bytes a parameter leave the device: the master copy and two moments."""
    whole, cut = pair(place, "one", "keep")
    results = [laws.run_here(case) for case in (whole, cut)]
    assert laws.same_bits(*results)
    assert laws.bytes_differ(cut, results[1]) == []
    grid.check_gradients(cut, results[1])
    before, left = (result.ranks[0].state_bytes for result in results)
    counts = cut.plan.state("optimizer").counts(cut.problem.workload.model.parameters)
    assert before - left == 12 * (counts["host"] + counts["visit"])


@pytest.mark.full
@pytest.mark.parametrize("place", ["hosted", "all three", "k2", "early all three", "early k2"])
def test_sharded(place: str) -> None:
    """Several ranks have the same bits, and the ledger's bytes."""
    layouts = ("dp2", "pp2") if place == "hosted" else ("dp2", "pp2", "tp2", "dp2-zero3")
    layouts = layouts[1:] if "early" in place else layouts
    pairs = [pair(place, layout, "keep") for layout in layouts]
    results = execute_cases([case for each in pairs for case in each], timeout_s=240.0)
    for (_, case), whole, moved in zip(pairs, results[::2], results[1::2], strict=True):
        assert (whole.status, moved.status) == ("ok", "ok"), (whole.reason, moved.reason)
        assert laws.same_bits(whole, moved)
        assert laws.bytes_differ(case, moved) == []


@pytest.mark.full
def test_gradients_at_home_on_the_host_are_read_there() -> None:
    kinds = ("gradient",)
    whole, cut = pair("host", "dp2-zero3", "keep", "bf16", *kinds)
    results = execute_cases([whole, cut], timeout_s=240.0)
    assert [result.status for result in results] == ["ok", "ok"], results[1].reason
    assert laws.bytes_differ(cut, results[1]) == []


# -- what must be seen ----------------------------------------------------------------------------


def without(case: Case, op: str, part: str) -> Case:
    """The case whose program leaves out a copy of a piece, but records its end."""
    (rank,) = lower(case.plan, case.problem).ranks
    end = rank.blocks[-1]
    (copy,) = [a for a in end.actions if (a.op, a.part) == (op, part)]

    ended = Action(kind=Kind.EVENT, stream=copy.stream, event=copy.event)
    left = tuple(ended if action is copy else action for action in end.actions)
    blocks = (*rank.blocks[:-1], Block(end.label, left))
    return dataclasses.replace(case, program=Program(ranks=(replace(rank, blocks=blocks),)))


@pytest.mark.parametrize(("op", "part"), [(STATES_DOWN, "P1"), (WEIGHTS_UP, "P2")])
def test_a_left_out_copy_is_found_by_check_and_by_the_weights(
    op: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = pair("k2", "one", "keep")
    broken = without(cut, op, part)
    assert broken.program is not None
    with pytest.raises(CheckError, match=part):
        check(broken.program)
    monkeypatch.setitem(globals(), "lower", lambda plan, problem: broken.program)
    left = list(weights(broken))
    monkeypatch.undo()
    assert not same(weights(whole), left)[-1]  # states that stayed behind show one step later


def test_a_piece_updated_with_another_range_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = pair("k2", "one", "keep")
    of = piece_states.Range.of

    def shifted(self: piece_states.Range, piece: torch.Tensor) -> torch.Tensor:
        return of(self._replace(at=0), piece)

    monkeypatch.setattr(piece_states.Range, "of", shifted)
    assert not any(same(weights(whole), weights(cut)))


def test_a_piece_that_starts_a_unit_early_shows_in_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, cut = pair("early host", "one", "keep")
    monkeypatch.setattr(lowering, "ready_pieces", one_unit_early)
    assert not same(weights(whole), weights(cut))[-1]  # apart from the first late gradient on


def test_a_removed_wait_of_the_host_shows_in_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host updates before the gradients of the step have arrived."""
    whole, cut = pair("early host", "one", "keep")
    (rank,) = lower(cut.plan, cut.problem).ranks
    blocks = tuple(
        Block(b.label, tuple(a for a in b.actions
                             if not (a.stream == HOST_UPDATE and a.kind is Kind.WAIT)))
        for b in rank.blocks
    )  # fmt: skip
    broken = Program(ranks=(replace(rank, blocks=blocks),))
    correct = list(weights(whole))
    monkeypatch.setitem(globals(), "lower", lambda plan, made: broken)
    assert not same(correct, weights(cut, delay_s=0.01))[-1]


def test_what_is_not_executed_is_refused_by_name() -> None:
    _, mixed = pair("k2", "dp2-zero3", "keep", "bf16", "gradient")
    assert refusals(mixed.problem, mixed.plan) == [
        "pieces on the device with gradients on the host"
    ]
    _, wide = pair("k2", "one", "keep", "bf16")
    system = with_facts(wide.problem.system, optimizer_bytes=8)
    narrow = dataclasses.replace(wide.problem, system=system)
    assert refusals(narrow, wide.plan) == ["pieces of optimizer states of 8 bytes, not 12"]
