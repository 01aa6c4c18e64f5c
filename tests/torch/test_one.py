"""Twin law and gradients, one process: one torchrun for the whole module."""

from functools import cache

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

from rematbench.torch.case import Case, Result
from tests.torch import grid, laws

LAYOUTS = ("one",)
BITWISE = ("one",)
CASES = [
    *(case for layout in LAYOUTS for case in grid.raw_cases(layout)),
    *(case for layout in LAYOUTS for case in grid.method_cases(layout)),
    *grid.in_groups("one"),
    *(case for layout in BITWISE for case in grid.bitwise_cases(layout)),
]
NAMES = [case.name for case in CASES]


@cache
def results() -> dict[str, tuple[Case, Result]]:
    return laws.torchrun(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_live_bytes_equal_the_ledger_after_every_action(name: str) -> None:
    grid.check_twin(*results()[name])


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_the_autograd_model(name: str) -> None:
    grid.check_gradients(*results()[name])


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("fp32")])
def test_keep_offload_and_whole_recompute_give_the_same_bits(name: str) -> None:
    keep = results()[f"fp32 {name.split()[1]} keep"][1]
    assert laws.same_bits(results()[name][1], keep)
