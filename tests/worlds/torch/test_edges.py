"""Leave out each wait that the lowering writes, one at a time: the recorder finds it missing, or it
is said why not.

The tables name every one that the sources have (edges.py finds them), so a new one is not
forgotten.  A reason is held to its word too: what is said to change nothing must not be found.
"""

import pytest

from rematbench.evaluate.proof import CheckError, check
from rematbench.worlds.records.refusals import refusals
from tests.tables import tables
from tests.worlds.torch import edges
from tests.worlds.torch.edge_cases import case_of, stages
from tests.worlds.torch.fake_cuda import first_fault

TABLES = tables(__file__)
PROGRAM: dict[str, tuple[str, ...]] = TABLES["program"]
"""Edges by the case in which the recorder finds that one is missing."""
CHANGES_NOTHING = [(case, name) for case, why in TABLES["changes_nothing"].items() for name in why]
NOT_EXECUTED = {name: why for why, names in TABLES["not_executed"].items() for name in names}
"""Edges by what the runtime refuses to execute (edge_cases.REFUSED)."""
OUTSIDE_CHECK: dict[str, str] = TABLES["outside_check"]
"""Edges that `check` does not find missing, and why."""
FULL = [pytest.mark.full]
"""Of a case's edges that `check` finds, in the quick run too, the recorder finds the first."""


def test_every_wait_of_the_lowering_is_in_a_table() -> None:
    named = [name for every in PROGRAM.values() for name in every]
    named += [name for _, name in CHANGES_NOTHING]
    places = {name.rpartition(" on ")[0] for name in (*named, *NOT_EXECUTED)}
    assert places == {str(edge) for edge in edges.of_programs()}
    written = {name for case in PROGRAM for name in edges.written(case_of(case))}
    written |= {name for case, _ in CHANGES_NOTHING for name in edges.written(case_of(case))}
    assert written == set(named)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=FULL if at and name not in OUTSIDE_CHECK else [])
        for case, names in PROGRAM.items()
        for at, name in enumerate(names)
    ],
)
def test_a_program_without_one_of_its_waits_is_found(case: str, name: str) -> None:
    broken = edges.without(case_of(case), name)
    assert any(first_fault(broken, stage) for stage in stages(broken))


@pytest.mark.soak
@pytest.mark.parametrize(("case", "name"), CHANGES_NOTHING)
def test_a_wait_that_is_said_to_change_nothing_does_not(case: str, name: str) -> None:
    broken = edges.without(case_of(case), name)
    assert not any(first_fault(broken, stage) for stage in stages(broken))


def found_by_check(case: str, name: str) -> bool:
    program = edges.without(case_of(case), name).program
    assert program is not None
    try:
        check(program)
    except CheckError:
        return True
    return False


def test_check_finds_all_of_them_too() -> None:
    """Also those that only order gradients and parameters that stay where they are."""
    every = [(case, name) for case, names in PROGRAM.items() for name in names]
    assert [each for each in every if found_by_check(*each) == (each[1] in OUTSIDE_CHECK)] == []


@pytest.mark.parametrize("name", NOT_EXECUTED)
def test_a_wait_that_is_not_executed_is_refused_and_held_by_check(name: str) -> None:
    case = case_of(NOT_EXECUTED[name])
    words = refusals(case.problem, case.plan)
    assert any(refusal.startswith(NOT_EXECUTED[name]) for refusal in words)
    assert name in edges.written(case)
    assert found_by_check(NOT_EXECUTED[name], name) != (name in OUTSIDE_CHECK)
