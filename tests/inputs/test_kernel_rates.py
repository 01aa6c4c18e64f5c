"""Closed forms of kernels by name, and what a generation refuses."""

from pathlib import Path
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from rematbench.costs.bind_kernels import part_of
from rematbench.costs.kernel_seconds import (
    attention_s,
    attention_share,
    bytes_s,
    gemm_s,
    gemm_share,
    head_dim_factor,
    unfused_attention_s,
    unfused_passes,
)
from rematbench.costs.operators.kernels import Named
from rematbench.inputs.kernel_rates import (
    AttentionPass,
    AttentionRates,
    ByteRates,
    Device,
    Evidence,
    GemmRates,
    RateError,
    UnfusedAttention,
    fitted_parameters,
    load_kernel_rates,
)
from rematbench.inputs.load import load_system
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import NormKernel, RopeKernel, with_facts
from tests.problems import problem

NONE = Evidence()
ATTENTION = AttentionRates(
    forward=AttentionPass(efficiency=0.6, half_rows=512.0, half_waves=1.0),
    backward=AttentionPass(efficiency=0.5, half_rows=1024.0, half_waves=2.0),
    head_dims={64: 0.75, 128: 1.0},
    evidence=NONE,
)
GEMM = GemmRates(
    efficiency=0.8,
    half_k=256.0,
    tail=1.0,
    accumulate=0.5,
    tile_rows=128.0,
    tile_columns=256.0,
    evidence=NONE,
)
DEVICE = Device(peak_flop_per_s=1e15, hbm_bytes_per_s=2e12, sm_count=128)
SHIPPED = load_kernel_rates(data_dir("config") / "kernels")


def seconds(q_rows: Any, pairs: Any, heads: float = 8.0, *, backward: bool = False) -> Any:
    """Attention over heads of 128 columns."""
    sizes = {"heads": heads, "head_dim": 128.0, "q_rows": q_rows, "pairs": pairs}
    return attention_s(ATTENTION, DEVICE, backward=backward, **sizes)


def test_attention_is_flop_over_a_saturating_rate() -> None:
    s, heads = 4096.0, 8.0
    pairs = s * s / 2
    waves = heads * s / 128 / 128
    share = 0.6 * s / (s + 512) * waves / (waves + 1)
    assert seconds(s, pairs) == pytest.approx(4 * 128 * heads * pairs / (1e15 * share))
    share = 0.5 * s / (s + 1024) * waves / (waves + 2)
    back = seconds(s, pairs, backward=True)
    assert back == pytest.approx(2.5 * 4 * 128 * heads * pairs / (1e15 * share))


def test_a_window_saturates_by_what_a_query_sees() -> None:
    s, window = 65536.0, 1024.0
    near = seconds(s, s * window, 64.0)
    waves = 64 * 2 * window / 128 / 128
    share = 0.6 * 2 * window / (2 * window + 512) * waves / (waves + 1)
    assert near == pytest.approx(4 * 128 * 64 * s * window / (1e15 * share))
    # queries of one rank against a longer prefix: no longer than its own queries
    rank = seconds(s / 8, s * s / 16, 64.0)
    own = attention_share(ATTENTION.forward, s / 8, 64.0, 128)
    assert rank == pytest.approx(4 * 128 * 64 * s * s / 16 / (1e15 * own))


def test_head_dimensions_between_and_outside_the_published_ones() -> None:
    found = head_dim_factor(ATTENTION, np.array([32.0, 64.0, 64 * 2**0.5, 128.0, 256.0]))
    assert found == pytest.approx([0.75, 0.75, 0.875, 1.0, 1.0])


@pytest.mark.parametrize(
    ("tail", "columns", "filled"),
    [
        (1.0, 128 * 256, 1.0),  # one whole wave of 128 tiles
        (1.0, 129 * 256, 129 / 256),  # one tile more asks for a second
        (0.0, 129 * 256, 1.0),
        (0.5, 192 * 256, 1.5 / 1.75),
    ],
)
def test_gemm_waves(tail: float, columns: float, filled: float) -> None:
    rates = msgspec.structs.replace(GEMM, tail=tail)
    share = gemm_share(rates, 128.0, columns, 256.0, 1.0, 128)
    assert share == pytest.approx(0.8 * 0.5 * filled)


def test_a_collective_takes_sms() -> None:
    """A GEMM of one wave needs a second, attention and long GEMMs lose the SMs taken."""
    beside = msgspec.structs.replace(DEVICE, taken_sms=24)
    wave = (1024.0, 4096.0, 4096.0)  # 8 x 16 tiles
    alone_s = gemm_s(GEMM, DEVICE, *wave, element_bytes=2)
    assert gemm_s(GEMM, beside, *wave, element_bytes=2) == pytest.approx(2 * alone_s)
    smooth = msgspec.structs.replace(GEMM, tail=0.0)
    assert gemm_s(smooth, beside, *wave, element_bytes=2) == pytest.approx(alone_s * 128 / 104)
    size = {"backward": False, "heads": 1e6, "head_dim": 128.0, "q_rows": 4096.0, "pairs": 2.0**23}
    slower = attention_s(ATTENTION, beside, **size) / attention_s(ATTENTION, DEVICE, **size)  # type: ignore[arg-type]
    assert slower == pytest.approx(128 / 104, rel=1e-4)


def test_waves_less_blocks_explain_the_published_overlap() -> None:
    """NVIDIA forum 337991: one wave of 132 tiles at .80 of the peak alone, .47 beside NCCL's 24
    blocks; arXiv 2507.03114: whole steps lose 18.9 % of their compute's speed on average."""
    hopper = SHIPPED.generation("hopper")
    taken = hopper.overlap["nccl_blocks"].value
    device = Device(peak_flop_per_s=9.895e14, hbm_bytes_per_s=2.9e12, sm_count=hopper.sm_count)
    beside = msgspec.structs.replace(device, taken_sms=taken)

    def ratio(waves: float) -> float:
        size = (11 * 128.0, 12 * 256.0 * waves, 8192.0)
        ahead = gemm_s(hopper.gemm, device, *size, element_bytes=2)
        return float(ahead / gemm_s(hopper.gemm, beside, *size, element_bytes=2))

    assert ratio(1.0) == pytest.approx(hopper.overlap["one_wave_beside"].value, rel=0.10)
    mean = SHIPPED.generation("ampere").overlap["mean_slowdown"].value
    assert 1 / ratio(50.0) - 1 == pytest.approx(mean, abs=0.05)


def test_gemm_is_the_longer_of_arithmetic_and_traffic() -> None:
    m, n, k = 1024.0, 4096.0, 2048.0
    share = gemm_share(GEMM, m, n, k, 2.0, 128)
    arithmetic = 2 * m * n * k * 2 / (1e15 * share)
    assert gemm_s(GEMM, DEVICE, m, n, k, 2.0, element_bytes=2) == pytest.approx(arithmetic)
    slow = msgspec.structs.replace(DEVICE, hbm_bytes_per_s=1e9)
    moved = 2 * 2 * (m * k + k * n + m * n)
    assert gemm_s(GEMM, slow, m, n, k, 2.0, element_bytes=2) == pytest.approx(moved / 1e9)


BYTES = ByteRates(
    forward_bytes=50.0,
    forward_fixed_s=1e-5,
    backward_bytes=129.0,
    backward_fixed_s=4e-5,
    forward_launches=8,
    backward_launches=12,
    evidence=NONE,
)


def test_memory_bound_operators() -> None:
    count = np.array([0.0, 1e6])
    ahead = bytes_s(BYTES, count, backward=False, hbm_bytes_per_s=1e12)
    assert ahead == pytest.approx([1e-5, 1e-5 + 5e-5])
    assert bytes_s(BYTES, 1e6, backward=True, hbm_bytes_per_s=1e12) == pytest.approx(1.69e-4)


def test_seconds_of_a_named_operator_are_traffic_and_gaps() -> None:
    cost = problem(system="huggingface", attention="unfused").cost
    kernel = Named("norm", "eager", 1 << 24, 2)
    rates = SHIPPED.operators.norm["eager"]
    rate = cost.cluster.hbm_bytes_per_s * SHIPPED.generation(cost.cluster.generation).hbm.value
    for direction, each, launches in (
        ("forward", rates.forward_bytes, rates.forward_launches),
        ("backward_input", rates.backward_bytes, rates.backward_launches),
    ):
        told = cost.kernel_s(kernel, direction)
        assert told == pytest.approx((1 << 24) * each / rate + launches * cost.stack.gap_s)
    half = part_of(kernel, "forward", 0.5)
    assert half == Named("norm", "eager", 1 << 23, 2)


def test_names_are_those_of_the_files() -> None:
    assert set(get_args(NormKernel)) == set(SHIPPED.operators.norm)
    assert set(get_args(RopeKernel)) == set(SHIPPED.operators.rope)


def test_what_is_compiled_is_fused() -> None:
    eager = load_system("torchtitan")
    assert (eager.norm_kernel, eager.rope_kernel) == ("eager", "complex")
    compiled = with_facts(eager, compiled=True)
    assert (compiled.norm_kernel, compiled.rope_kernel) == ("compiled", "fused")


def test_unfused_attention_passes_over_its_scores() -> None:
    rates = UnfusedAttention(passes=9.0, mask_passes=5.0, evidence=NONE)
    plain = unfused_attention_s(rates, 1e-3, 1e9, 2, 1e12, masked=False)
    assert plain == pytest.approx(1e-3 + 18e-3)
    assert unfused_attention_s(rates, 1e-3, 1e9, 2, 1e12, masked=True) == pytest.approx(29e-3)
    assert unfused_passes(rates, backward=False, masked=True) == pytest.approx(0.4 * 9 + 5)
    assert unfused_passes(rates, backward=True, masked=True) == pytest.approx(0.6 * 9)


def test_functions_broadcast() -> None:
    s = np.array([2048.0, 4096.0, 8192.0])
    ones = [seconds(x, x * x / 2) for x in s]
    assert np.asarray(seconds(s, s * s / 2)) == pytest.approx(ones)
    wide = gemm_s(GEMM, DEVICE, s, 4096.0, 4096.0, element_bytes=2)
    assert np.asarray(wide).shape == (3,)


def test_what_a_generation_cannot_do_is_refused_by_name() -> None:
    for generation, name, said in (
        ("ampere", "fa3", "attention 'fa3' on ampere: FlashAttention-3 is written for"),
        ("blackwell", "fa3", r"attention 'fa3' on blackwell: .*Hopper alone"),
        ("hopper", "fa9", r"no attention 'fa9' on hopper .known: unfused, fa2, fa1,"),
        ("volta", "fa2", r"no kernel rates for GPU generation 'volta' .known: ada, ampere"),
    ):
        with pytest.raises(RateError, match=said):
            SHIPPED.attention(generation, name)


def test_every_generation_answers_for_every_backend() -> None:
    """A backend of one generation has rates, or a reason for none, on each."""
    backends = {name for one in SHIPPED.generations.values() for name in one.attention}
    for generation, one in SHIPPED.generations.items():
        names = [*one.attention, *one.refused, *one.unrated]
        assert sorted(names) == sorted(backends), generation


def test_an_unknown_key_is_an_error(tmp_path: Path) -> None:
    for path in (data_dir("config") / "kernels").glob("*.yaml"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    hopper = tmp_path / "hopper.yaml"
    hopper.write_text(hopper.read_text().replace("half_k:", "half_depth:"))
    with pytest.raises(msgspec.ValidationError, match="half_depth"):
        load_kernel_rates(tmp_path)


def test_fitted_counts_fields_not_files() -> None:
    counts = fitted_parameters(SHIPPED)
    fa3 = SHIPPED.attention("hopper", "fa3").evidence.fitted
    assert {"forward.efficiency", "backward.half_rows", "head_dims.64"} <= set(fa3)
    assert counts.pop("cpu") == 0
    assert all(count > 5 for count in counts.values())
