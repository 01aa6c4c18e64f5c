"""Pieces that start in the last backward, executed: the weights of a start after the norm."""

import dataclasses

import pytest
from msgspec.structs import replace

from rematbench.engine.lowering import lower as lowering
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import HOST_UPDATE, Kind
from rematbench.engine.program.program import Block, Program
from rematbench.workload import Precision
from rematbench.worlds.torch.case import Case
from tests.engine.test_ready_pieces import EARLY, one_unit_early
from tests.worlds.torch import grid, laws
from tests.worlds.torch.test_host_update import STEPS, check_ranks, same, weights
from tests.worlds.torch.test_state_pieces import pair


def early(layout: str, plan: str, mix: str, precision: Precision = "fp32") -> tuple[Case, Case]:
    """A plan without pieces, and with pieces that start as their gradients become ready."""
    whole, cut = pair(layout, plan, mix, precision)
    optimizer = cut.plan.state("optimizer")
    assert optimizer.pieces is not None
    pieces = replace(optimizer.pieces, start="ready", clip=False)
    others = tuple(state for state in cut.plan.states if state.kind != "optimizer")
    states = (*others, replace(optimizer, pieces=pieces))
    return whole, dataclasses.replace(cut, plan=replace(cut.plan, states=states))


@pytest.mark.parametrize("mix", EARLY)
@pytest.mark.parametrize("delay_s", [0.0, 0.002])
def test_the_same_weights_after_each_step(mix: str, delay_s: float) -> None:
    whole, cut = early("one", "offload-layers", mix)
    assert same(weights(whole), weights(cut, delay_s=delay_s)) == [True] * STEPS


@pytest.mark.parametrize("mix", ["k2", "all three"])
def test_bytes_are_the_ledgers(mix: str) -> None:
    whole, cut = early("one", "keep", mix)
    results = [laws.run_here(case) for case in (whole, cut)]
    assert laws.same_bits(*results)
    assert laws.bytes_differ(cut, results[1]) == []
    grid.check_gradients(cut, results[1])


@pytest.mark.full
@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2-zero3"])
def test_sharded(layout: str) -> None:
    check_ranks([early(layout, "keep", mix) for mix in ("all three", "k2")])


def test_a_piece_that_starts_a_unit_early_shows_in_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, cut = early("one", "keep", "host")
    monkeypatch.setattr(lowering, "ready_pieces", one_unit_early)
    assert not same(weights(whole), weights(cut))[-1]  # apart from the first late gradient on


def test_a_removed_wait_of_the_host_shows_in_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host updates before the gradients of the step have arrived."""
    whole, cut = early("one", "keep", "host")
    (rank,) = lower(cut.plan, cut.problem).ranks
    blocks = tuple(
        Block(b.label, tuple(a for a in b.actions
                             if not (a.stream == HOST_UPDATE and a.kind is Kind.WAIT)))
        for b in rank.blocks
    )  # fmt: skip
    broken = Program(ranks=(replace(rank, blocks=blocks),))
    correct = list(weights(whole))
    monkeypatch.setattr("tests.worlds.torch.test_host_update.lower", lambda plan, made: broken)
    assert not same(correct, weights(cut, delay_s=0.01))[-1]
