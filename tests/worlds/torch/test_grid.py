"""The full grid: every plan, method and composition on every layout, three AdamW steps (soak)."""

from functools import cache

import pytest

from rematbench.worlds.torch.case import Case, Result
from tests.worlds.torch import cases, grid, laws

ZERO = {
    2: ("dp2-zero2", "dp2-zero3", "cp2-zero3", "ulysses2-zero3"),
    4: ("dp4-zero2", "dp4-zero3", "tp2-dp2-zero2", "tp2-dp2-zero3"),
}
SIZES = {
    1: ("one",),
    2: ("tp2", "pp2", "cp2", "ulysses2", "dp2", "pp2-vpp2", *ZERO[2]),
    4: ("pp4-vpp2", "tp2-pp2", "tp2-cp2", "tp2-ulysses2", "pp2-ulysses2", *ZERO[4]),
}
BITWISE = ("tp2", "pp2", "cp2", "ulysses2", "dp2", "pp4-vpp2", "tp2-pp2", "tp2-ulysses2")
BITWISE += ("dp2-zero2", "dp2-zero3", "dp4-zero3")


@cache
def every(size: int) -> list[Case]:
    found: list[Case] = []
    for layout in SIZES[size]:
        plans = [plan for plan in cases.PLANS if layout != "tp2-cp2" or plan in ("keep", "offload")]
        found += grid.raw_cases(layout, *plans)
        found += grid.method_cases(layout)
        found += grid.composed_cases(layout)
        found += grid.bitwise_cases(layout) if layout in BITWISE else []
    return found


@cache
def results(size: int) -> list[tuple[Case, Result]]:
    return list(laws.launch(every(size)).values())


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_live_bytes_equal_the_ledger_after_every_action(size: int) -> None:
    for case, result in results(size):
        grid.check_twin(case, result)


@pytest.mark.soak
@pytest.mark.parametrize("size", SIZES)
def test_gradients_equal_the_autograd_model(size: int) -> None:
    for case, result in results(size):
        grid.check_gradients(case, result)


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_keep_offload_and_whole_recompute_give_the_same_bits(size: int) -> None:
    known = {case.name: result for case, result in results(size)}
    pairs = [(name, f"fp32 {name.split()[1]} keep") for name in known if name.startswith("fp32")]
    assert pairs
    assert not [name for name, keep in pairs if not laws.same_bits(known[name], known[keep])]


@pytest.mark.soak
def test_every_composition_has_a_plan_somewhere() -> None:
    found = {case.name.split()[1] for size in SIZES for case in every(size)}
    assert set(laws.COMPOSITIONS) <= found
