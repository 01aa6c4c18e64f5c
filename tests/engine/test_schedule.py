"""Closed forms of the schedules: who is in flight, in which order, in which phase."""

from collections import Counter

import pytest

from rematbench.engine.lowering.schedule import interleaved, passes, phases
from rematbench.plan import Pass

INTERLEAVED = [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 9), (8, 5, 16), (4, 6, 256)]


def in_flight(order: tuple[Pass, ...]) -> int:
    """The most (chunk, micro-batch) pairs between forward and backward at one time on the rank."""
    live = peak = 0
    for step in order:
        live += 1 if step.forward else -1
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(("pp", "vpp", "m"), INTERLEAVED)
def test_interleaved_chunks_in_flight(pp: int, vpp: int, m: int) -> None:
    for rank in range(pp):
        order = passes("interleaved_1f1b", rank, pp, vpp, m)
        assert in_flight(order) == (vpp - 1) * pp + 2 * (pp - rank - 1) + 1


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 2), (4, 3), (4, 9), (8, 8)])
def test_1f1b_and_gpipe_in_flight(pp: int, m: int) -> None:
    for rank in range(pp):
        assert in_flight(passes("1f1b", rank, pp, 1, m)) == min(pp - rank, m)
        assert in_flight(passes("gpipe", rank, pp, 1, m)) == m


@pytest.mark.parametrize("vpp", [2, 3])
def test_one_group_of_micro_batches_runs_all_forwards_first(vpp: int) -> None:
    for rank in range(4):
        assert in_flight(passes("interleaved_1f1b", rank, 4, vpp, 4)) == 4 * vpp


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_one_group_by_the_rule_of_warm_up_alone(pp: int) -> None:
    """As megatron-core 0.16.1 runs it: the last rank alternates after pp forwards of two chunks."""
    orders = [interleaved(rank, pp, 2, pp) for rank in range(pp)]
    assert [in_flight(order) for order in orders] == [
        min(2 * pp, pp + 2 * (pp - rank - 1) + 1) for rank in range(pp)
    ]
    assert orders[-1][pp : pp + 2] == (Pass(True, 0, 1), Pass(False, 0, 1))
    more = passes("interleaved_1f1b", 0, pp, 2, 2 * pp)
    assert interleaved(0, pp, 2, 2 * pp) == more


@pytest.mark.parametrize(("pp", "vpp", "m"), [*INTERLEAVED, (4, 1, 6), (1, 1, 5)])
def test_every_pass_happens_once_and_forward_first(pp: int, vpp: int, m: int) -> None:
    name = "interleaved_1f1b" if vpp > 1 else "1f1b"
    for rank in range(pp):
        order = passes(name, rank, pp, vpp, m)  # type: ignore[arg-type]
        assert Counter(order) == Counter(
            Pass(forward, i, c) for forward in (True, False) for i in range(m) for c in range(vpp)
        )
        at = {item: position for position, item in enumerate(order)}
        assert all(
            at[Pass(True, i, c)] < at[Pass(False, i, c)] for i in range(m) for c in range(vpp)
        )


def words(order: tuple[Pass, ...]) -> str:
    return " ".join(f"{'F' if p.forward else 'B'}{p.micro_batch}.{p.chunk}" for p in order)


def test_literal_1f1b() -> None:
    assert words(passes("1f1b", 0, 2, 1, 3)) == "F0.0 F1.0 B0.0 F2.0 B1.0 B2.0"
    assert words(passes("1f1b", 1, 2, 1, 3)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0"
    assert words(passes("gpipe", 1, 2, 1, 3)) == "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0"


def test_literal_interleaved() -> None:
    """Groups of pp micro-batches go through chunk 0, then chunk 1; backwards in reverse."""
    assert words(passes("interleaved_1f1b", 0, 2, 2, 4)) == (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )
    assert words(passes("interleaved_1f1b", 1, 2, 2, 4)) == (
        "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 F2.0 B0.0 F3.0 B1.0 F2.1 B2.1 F3.1 B3.1 B2.0 B3.0"
    )


def test_phases_are_those_of_the_forward() -> None:
    """Warm-up: forwards before the one that precedes the first backward; cool-down: backwards
    after the last forward's own turn."""
    by_site = phases(passes("1f1b", 0, 4, 1, 8))
    assert [by_site[i, 0] for i in range(8)] == [
        *["warmup"] * 3, *["steady"] * 2, *["cooldown"] * 3
    ]  # fmt: skip
    assert set(phases(passes("1f1b", 3, 4, 1, 8)).values()) == {"steady"}
