"""What a job on GPUs does around its steps: settings, case, peaks, timed steps.  No GPU."""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rematbench.host import ranks
from rematbench.workload import Workload
from rematbench.worlds.torch import parameters, rank_processes, single_rank, worker
from rematbench.worlds.torch.case import Case, Result, failure
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.rank_processes import LauncherPlace
from rematbench.worlds.torch.storages import ExecutionError
from tests.worlds.torch import cases
from tests.worlds.torch.recorder import recording

DEVICE = torch.device("cuda", 0)
PINNED = 1 << 40
"""What torch says that it holds pinned, which may be more than is asked of it."""


def test_settings_are_made_before_cuda_and_processes_inherit_them() -> None:
    code = """
import subprocess
from rematbench.worlds.torch.rank_processes import device_kind
device_kind("cuda")
subprocess.run(["sh", "-c", "echo $CUDA_DEVICE_MAX_CONNECTIONS $CUBLAS_WORKSPACE_CONFIG"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["32", ":4096:8"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("ncclUnhandledCudaError: Last error: Cuda failure 2 'out of memory'"),
    ],
)
def test_memory_that_is_out_has_a_status_of_its_own(error: Exception) -> None:
    wrapped = ExecutionError("F0.0 L0.qkv")
    wrapped.__cause__ = error
    assert failure(error)[0] == failure(wrapped)[0] == "oom"
    assert failure(RuntimeError("CUDA error: an illegal memory access"))[0] == "failed"


def test_a_rank_that_failed_but_hangs_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "ERROR_GRACE_S", 0.2)
    (tmp_path / "0.1.error").write_text("oom\nOutOfMemoryError: full\n")
    alive: Any = [SimpleNamespace(exitcode=None)]
    start = time.monotonic()
    failure = ranks.watch(alive, tmp_path, 600.0)
    assert time.monotonic() - start < 300.0  # long before its time is over
    cause = ranks.error_of_job([tmp_path / "0.1.error"], failure)
    assert (cause.status, cause.reason) == ("oom", "OutOfMemoryError: full")


@pytest.mark.parametrize(
    ("code", "status", "word"),
    [(-6, "failed", "NCCL's watchdog"), (-9, "oom", "signal 9"), (1, "failed", "code 1")],
)
def test_how_a_process_ended_is_said(tmp_path: Path, code: int, status: str, word: str) -> None:
    dead: Any = [SimpleNamespace(exitcode=0), SimpleNamespace(exitcode=code)]
    found = ranks.watch(dead, tmp_path, 60.0)
    assert (found.status, word in found.reason, "rank 1" in found.reason) == (status, True, True)


def given_run(patch: pytest.MonkeyPatch, statuses: list[Any]) -> tuple[list[Result], list[str]]:
    """run_launched of as many cases on rank 0 of a launcher's, and how it let go of its groups."""
    left: list[str] = []
    waiting = iter(statuses)

    def one(case: Case, *_: object) -> Result:
        return Result(name=case.name, status=next(waiting))

    patch.setattr(rank_processes, "choose_device", lambda kind, rank: DEVICE)
    patch.setattr(rank_processes, "_run_case", one)
    patch.setattr(rank_processes, "_gathered", lambda own, given, talk: [own])
    distributed = rank_processes.dist
    patch.setattr(distributed, "init_process_group", lambda *_, **__: None)
    patch.setattr(distributed, "new_group", lambda **_: None)
    patch.setattr(distributed, "destroy_process_group", lambda: left.append("destroyed"))
    patch.setattr(
        distributed.distributed_c10d, "_abort_process_group", lambda: left.append("aborted")
    )
    given = LauncherPlace(rank=0, world_size=2, local_rank=0, address="localhost", port=1)
    many = [cases.case("tp2", "keep") for _ in statuses]
    return rank_processes.run_launched(many, given, 1.0)[0], left


def test_after_a_failure_no_further_case_runs_and_communicators_are_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, left = given_run(monkeypatch, ["ok", "oom", "ok"])
    assert [result.status for result in results] == ["ok", "oom"]
    assert left == ["aborted"]


def test_without_a_failure_communicators_are_destroyed(monkeypatch: pytest.MonkeyPatch) -> None:
    results, left = given_run(monkeypatch, ["ok", "ok"])
    assert (len(results), left) == (2, ["destroyed"])


def on_fake_gpu(case: Case, patch: pytest.MonkeyPatch) -> tuple[Any, list[str], list[str]]:
    """The worker's whole case on fake tensors; the result, the recorder's faults, and what was
    asked of the device."""
    asked: list[str] = []
    lay = case.problem.layout
    shape = (lay.global_batch, case.problem.workload.seq_len)

    def batch(workload: Workload, sequences: int, seed: int, step: int, ignored: float) -> Any:
        asked.append(f"batch {step}")
        ids = torch.zeros(shape, dtype=torch.int64)
        return SimpleNamespace(ids=ids, labels=ids, counted=1)

    def step(executor: Executor) -> float:
        executor.issue_step()
        asked.append("tracked" if executor.tracker else "not tracked")
        return 0.0

    for name in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
        patch.setattr(torch.cuda, name, lambda *_, name=name: asked.append(name))
    patch.setattr(torch.accelerator, "empty_host_cache", lambda: asked.append("empty_host_cache"))
    patch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    clear = "_cuda_clearCublasWorkspaces"
    patch.setattr(torch._C, clear, lambda: asked.append("workspaces"), raising=False)
    patch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.peak": PINNED})
    patch.setattr(
        torch.cuda, "reset_peak_host_memory_stats", lambda: asked.append("reset host peak")
    )
    patch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3)
    patch.setattr(torch.cuda, "max_memory_reserved", lambda device: 4)
    patch.setattr(torch, "use_deterministic_algorithms", lambda on: asked.append(f"same bits {on}"))
    patch.setattr(worker, "make_batch", batch)
    patch.setattr(worker, "drawing_threads", lambda device: 1)  # fake tensors are a thread's own
    patch.setattr(Executor, "run_step", step)
    with single_rank.fake_job(0, lay.gpus), recording(patch) as recorder:
        result = worker.run_case(case, 0, DEVICE, {})
    return result, recorder.faults, asked


def test_bytes_of_the_first_step_and_seconds_of_steps_without_an_observer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = cases.case("tp2", "offload", precision="bf16")
    case = replace(case, steps=2, timed_steps=2, shards=False, deterministic=True)
    result, faults, asked = on_fake_gpu(case, monkeypatch)
    assert faults == []
    forgets = ("workspaces", "empty_cache", "empty_host_cache", "reset_peak_memory_stats",
               "reset host peak")  # fmt: skip
    assert asked == [
        *("same bits True", *forgets, "pinned_max_cached_size_mb:1", "synchronize", *forgets),
        *("batch 0", "tracked", "batch 1", "not tracked", "batch 2", "batch 3"),
    ]
    assert result.bytes_after
    assert len(result.step_s) == 2
    assert min(result.step_s) > 0.0
    assert (result.allocated_bytes, result.reserved_bytes) == (3, 4)
    assert result.pinned_bytes == PINNED > result.host_peak_bytes > 0


def test_kernels_that_need_no_same_bits_cost_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.case("one", "keep", precision="bf16")
    case = replace(case, steps=1, timed_steps=0, shards=False, deterministic=False)
    asked = on_fake_gpu(case, monkeypatch)[2]
    assert [words for words in asked if words.startswith("same bits")] == []
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    asked = on_fake_gpu(case, monkeypatch)[2]  # after a case that asked for them
    assert asked[0] == "same bits False"


def test_squares_are_summed_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.arange(1000, dtype=torch.float32).view(10, 100)
    whole = parameters.square_sum(values)
    monkeypatch.setattr(parameters, "PIECE", 7)
    assert parameters.square_sum(values) == whole == sum(n * n for n in range(1000))
