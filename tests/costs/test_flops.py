"""The one FLOP function against every (throughput, MFU) pair its main source prints."""

import numpy as np
import pytest
from msgspec.structs import replace

from rematbench.costs import copies, formulas
from rematbench.costs.flops import attention_flop_per_token, hfu, mfu, model_flop_per_token
from rematbench.inputs.kernel_rates import Device
from rematbench.inputs.load import load_model
from rematbench.workload import Workload
from tests.cost_constants import COMMON, GPU
from tests.problems import LLAMA

H800, A800 = 989.5e12, 312e12

# Yuan et al., USENIX ATC 2024, artifact README: tokens/s/GPU and MFU % as printed.
PUBLISHED = [
    ("llama-7b", 12288, A800, 3016, 47.7),
    ("llama-7b", 12288, A800, 3803, 60.1),
    ("llama-7b", 12288, A800, 2847, 45.0),
    ("llama-7b", 12288, H800, 6639, 33.1),
    ("llama-7b", 12288, H800, 8273, 41.2),
    ("llama-7b", 12288, H800, 6138, 30.6),
    ("llama-175b", 8192, H800, 299, 33.4),
    ("llama-175b", 8192, H800, 387, 43.2),
    ("llama-175b", 8192, H800, 278, 31.0),
]


@pytest.mark.parametrize(("model", "seq_len", "peak", "speed", "percent"), PUBLISHED)
def test_published_mfu(model: str, seq_len: int, peak: float, speed: int, percent: float) -> None:
    reached = 100 * mfu(speed, Workload(model=load_model(model), seq_len=seq_len), peak)
    # speeds are printed to a whole token (0.5 of 278 is 0.2 %), MFU to a tenth
    assert reached == pytest.approx(percent, abs=0.05 + percent * 0.5 / speed)


def small(document_len: int = 0, **changes: object) -> Workload:
    """16 tokens of a small model."""
    model = replace(LLAMA, num_layers=2, hidden=4, num_heads=2, num_kv_heads=1, head_dim=3, ffn=8)
    model = replace(model, vocab=10)
    return Workload(model=replace(model, **changes), seq_len=16, document_len=document_len)


def test_closed_form() -> None:
    # layer: q 4x6, k and v 4x3 each, proj 6x4, three 4x8 -> 24 + 24 + 24 + 96 = 168; head 40
    assert model_flop_per_token(small()) == 6 * (2 * 168 + 40) + 6 * 2 * 6 * 16
    assert model_flop_per_token(small(), causal=False) == 6 * (2 * 168 + 40) + 12 * 2 * 6 * 16


def test_packed_documents_count_only_pairs_inside() -> None:
    # 16 tokens in documents of 6: 6, 6 and 4, so (36 + 36 + 16) / 16 mean keys, half of it causal
    inside = attention_flop_per_token(small(6), causal=False)
    assert inside == 12 * 2 * 6 * 88 / 16
    assert attention_flop_per_token(small(6), causal=True) == inside / 2
    windowed = small(6, attention_window=(4, 8))  # the window 8 is longer than a document
    assert attention_flop_per_token(windowed, causal=True) == pytest.approx(
        12 * 6 * ((18 + 18 + 10) / 16 + 88 / 32)
    )


def test_hidden_width_is_not_heads_times_head_dim() -> None:
    assert attention_flop_per_token(small(head_dim=5), causal=False) == 12 * 2 * 10 * 16


def test_windows_count_their_own_keys() -> None:
    # window 4 of 16: (1 + 2 + 3 + 4 x 13) / 16 keys; the other layer is full causal: 8
    model = small(attention_window=(4, 0))
    assert attention_flop_per_token(model, causal=True) == 12 * 6 * (58 / 16 + 8)


def test_a_window_of_the_whole_sequence_is_no_window() -> None:
    model = small(attention_window=(16, 0))
    assert attention_flop_per_token(model, causal=True) == attention_flop_per_token(
        small(), causal=True
    )


def test_hfu_adds_recompute_only() -> None:
    model = small()
    again = model_flop_per_token(model)
    assert hfu(7.0, model, 1e6, again) == pytest.approx(2 * mfu(7.0, model, 1e6))


# -- kernel seconds in closed form, and that GEMMs take arrays as they take numbers ----------------


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
