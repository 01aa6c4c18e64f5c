"""Megatron-core on fake tensors: the same bytes as on real ones, rank by rank."""

from pathlib import Path

import pytest

from rematbench.baselines import job as make_job
from rematbench.baselines import policy, run_jobs
from rematbench.record import Observed, Record
from tests.baselines.cases import GPT, Asked, asked_problem

pytest.importorskip("megatron.core", reason="megatron-core is installed by ./bench test")

ASKED = [
    Asked("one"),
    Asked("one", {"recompute": "full"}),
    Asked("one", {"recompute": "selective", "modules": ["core_attn", "mlp"]}),
    Asked("one", {"offload_modules": ["core_attn", "mlp_norm"]}),
    Asked("one", model=GPT),
    Asked("pp2"),
    Asked("pp2-vpp2"),
    Asked("tp2"),
    Asked("cp2"),
    Asked("dp2"),
]


def seen(record: Record) -> Observed:
    assert record.status == "ok", record.reason
    assert record.observed is not None
    return record.observed


def test_fake_tensors_weigh_what_real_ones_do(tmp_path: Path) -> None:
    jobs = []
    repeated = [number for number in range(len(ASKED)) for _ in range(_repeats(number))]
    for number in repeated:
        asked = ASKED[number]
        made, method = asked_problem(asked), policy("megatron_core", asked.settings)
        jobs.append(make_job(made, method, steps=1, timeout_s=60.0))
    ranks = [(number, rank) for number in range(len(ASKED)) for rank in range(_gpus(number))]
    for number, rank in ranks:
        asked = ASKED[number]
        made, method = asked_problem(asked), policy("megatron_core", asked.settings)
        jobs.append(make_job(made, method, "traced", rank=rank, timeout_s=60.0))
    records = run_jobs("megatron_core", jobs, tmp_path)
    executed, traced = records[: len(repeated)], records[len(repeated) :]
    real, fake = {}, {}
    for (number, rank), record in zip(ranks, traced, strict=True):
        got = seen(record)
        wants = [seen(r) for n, r in zip(repeated, executed, strict=True) if n == number]
        real[f"{ASKED[number]} rank {rank}"] = min(
            (want.activation_peak_bytes[rank], want.host_peak_bytes[rank]) for want in wants
        )
        fake[f"{ASKED[number]} rank {rank}"] = (
            got.activation_peak_bytes[0],
            got.host_peak_bytes[0],
        )
    assert fake == real


def _repeats(number: int) -> int:
    """Gloo's threads may hold a collective's buffer for a moment: the least of eight runs."""
    return 8 if "tp2" in ASKED[number].layout else 1


def _gpus(number: int) -> int:
    return asked_problem(ASKED[number]).layout.gpus
