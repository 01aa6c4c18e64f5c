"""Kernel seconds in closed form, and that every formula takes arrays as it takes numbers."""

import numpy as np
import pytest
from msgspec.structs import replace

from rematbench.costs import copies, formulas
from rematbench.inputs.kernel_rates import Device
from tests.cost_constants import COMMON, GPU

PEAK, HBM = 1e12, 1e9


def device(peak: float) -> Device:
    """A GPU of 100 SMs that reaches half of HBM's rate."""
    return Device(peak_flop_per_s=peak, hbm_bytes_per_s=HBM / 2, sm_count=100.0)


def test_gemm_bound_by_arithmetic() -> None:
    # 2 x 1000^3 flop at half of 1e12 flop/s; 6 MB at half of 1e9 B/s are 0.012 s: more
    assert formulas.gemm_s(1000, 1000, 1000, 1, 2, device(1e10), GPU) == pytest.approx(0.4)
    assert formulas.gemm_s(1000, 1000, 1000, 1, 2, device(PEAK), GPU) == pytest.approx(0.012)


def test_gemm_loses_a_part_of_a_wave_and_a_prologue() -> None:
    gpu = replace(GPU, gemm_tail_waves=0.5, gemm_half_k=100.0)
    shape = (12800, 2560, 400, 1, 2)  # 1000 tiles: ten waves of 100 SMs
    plain = formulas.gemm_s(*shape, device(1e10), GPU)
    assert formulas.gemm_s(*shape, device(1e10), gpu) == pytest.approx(plain * 1.05 * 1.25)


def test_batched_gemms_share_waves() -> None:
    gpu = replace(GPU, gemm_tail_waves=0.5)
    one = formulas.gemm_s(12800, 2560, 400, 1, 2, device(1e10), gpu)
    two = formulas.gemm_s(12800, 2560, 400, 2, 2, device(1e10), gpu)
    assert two == pytest.approx(one * 2 * 1.025 / 1.05)


def test_memory_bound_work() -> None:
    assert formulas.memory_s(1e9, HBM, GPU) == pytest.approx(2.0)
    assert copies.host_copy_s(1e9, 1e9, COMMON) == pytest.approx(2.0)


def test_a_collective_slows_compute_only_while_both_run() -> None:
    assert formulas.overlapped_s(2.0, 1.0, 1.5) == 2.5
    assert formulas.overlapped_s(2.0, 9.0, 1.5) == 3.0
    assert formulas.overlapped_s(2.0, 0.0, 1.5) == 2.0


def test_formulas_broadcast() -> None:
    m, k = np.array([[128.0], [4096.0]]), np.array([64.0, 512.0, 8192.0])
    gpu = replace(GPU, gemm_tail_waves=0.5, gemm_half_k=100.0)
    table = formulas.gemm_s(m, 512, k, 1, 2, device(1e10), gpu)
    assert isinstance(table, np.ndarray)
    assert table.shape == (2, 3)
    for i in range(2):
        for j in range(3):
            one = formulas.gemm_s(m[i, 0], 512, k[j], 1, 2, device(1e10), gpu)
            assert table[i, j] == pytest.approx(one)
    rows = np.array([128.0, 1024.0])
    assert np.shape(formulas.overlapped_s(rows, 1.0, 1.5)) == (2,)
    assert np.shape(copies.host_copy_s(rows, 1e9, COMMON)) == (2,)
