"""Optimizer states in pieces, executed: equal weights after each step, and the ledger's bytes."""

import dataclasses

import pytest
import torch
from msgspec.structs import replace

from rematbench.costs.states import shard
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import STATES_DOWN, WEIGHTS_UP, Action, Kind
from rematbench.engine.program.program import Block, Program
from rematbench.evaluate.proof import CheckError, check
from rematbench.inputs.system import with_facts
from rematbench.plan import Pieces
from rematbench.problem import rank_parameters
from rematbench.workload import Precision
from rematbench.worlds.records.refusals import refusals
from rematbench.worlds.torch import piece_states
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.engine.test_state_pieces import MIXES, in_pieces
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.test_host_update import STEPS, check_ranks, same, weights

MIXED = tuple(MIXES)
PARTS = 7


def pair(
    layout: str, plan: str, mix: str, precision: Precision = "fp32", *also: str
) -> tuple[Case, Case]:
    """A plan as it is, and with its optimizer states in pieces, of odd sizes; on equal batches."""
    whole = cases.case(layout, plan, precision=precision)
    optimizer = whole.plan.state("optimizer")
    ranks = range(whole.problem.layout.pp)
    least = min(
        shard(rank_parameters(whole.problem, whole.plan, rank), optimizer.shards) for rank in ranks
    )
    pieces: Pieces = replace(MIXES[mix], size=least // PARTS | 1)
    cut = in_pieces(whole.plan, pieces, *also)
    return whole, dataclasses.replace(whole, name=f"{whole.name} {mix}", plan=cut)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mix", MIXED)
def test_the_same_weights_after_each_step(mix: str, precision: Precision) -> None:
    whole, cut = pair("one", "keep", mix, precision)
    assert same(weights(whole), weights(cut)) == [True] * STEPS


@pytest.mark.parametrize("mix", ["k5", "master"])
def test_the_same_weights_where_copies_are_late(mix: str) -> None:
    whole, cut = pair("one", "offload-layers", mix)
    assert same(weights(whole), weights(cut, delay_s=0.005)) == [True] * STEPS


@pytest.mark.parametrize("mix", MIXED)
def test_bytes_are_the_ledgers(mix: str) -> None:
    whole, cut = pair("one", "keep", mix)
    results = [laws.run_here(case) for case in (whole, cut)]
    assert laws.same_bits(*results)
    assert laws.bytes_differ(cut, results[1]) == []
    grid.check_gradients(cut, results[1])
    before, left = (result.ranks[0].state_bytes for result in results)
    counts = cut.plan.state("optimizer").counts(cut.problem.workload.model.parameters)
    assert before - left == 12 * (counts["host"] + counts["visit"])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp2", "pp2", "tp2", "dp2-zero3"])
def test_sharded(layout: str) -> None:
    check_ranks([pair(layout, "keep", mix) for mix in ("all three", "k2")])


@pytest.mark.full
def test_gradients_at_home_on_the_host_are_read_there() -> None:
    kinds = ("gradient",)
    whole, cut = pair("dp2-zero3", "keep", "host", "bf16", *kinds)
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
    whole, cut = pair("one", "keep", "k2")
    broken = without(cut, op, part)
    assert broken.program is not None
    with pytest.raises(CheckError, match=part):
        check(broken.program)
    monkeypatch.setattr(
        "tests.worlds.torch.test_host_update.lower", lambda plan, problem: broken.program
    )
    left = list(weights(broken))
    monkeypatch.undo()
    assert not same(weights(whole), left)[-1]  # states that stayed behind show one step later


def test_a_piece_updated_with_another_range_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = pair("one", "keep", "k2")
    of = piece_states.Range.of

    def shifted(self: piece_states.Range, piece: torch.Tensor) -> torch.Tensor:
        return of(self._replace(at=0), piece)

    monkeypatch.setattr(piece_states.Range, "of", shifted)
    assert not any(same(weights(whole), weights(cut)))


def test_what_is_not_executed_is_refused_by_name() -> None:
    _, mixed = pair("dp2-zero3", "keep", "k2", "bf16", "gradient")
    assert refusals(mixed.problem, mixed.plan) == [
        "pieces on the device with gradients on the host"
    ]
    _, wide = pair("one", "keep", "k2", "bf16")
    system = with_facts(wide.problem.system, optimizer_bytes=8)
    narrow = dataclasses.replace(wide.problem, system=system)
    assert refusals(narrow, wide.plan) == ["pieces of 8-byte optimizer states where it has 12"]
