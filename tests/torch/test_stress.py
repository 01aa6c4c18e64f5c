"""No race under random delays of copies and collectives, and a removed wait is found.

Streams are threads (rematbench.torch.threads), so that what a program does not order really happens
in any order; gradients are compared with the undelayed autograd model.
"""

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.program.action import Action, Kind
from rematbench.torch import worker
from rematbench.torch.case import Case, Result
from rematbench.torch.failures import NotFinite
from rematbench.torch.gather import combine
from rematbench.torch.launch import execute_cases
from tests.torch import cases, grid, laws
from tests.torch.test_faults import Edit, edited, no_wait

DELAY_S = 2e-3
LONG_S = 2e-2
PLANS = ("offload", "offload-layers", "offload-slots", "skeletal")


def delayed(case: Case, seed: int, delay_s: float = DELAY_S) -> Case:
    """The case with streams as threads; one step, so that many repetitions are cheap."""
    changes = {"delay_s": delay_s, "delay_seed": 1000 * seed, "steps": 1}
    return Case(**{**vars(case), **changes, "name": f"{case.name} #{seed}"})


def run_here(case: Case) -> Result:
    """In this process."""
    return combine(case, [worker.run_case(case, 0, torch.device("cpu"), {})])


def tp_events(case: Case) -> set[str]:
    """Events of tensor-parallel collectives, by block-local name."""
    program = edited(case, lambda action: [action]).program
    assert program is not None
    actions = (a for rank in program.ranks for b in rank.blocks for a in b.actions)
    return {a.event for a in actions if a.stream == "tp" and a.event}


def no_wait_for(events: set[str]) -> Edit:
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


def test_delayed_collectives_change_nothing_and_a_removed_wait_is_found() -> None:
    plans = (*PLANS[:2], "windows")  # the last one computes while collectives are under way
    whole = [delayed(cases.case("tp2", plan), seed) for plan in plans for seed in range(2)]
    broken = cases.case("tp2", "keep")
    broken = delayed(edited(broken, no_wait_for(tp_events(broken))), 0, LONG_S)
    *results, found = execute_cases([*whole, broken], timeout_s=120.0)
    for case, result in zip(whole, results, strict=True):
        grid.check_gradients(case, result)
    assert found.status == "nan" or not laws.gradient_error(broken, found) <= grid.TOLERANCE


@pytest.mark.soak
@pytest.mark.parametrize(
    "layout", ["one", "tp2", "pp2", "cp2", "ulysses2", "dp2", "tp2-pp2", "pp4-vpp2"]
)
def test_a_hundred_repetitions_find_no_race(layout: str) -> None:
    every = [delayed(cases.case(layout, PLANS[seed % 4]), seed) for seed in range(100)]
    for case, result in zip(every, execute_cases(every, timeout_s=300.0), strict=True):
        grid.check_gradients(case, result)
