"""The laws on real GPUs, where there are any: bytes, gradients, bits, in float64 and bf16."""

import pytest
import torch

from rematbench.worlds.torch.rank_processes import execute_cases
from tests.worlds.torch import cases, grid, laws

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
LAYOUTS = ("one", "tp2", "pp2", "pp2-vpp2", "cp2", "dp2", "ulysses2", "tp2-pp2", "pp4-vpp2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_plan_keeps_the_laws(layout: str) -> None:
    every = [grid.on_gpus(case) for case in grid.raw_cases(layout)]
    if every[0].world_size > GPUS:
        pytest.skip(f"needs {every[0].world_size} GPUs, torch sees {GPUS}")
    for case, result in zip(every, execute_cases(every, timeout_s=120.0), strict=True):
        grid.check_twin(case, result)
        grid.check_gradients(case, result)
        assert all(rank.step_s and rank.allocated_bytes for rank in result.ranks)


@pytest.mark.skipif(GPUS < 1, reason="torch sees no GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_splits_no_product_gives_keeps_bits(precision: cases.Precision) -> None:
    every = [
        grid.on_gpus(cases.case("one", plan, precision=precision))
        for plan in ("keep", *cases.SAME_NUMBERS, "keep")
    ]
    keep, *others = execute_cases(every, timeout_s=120.0)
    for case, result in zip(every[1:], others, strict=True):
        assert (result.status, laws.bytes_differ(case, result)) == ("ok", [])
        assert laws.same_bits(result, keep)
