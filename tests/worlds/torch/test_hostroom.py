"""A job that this host has no memory for is not started: the kernel would kill somebody."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import issue_order
from rematbench.host import memory as hostmemory
from rematbench.worlds.records.record import read_record
from rematbench.worlds.run_records import activation_bytes
from rematbench.worlds.torch import parameters, rank_model, rank_processes
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.groups import Coordinates
from rematbench.worlds.torch.single_rank import trace_rank
from tests.typed import typed
from tests.worlds.torch import cases, test_in_backward
from tests.worlds.torch.test_execute_cli import TINY

CASES = {
    "fp64": lambda: cases.case("pp2", "keep"),
    "bf16 ZeRO-1": lambda: cases.case("dp2", "keep", precision="bf16"),
    "ZeRO-0": lambda: cases.case("dp2-zero0", "keep", precision="fp32"),
    "tp": lambda: cases.case("tp2-pp2", "keep", precision="bf16"),
    "in backward": lambda: test_in_backward.case("dp2", "keep")[1],
}


@pytest.mark.parametrize("name", CASES)
def test_the_states_of_all_ranks_are_counted_and_nothing_else(name: str) -> None:
    """Measured ones have rope tables, batches and padding too: at most a tenth more here."""
    case = CASES[name]()
    lay = case.problem.layout
    every = [trace_rank(case.problem, case.plan, stage).state_bytes for stage in range(lay.pp)]
    measured = sum(every) * lay.gpus // lay.pp
    assert 0.9 * measured < rank_processes.state_bytes(case) <= measured


def test_a_job_too_large_for_the_host_is_not_started_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small, large = cases.case("one", "keep"), cases.case("one", "full", precision="bf16")
    need = {small.name: 10, large.name: 1000}
    monkeypatch.setattr(rank_processes, "PROCESS_BYTES", 0)
    started: list[str] = []

    def execute(given: list[Case], **_: object) -> list[rank_processes.Result]:
        started.extend(case.name for case in given)
        return [rank_processes.Result(name=case.name, status="ok") for case in given]

    monkeypatch.setattr(rank_processes, "execute_cases", execute)
    monkeypatch.setattr(rank_processes, "state_bytes", lambda case: need[case.name])
    monkeypatch.setattr(rank_processes, "initialization_bytes", lambda case: 0)
    monkeypatch.setattr(rank_processes, "free_bytes", lambda: 100)
    found = rank_processes.run_spawned([large, small], 1.0)
    assert [(r.name, r.status) for r in found] == [(large.name, "oom"), (small.name, "ok")]
    assert started == [small.name]
    monkeypatch.setattr(rank_processes, "free_bytes", lambda: -1)  # unknown: it is tried
    assert [r.status for r in rank_processes.run_spawned([large], 1.0)] == ["ok"]


def test_every_process_and_the_fullest_stages_activations_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = cases.case("tp2-pp2", "keep")
    program = lower(case.plan, case.problem)
    peak = max(ledger.device_peak_bytes for ledger in issue_order(program))
    assert activation_bytes(case.problem, case.plan) == 2 * peak
    case = dataclasses.replace(case, activation_bytes=2 * peak)
    need = rank_processes.state_bytes(case) + 2 * peak + 4 * rank_processes.PROCESS_BYTES
    monkeypatch.setattr(rank_processes, "free_bytes", lambda: need)
    assert rank_processes.memory_shortage(case) == ""
    monkeypatch.setattr(rank_processes, "free_bytes", lambda: need - 1)
    assert rank_processes.memory_shortage(case).startswith(
        "4 ranks need at least 0.8 GiB of host memory (0.0 of parameters"
    )


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_counts_as_it_is_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stage's own model: the whole parameter beside all that the rank has of others."""
    case, drawn = CASES[name](), []
    lay, made = case.problem.layout, [0]

    def noted(spec: parameters.ParameterSpec, *rest: Any, **more: Any) -> parameters.Parameter:
        drawn.append(made[-1] + parameters.full_weight(spec, 0).nbytes)
        found = parameters.build(spec, *rest, **more)
        made.append(made[-1] + sum(tensor.untyped_storage().nbytes() for tensor in found.tensors()))
        return found

    monkeypatch.setattr(rank_model, "build", noted)
    total = 0
    for stage in range(lay.pp):
        place = Coordinates(tp=0, cp=0, dp=0, pp=stage)
        drawn, made = [], [0]
        rank_model.RankModel(case.problem, case.plan, place, torch.device("cpu"), case.seed)
        total += max(drawn) * lay.gpus // lay.pp
    assert rank_processes.initialization_bytes(case) == total


def test_a_weight_that_is_drawn_whole_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every rank, of which each keeps a part only."""
    monkeypatch.setitem(cases.LAYOUTS, "tp4", {"tp": 4})
    sizes = {"vocab": 1 << 20, "num_kv_heads": 4}
    wide = msgspec.structs.replace(cases.TINY, tied_embeddings=True, **sizes)
    case = cases.case("tp4", "keep", model=wide, precision="bf16")
    assert (
        rank_processes.initialization_bytes(case)
        > rank_processes.state_bytes(case) + case.activation_bytes
    )
    need = rank_processes.initialization_bytes(case) + 4 * rank_processes.PROCESS_BYTES
    monkeypatch.setattr(rank_processes, "free_bytes", lambda: need)
    assert rank_processes.memory_shortage(case) == ""
    monkeypatch.setattr(rank_processes, "free_bytes", lambda: need - 1)
    assert "of initial weights" in rank_processes.memory_shortage(case)


@pytest.mark.parametrize("words", [("--gpus", "1000", "--tp", "2"), ("--seq-len", "100000000")])
def test_what_no_host_holds_is_answered_and_not_tried(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(given: list[Case], **_: object) -> list[rank_processes.Result]:
        raise AssertionError("started")

    monkeypatch.setattr(rank_processes, "execute_cases", never)
    monkeypatch.setattr(rank_processes, "free_bytes", lambda: 100 << 30)
    out = tmp_path / "record.json"
    asked = ["execute", "keep_all", *TINY, "--gpus", "1", *words, "--out", str(out)]
    assert typed(*asked, "--device", "cpu").code == 1
    assert read_record(out).status == "oom"


def test_a_control_groups_limit_counts_as_free_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostmemory, "meminfo", lambda: {"MemAvailable": 1000})
    for limit, free in ((-1, 1000), (10, 10), (5000, 1000)):
        monkeypatch.setattr(hostmemory, "cgroup_limit", lambda limit=limit: limit)
        assert hostmemory.free_bytes() == free
