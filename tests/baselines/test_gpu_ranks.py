"""What a baseline's ranks do on GPUs around the package's own steps.  No GPU here."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch
from torch import Tensor

from baselines.common import driver, resources, training
from baselines.common.driver import write_record_of
from baselines.common.interface import NotRunnable, RankAnswer
from baselines.common.meter import Meter
from rematbench.inputs.paths import data_dir
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import read_record
from rematbench.worlds.torch.case import NotFinite
from tests.baselines.cases import Asked, Ran, asked_job, assert_equal
from tests.installed import needs


class Told:
    """A trainer that only says what it is asked, and CUDA's peaks with it."""

    def __init__(self, losses: float = 1.5) -> None:
        self.said: list[str] = []
        self.value = losses

    def load(self, step: int) -> None:
        self.said.append(f"load {step}")

    def forward_backward(self, meter: Meter | None) -> None:
        self.said.append("metered" if meter else "run")

    def loss(self) -> float:
        self.said.append("loss")
        return self.value

    def gradients(self, *, whole: bool) -> tuple[dict[str, float], dict[str, Tensor]]:
        self.said.append("whole" if whole else "norms")
        return {"w": 2.0}, {"w": torch.ones(1)} if whole else {}

    def update(self) -> None:
        self.said.append("update")


def on_cuda(patch: pytest.MonkeyPatch, trainer: Told) -> None:
    """CUDA's functions that a loop calls, said in order among the trainer's."""
    for name, answer in (
        ("reset_peak_memory_stats", None), ("synchronize", None), ("is_available", True),
        ("max_memory_allocated", 1 << 30), ("max_memory_reserved", 3 << 29),
        ("reset_peak_host_memory_stats", None),
        ("host_memory_stats", {"allocated_bytes.peak": 1 << 20}),
    ):  # fmt: skip

        def called(*_: Any, name: str = name, answer: Any = answer) -> Any:
            if name not in ("is_available", "synchronize", "host_memory_stats"):
                trainer.said.append(name)
            return answer

        patch.setattr(torch.cuda, name, called)


def test_nobody_looks_at_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, answer = Told(), RankAnswer()
    on_cuda(monkeypatch, trainer)
    job = asked_job("megatron_core", Asked("one"), device="cuda", warmup=1, timed_steps=2)
    training.train(trainer, job, answer, Meter(), 1)
    forgotten = ("reset_peak_memory_stats", "reset_peak_host_memory_stats")
    assert trainer.said == [
        *forgotten,
        *("load 0", "run", "loss", "whole", "update"),
        *("load 1", "metered", "loss", "norms", "update"),
        *("load 2", "run", "update"),
        *("load 3", *forgotten, "run", "update"),
        *("load 4", "run", "update"),
        *("max_memory_allocated", "max_memory_reserved"),
    ]  # fmt: skip
    assert len(answer.step_s) == 2
    assert (answer.losses, answer.gradient_norms) == ([1.5, 1.5], [{"w": 2.0}] * 2)
    assert (answer.allocated_bytes, answer.reserved_bytes) == (1 << 30, 3 << 29)
    assert answer.pinned_bytes == 1 << 20
    assert set(answer.gradients) == {"w"}


def test_a_cpu_times_nothing() -> None:
    trainer, answer = Told(), RankAnswer()
    training.train(trainer, asked_job("megatron_core", Asked("one")), answer, Meter(), 0)
    assert trainer.said.count("update") == 2
    assert answer.step_s == []


def test_a_loss_that_is_no_number_is_a_failure_that_says_so() -> None:
    with pytest.raises(NotFinite, match="loss of step 0 is nan"):
        training.train(
            Told(float("nan")), asked_job("deepspeed", Asked("one")), RankAnswer(), Meter(), 0
        )
    status, reason = driver._outcome(NotFinite("loss of step 0 is nan"))
    assert (status, reason) == ("failed", "nan: NotFinite: loss of step 0 is nan")
    assert driver._outcome(RuntimeError("CUDA error: out of memory"))[0] == "oom"
    assert driver._outcome(NotRunnable("no\nway")) == ("unsupported", "no way")


@pytest.mark.parametrize(("seen", "why"), [(0, "torch sees no GPU"), (1, "torch sees 1 here")])
def test_too_few_gpus_are_refused(seen: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    asked = asked_job("megatron_core", Asked("tp2"), device="cuda")
    with pytest.raises(NotRunnable, match=why):
        resources.require_gpus(asked, 2)
    resources.require_gpus(asked_job("megatron_core", Asked("tp2")), 2)


def test_a_rank_takes_its_gpu_and_what_the_package_wants_around_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []
    off: list[bool] = []
    monkeypatch.setenv("LOCAL_RANK", "7")  # of a launcher that shows each process one GPU
    monkeypatch.setattr(resources, "choose_device", torch.device)
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for kind in ("math", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"enable_{kind}_sdp", off.append)
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    from baselines.megatron_core import run  # noqa: PLC0415  # imports torch only

    moving = Asked("one", {"offload_modules": ["core_attn"]})
    settings = run.environment(asked_job("megatron_core", moving, device="cuda"))
    assert settings["NVTE_CPU_OFFLOAD_V1"] == "1"
    device = resources.take_gpu(3, 8, {**settings, "MINE": "other"})
    assert (device.index, os.environ["LOCAL_RANK"], threads, off) == (3, "3", [3], [False, False])
    assert (os.environ["CUDA_DEVICE_MAX_CONNECTIONS"], os.environ["MINE"]) == ("1", "kept")


def test_a_record_of_gpus_has_seconds_and_the_allocators_peaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H800")
    monkeypatch.setattr(resources, "cuda_versions", lambda: {"cuda": "12.8", "nccl": "2.27.5"})
    asked = asked_job("megatron_core", Asked("tp2"), device="cuda", warmup=1)
    from baselines.megatron_core import run  # noqa: PLC0415  # imports torch only

    answers = [
        RankAnswer(label="megatron-core", step_s=[s, s], allocated_bytes=7, reserved_bytes=8)
        for s in (0.5, 0.25)
    ]
    write_record_of(run, asked, tmp_path / "0.json", "ok", "", answers)
    record = read_record(tmp_path / "0.json")
    seen, engine = record.measured, record.engine
    assert (engine.device, engine.backend, seen.warmup_steps) == ("NVIDIA H800", "nccl", 3)
    assert [rank.step_s for rank in seen.ranks] == [(0.5, 0.5), (0.25, 0.25)]
    assert [(rank.allocated_bytes, rank.reserved_bytes) for rank in seen.ranks] == [(7, 8)] * 2
    assert engine.stack["nccl"] == "2.27.5"


PACKAGES = {"megatron_core": ("megatron.core", "tp2"), "deepspeed": ("deepspeed", "dp2")}


@pytest.mark.parametrize(
    "baseline",
    [
        pytest.param("megatron_core", marks=pytest.mark.full),
        pytest.param("deepspeed", marks=pytest.mark.soak),
    ],
)
def test_ranks_that_start_anew_train_as_forked_ones(baseline: str, tmp_path: Path) -> None:
    """As on GPUs, where a fork is refused; here on CPUs."""
    package, layout = PACKAGES[baseline]
    needs(package)
    asked = Asked(layout)
    jobs: list[PackageJob] = [asked_job(baseline, asked)]
    (tmp_path / "jobs.json").write_bytes(msgspec.json.encode(jobs))
    (tmp_path / "start.py").write_text(
        f"""import sys
from pathlib import Path
from types import SimpleNamespace
sys.path[0] = {str(data_dir("baselines").parent)!r}
if __name__ == "__main__":
    from baselines.common import driver
    assert driver.START["cuda"] == "spawn"
    driver.START["cpu"] = "spawn"
    here = Path({str(tmp_path)!r})
    sys.exit(driver.drive({baseline!r}, here / "jobs.json", here))
"""
    )
    subprocess.run([sys.executable, str(tmp_path / "start.py")], check=True, timeout=200)
    gradients = torch.load(tmp_path / "0.gradients.pt")
    assert_equal(asked, Ran(read_record(tmp_path / "0.json"), gradients), 1e-5)
