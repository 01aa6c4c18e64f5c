"""Baselines on fake tensors: the same bytes as on real ones, rank by rank."""

from pathlib import Path
from typing import Any, Literal

import pytest

from rematbench.worlds.packages.process import PackageJob, policy, run_jobs
from rematbench.worlds.packages.process import job as make_job
from rematbench.worlds.records.record import Record
from tests.baselines.cases import PATIENCE_S, Asked, asked_of, asked_problem
from tests.installed import needs

Bytes = tuple[int, int, int, int]

ASKED = asked_of(__file__)
MEGATRON = ASKED["megatron"]
MORE_MEGATRON = ASKED["more_megatron"]
DEEPSPEED = ASKED["deepspeed"]
MORE = ASKED["more"]
SMALL_PARTS = {
    "stage3_param_persistence_threshold": 3000,
    "stage3_prefetch_bucket_size": 20000,
    "stage3_max_reuse_distance": 10000,
}
"""Of a tiny model ZeRO 3 would keep every parameter whole and gather none of them again."""


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(MEGATRON, id="few", marks=pytest.mark.full),
        pytest.param(MORE_MEGATRON, id="more", marks=pytest.mark.soak),
    ],
)
def test_megatron_core_weighs_the_same_on_fake_tensors(asked: list[Asked], tmp_path: Path) -> None:
    needs("megatron.core")
    real, fake = both("megatron_core", asked, tmp_path)
    assert {name: peaks[:2] for name, peaks in fake.items()} == {
        name: peaks[:2] for name, peaks in real.items()
    }


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param(DEEPSPEED, id="few", marks=pytest.mark.full),
        pytest.param(MORE, id="more", marks=pytest.mark.soak),
    ],
)
def test_deepspeed_weighs_the_same_on_fake_tensors(asked: list[Asked], tmp_path: Path) -> None:
    """States too: those of its optimizer are computed where it has not made them yet.  Host and
    device apart: real tensors are followed from place to place, fake ones know theirs."""
    needs("deepspeed")
    real, fake = both("deepspeed", asked, tmp_path)
    assert fake == real
    assert moved(fake) == {str(one) for one in asked if _moves(one)}


@pytest.mark.soak
def test_zero_3_fetches_ahead_on_fake_tensors_as_on_real_ones(tmp_path: Path) -> None:
    """One and two micro-batches: the first pass of a run fetches nothing ahead, all others do."""
    needs("deepspeed")
    repeats, ranks = 2, (0, 1)
    jobs = []
    for world, count in (("executed", repeats), ("traced", len(ranks))):
        for global_batch in (2, 4):
            made = asked_problem(Asked("dp2-zero3"), global_batch=global_batch)
            own = policy("deepspeed")
            small = {"zero_optimization": SMALL_PARTS}
            jobs += [
                make_job(made, own, world, rank=rank, settings=small, timeout_s=PATIENCE_S)
                for rank in range(count)
            ]
    records = run_jobs("deepspeed", jobs, tmp_path)
    real, fake = records[: 2 * repeats], records[2 * repeats :]
    for number, record in enumerate(fake):
        case, rank = divmod(number, len(ranks))
        again = real[case * repeats : (case + 1) * repeats]
        assert _bytes(record, 0) == min(_bytes(one, rank) for one in again)


def both(
    baseline: str, asked: list[Asked], folder: Path
) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    """(executed, traced): by case and rank the peaks of device and host, and the states of both."""
    repeated = [item for item in asked for _ in range(_repeats(item))]
    ranks = [(item, rank) for item in asked for rank in range(asked_problem(item).layout.gpus)]
    jobs = [_job(baseline, item, "executed", 0) for item in repeated]
    jobs += [_job(baseline, item, "traced", rank) for item, rank in ranks]
    records = run_jobs(baseline, jobs, folder)
    executed, traced = records[: len(repeated)], records[len(repeated) :]
    real: dict[str, Bytes] = {}
    fake: dict[str, Bytes] = {}
    for (item, rank), record in zip(ranks, traced, strict=True):
        name = f"{item} rank {rank}"
        again = [r for it, r in zip(repeated, executed, strict=True) if it is item]
        real[name] = min(_bytes(one, rank) for one in again)
        fake[name] = _bytes(record, 0)
    return real, fake


def _job(
    baseline: str, asked: Asked, world: Literal["executed", "traced"], rank: int
) -> PackageJob:
    later = "zero3" in asked.layout or "offload_modules" in asked.settings
    steps = 2 if later else 1  # the second is like all that follow
    options: dict[str, Any] = {"steps": steps, "timeout_s": PATIENCE_S, "rank": rank}
    return make_job(asked_problem(asked), policy(baseline, asked.settings), world, **options)


def _bytes(record: Record, index: int) -> Bytes:
    assert record.status == "ok", record.reason
    seen = record.measured
    rank = seen.ranks[index]
    peaks = rank.activation_peak_bytes, rank.host_peak_bytes
    return (*peaks, rank.state_bytes, rank.host_state_bytes)


def moved(found: dict[str, Bytes]) -> set[str]:
    """The cases of which bytes were on the host."""
    return {
        name.rpartition(" rank")[0] for name, (_, peak, _, held) in found.items() if peak or held
    }


def _moves(asked: Asked) -> bool:
    """Whether anything of the case is kept on the host."""
    offloaded = any(asked.settings.get(f"offload_{kind}") for kind in ("optimizer", "param"))
    return offloaded or str(asked.settings.get("checkpointing", "")).endswith("cpu")


def _repeats(asked: Asked) -> int:
    """Gloo's threads may hold a collective's buffer for a moment: the least of eight runs."""
    if "zero3" in asked.layout:
        return 2
    return 8 if asked.layout.startswith(("tp2", "dp2-zero", "ulysses2")) else 1
