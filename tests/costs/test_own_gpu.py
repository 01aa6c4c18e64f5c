"""A GPU that nobody published: kernels at its own roofline, and a band that says so."""

import math
from typing import Any

import pytest
from hypothesis import given as drawn
from hypothesis import strategies as st
from msgspec.structs import replace

from rematbench.cli.show import trust
from rematbench.costs.formulas import balance_factor
from rematbench.costs.operators.kernels import Attention, Elementwise, Gemm, Kernel
from rematbench.evaluate.problems import make_problem
from rematbench.evaluate.result import Band, evaluate_method
from rematbench.evidence.bands import (
    band_of,
    bands_of,
    device_errors,
    shipped,
    speed_errors,
    with_band,
)
from rematbench.evidence.job_evidence import job_of, left_out_cells, unlike_devices
from rematbench.evidence.open_causes import ROOFLINE
from rematbench.evidence.quantiles import quantile
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.job import Job
from rematbench.inputs.load import (
    load_cluster,
    load_model,
    load_system,
    names,
    rated_clusters,
    shipped_balances,
)
from rematbench.inputs.system import with_facts
from rematbench.problem import Problem
from tests.problems import all_methods, on, problem, remade

H20: dict[str, Any] = {"gpu": "H20", "peak_flop_per_s": 1.48e14, "hbm_bytes_per_s": 4e12}
KERNELS: tuple[Kernel, ...] = (
    Gemm(8192, 4096, 4096),
    Gemm(1024, 1000, 64, batch=32),
    Attention(1, 32, 32, 128, 8192, 8192, 8192 * 8193 // 2),
    Attention(2, 16, 16, 64, 2048, 2048, 2048 * 2048, fused=False),
    Elementwise(1 << 28),
)
FLASH_BACKWARD = 2.5


def flop(kernel: Kernel, backward: bool) -> float:
    """FLOPs that a kernel cannot do without; the pairs of a causal mask only."""
    match kernel:
        case Gemm(m=m, n=n, k=k, batch=batch):
            return 2.0 * m * n * k * batch
        case Attention(batch=batch, heads=heads, head_dim=head_dim, pairs=pairs, fused=fused):
            return (
                4.0
                * pairs
                * heads
                * batch
                * head_dim
                * (FLASH_BACKWARD if backward and fused else 1.0)
            )
    return 0.0


def gpu(generation: str, peak: float, hbm: float, eager: bool = False) -> Problem:
    given = problem(system_changes={"eager_operators": eager})
    return on(given, generation=generation, peak_flop_per_s=peak, hbm_bytes_per_s=hbm)


GPUS = st.tuples(
    st.sampled_from(["ampere", "hopper"]), st.floats(5e13, 4e15), st.floats(2e11, 2e13)
)


@drawn(GPUS, st.sampled_from(KERNELS), st.sampled_from([False, True]), st.booleans())
def test_no_kernel_exceeds_the_gpus_peak_or_bandwidth(
    which: tuple[str, float, float], kernel: Kernel, backward: bool, eager: bool
) -> None:
    generation, peak, hbm = which
    cost = gpu(generation, peak, hbm, eager).cost
    seconds = cost.kernel_s(kernel, "backward_input" if backward else "forward")
    assert seconds >= flop(kernel, backward) / peak
    if isinstance(kernel, Elementwise):
        assert seconds >= kernel.hbm_bytes / hbm
    if isinstance(kernel, Gemm):
        m, n, k, batch = kernel.m, kernel.n, kernel.k, kernel.batch
        assert seconds >= 2 * batch * (m * k + k * n + m * n) / hbm


@drawn(GPUS, st.sampled_from(KERNELS), st.floats(1.0, 4.0))
def test_a_faster_gpu_is_never_slower(
    which: tuple[str, float, float], kernel: Kernel, more: float
) -> None:
    generation, peak, hbm = which
    before = gpu(generation, peak, hbm).cost.kernel_s(kernel, "forward")
    for faster in ((peak * more, hbm), (peak, hbm * more), (peak * more, hbm * more)):
        after = gpu(generation, *faster).cost.kernel_s(kernel, "forward")
        assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("name", [cluster.name for cluster in rated_clusters()])
def test_shipped_gpus_keep_their_measured_rates(name: str) -> None:
    cluster = load_cluster(name)
    assert (
        on(
            problem(),
            **{
                key: getattr(cluster, key)
                for key in ("generation", "peak_flop_per_s", "hbm_bytes_per_s")
            },
        ).cost.balance
        == 1.0
    )
    assert not unlike_devices(cluster)


def test_a_shipped_gpu_without_rates_is_like_no_other() -> None:
    """A card by its data sheet has no row of its own, so its band is a wide one."""
    by_sheet = [cluster for cluster in map(load_cluster, names("cluster")) if cluster.roofline]
    assert {cluster.gpu for cluster in by_sheet} >= {"L40S-48GB", "MI355X-288GB"}
    for cluster in by_sheet:
        band = band_of(remade(problem(), cluster=cluster), "keep_all")
        assert band.half_width >= ROOFLINE
        assert "for a GPU without published rates" in trust(band)[0]


def test_the_factor_joins_the_two_bounds() -> None:
    """Half of the peak: as many seconds for bytes as for arithmetic."""
    assert balance_factor(0.5, 1.0) == 1.0
    assert balance_factor(0.5, 0.0) == 0.5  # no bytes: the peak
    assert balance_factor(0.5, 3.0) == 2.0  # (1 + 3) / (1 + 1)
    assert balance_factor(1.0, 9.0) == 1.0  # at the peak nothing waits for bytes


def test_balances_of_shipped_gpus() -> None:
    assert shipped_balances("hopper") == (989.5 / 4.8, 989.5 / 2.4)
    assert shipped_balances("cpu") is None


# -- the band ------------------------------------------------------------------------------------


def test_the_band_is_what_leaving_a_generation_out_shows() -> None:
    cells = left_out_cells()
    errors = device_errors(cells)
    assert set(errors) < set(speed_errors(cells))
    found = bands_of(cells).band(some_job(H20))
    assert found.half_width == quantile(errors) > shipped().pools[-1].half_width
    assert found.sources == len(errors) == 8
    assert "148 TFLOP/s and 4 TB/s, of which no rate is published" in found.evidence
    assert "8 sources predicted with the kernels of another GPU generation" in trust(found)[0]
    assert not bands_of(cells).band(some_job({})).other_generation


def some_job(facts: dict[str, Any]) -> Any:
    return job_of(on(problem(), **facts), "keep_all")


def test_a_law_without_balance_would_err_more() -> None:
    """The rows of one generation under the other's constants: 15 % with the law, 26 % without it
    (docs/decisions/costs.md), where an own generation's constants err by 15 %."""
    assert quantile(device_errors(left_out_cells())) < math.log1p(0.18)


# -- published steps -----------------------------------------------------------------------------


def h20() -> Cluster:
    return replace(load_cluster("h100-80gb"), name="h20", hbm_bytes=102625181696, **H20)


@pytest.mark.parametrize(("attention", "published_s"), [("fa2", 35.5), ("fa3", 32.4)])
def test_a_published_step_on_h20_lies_in_its_band(attention: Any, published_s: float) -> None:
    """Qwen2.5-7B, 16,384 tokens, Transformers with ZeRO-3 and Liger on four H20 (0.15 of an H100's
    FLOP/s, 1.2 of its bandwidth)."""
    facts = {"fused_loss": True, "reduce_overlap": True, "gather_overlap": True}
    spec = Job(
        model=load_model("qwen2-7b"), cluster=h20(), gpus=4, seq_len=16384, global_batch=16,
        system=with_facts(load_system("huggingface-fused"), **facts), zero_stage=3,
        attention=attention,
    )  # fmt: skip
    made = make_problem(spec)
    found = with_band(
        evaluate_method(made, all_methods().resolve("full_recompute"), made.base_plan)
    )
    assert isinstance(found.error_band, Band)
    assert found.step_s == pytest.approx(published_s, rel=found.error_band.half_width)
