"""No race under random delays of copies and collectives, and a removed wait is found.

Streams are threads (tests.worlds.torch.threads), so that what a program does not order really
happens in any order; gradients are compared with the undelayed autograd model.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.storage import Event
from rematbench.worlds.torch.case import Case, NotFinite, Result
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.laws import run_here
from tests.worlds.torch.test_faults import Edit, edited, no_wait
from tests.worlds.torch.threads import ThreadStreams

DELAY_S = 2e-3
LONG_S = 2e-2
PLANS = ("offload", "offload-layers", "offload-slots", "skeletal")


def delayed(case: Case, seed: int, delay_s: float = DELAY_S) -> Case:
    """The case with streams as threads; one step, so that many repetitions are cheap."""
    name = f"{case.name} #{seed}"
    return replace(case, name=name, streams=partial(threads, 1000 * seed, delay_s), steps=1)


def threads(seed: int, delay_s: float, rank: int) -> ThreadStreams:
    return ThreadStreams(seed + rank, delay_s)


def events(case: Case, wanted: Callable[[Action], bool]) -> set[Event]:
    """Events of some actions, by block-local name."""
    program = lower(case.plan, case.problem)
    actions = (a for rank in program.ranks for b in rank.blocks for a in b.actions)
    return {a.event for a in actions if a.event and wanted(a)}


def no_wait_for(events: set[Event]) -> Edit:
    """Compute does not wait for these."""

    def edit(action: Action) -> list[Action]:
        dropped = action.kind is Kind.WAIT and action.stream == "compute" and action.wait in events
        return [] if dropped else [action]

    return edit


@pytest.mark.parametrize("plan", PLANS)
def test_delayed_copies_change_nothing(plan: str) -> None:
    for seed in range(3):
        case = delayed(cases.case("one", plan), seed)
        assert laws.gradient_error(case, run_here(case)) <= grid.TOLERANCE


def test_a_removed_wait_for_a_copy_is_found() -> None:
    case = delayed(edited(cases.case("one", "offload"), no_wait), 0, LONG_S)
    try:
        found = run_here(case)
    except NotFinite:  # the poison reached the loss
        return
    assert found.status == "nan" or not laws.gradient_error(case, found) <= grid.TOLERANCE


SOUND = [
    *(delayed(cases.case("tp2", plan), 0) for plan in ("offload", "offload-layers", "windows")),
    *(delayed(cases.case("ulysses2", plan), 1) for plan in ("offload", "windows")),
    *(delayed(cases.case("dp2-zero3", plan), 2) for plan in ("offload", "mini")),
    *(delayed(cases.case(layout, "full"), 4) for layout in ("ep2", "tp2-etp2")),
    delayed(
        cases.in_host_memory(cases.case("dp2-zero3", "keep"), "optimizer", "gradient", "parameter"),
        3,
    ),
]


@cache
def results() -> dict[str, tuple[Case, Result]]:
    """One launch: delayed runs, then each mutation."""
    split, exchanged = cases.case("tp2", "keep"), cases.case("ulysses2", "keep")
    reduced = events(split, lambda action: action.stream == "tp")
    sent = events(exchanged, lambda action: action.kind is Kind.ALL_TO_ALL)
    beside = {"gather_overlap": True, "reduce_overlap": True}
    sharded = cases.case("dp2-zero3", "keep", system_changes=beside)
    experts = cases.case("ep2", "keep")
    dispatched = events(experts, lambda action: action.kind is Kind.ALL_TO_ALL)
    gathered = events(sharded, lambda action: action.kind is Kind.ALL_GATHER)
    broken = {
        "no wait for a collective": edited(split, no_wait_for(reduced)),
        "no wait for an exchange": edited(exchanged, no_wait_for(sent)),
        "no wait for tokens": edited(experts, no_wait_for(dispatched)),
        "no wait for a gather": edited(sharded, no_wait_for(gathered)),
    }
    changed = [replace(delayed(case, 0, LONG_S), name=name) for name, case in broken.items()]
    made = [*SOUND, *changed]
    found = execute_cases(made, timeout_s=120.0)
    return {case.name: (case, result) for case, result in zip(made, found, strict=True)}


@pytest.mark.parametrize("name", [case.name for case in SOUND])
def test_delayed_collectives_and_exchanges_change_nothing(name: str) -> None:
    grid.check_gradients(*results()[name])


@pytest.mark.parametrize(
    "name",
    [f"no wait for {what}" for what in ("a collective", "an exchange", "tokens", "a gather")],
)
def test_a_removed_wait_is_found(name: str) -> None:
    case, result = results()[name]
    assert result.status == "nan" or not laws.gradient_error(case, result) <= grid.TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout", ["one", "tp2", "pp2", "cp2", "ulysses2", "dp2", "dp2-zero3", "tp2-pp2", "pp4-vpp2"]
)
def test_a_hundred_repetitions_find_no_race(layout: str) -> None:
    every = [delayed(cases.case(layout, PLANS[seed % 4]), seed) for seed in range(100)]
    for case, result in zip(every, execute_cases(every, timeout_s=300.0), strict=True):
        grid.check_gradients(case, result)
