"""Leave out each place where the runtime orders streams, one at a time: it is found missing, or it
is said why not.  The tables name every one that the sources have (edges.py finds them)."""

import pytest

from tests.tables import tables
from tests.worlds.torch import edges
from tests.worlds.torch.edge_cases import MADE, SCENES, fault_of
from tests.worlds.torch.edges import Edge

TABLES = tables(__file__)
RUNTIME: dict[str, tuple[str, ...]] = TABLES["runtime"]
"""Edges by the case or scene in which it is found that one is missing."""


def found_in(name: str) -> str:
    return SCENES[name]() if name in SCENES else fault_of(name)


def test_every_edge_of_the_runtime_is_in_a_table() -> None:
    named = [edge for every in RUNTIME.values() for edge in every] + list(TABLES["no_order"])
    assert sorted(named) == sorted(str(edge) for edge in edges.of_runtime())


QUICK = (*SCENES, "one hosted", "dp2-zero3 all leave")


@pytest.mark.parametrize(  # the others: test_fake_cuda.py
    "name",
    [*QUICK, *(pytest.param(name, marks=pytest.mark.full) for name in MADE if name not in QUICK)],
)
def test_nothing_is_found_where_nothing_is_missing(name: str) -> None:
    assert found_in(name) == ""


@pytest.mark.parametrize(("name", "edge"), [(n, e) for n, every in RUNTIME.items() for e in every])
def test_a_runtime_without_one_of_its_edges_is_found(
    name: str, edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name: dict[str, Edge] = {str(e): e for e in edges.of_runtime()}
    edges.leave_out(by_name[edge], monkeypatch)
    assert found_in(name) != ""
