"""Columns of executed cells: time, MFU and the allocator's bytes of GPUs; of a CPU no time."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.cli.baseline import show
from rematbench.cli.real import speed_text, timing
from rematbench.costs.flops import model_flop_per_token
from rematbench.evaluate.result import evaluate_method
from rematbench.inputs.load import load_cluster
from rematbench.worlds.records.measured import (
    OF_CUDA,
    Engine,
    Measured,
    RankMeasured,
    has_peak_of,
    measured_speed,
)
from rematbench.worlds.records.record import make_record
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import Campaign
from rematbench.worlds.slurm.campaign_rows import COLUMNS, engine_of, number_rows
from rematbench.worlds.slurm.runner import CellRecord, encode
from tests.campaigns import campaign
from tests.problems import all_methods
from tests.tables import tables

SECONDS = (0.02, 0.05, 0.03)
TIME = ("timed_steps", "step_s", "step_min_s", "step_max_s", "tokens_per_s_per_gpu", "mfu_causal",
        "mfu_dense", "simulated_step_s", "step_error_percent")  # fmt: skip


def on_h800(tmp_path: Path, **top: Any) -> Campaign:
    """Two methods on two H800, bf16."""
    made = campaign(tmp_path, "h800-80gb", **top)
    problems = tuple(spec.changed(precision="bf16") for spec in made.suite.problems)
    return Campaign(replace(made.suite, problems=problems), all_methods())


def rank(number: int, peak: int, **more: Any) -> RankMeasured:
    """A rank of our executor by its peak; `simulated_peak_bytes` is never read from it."""
    moved = {"host_peak_bytes": 10 * number, "offload_bytes": 4, "recompute_flop": 8.0}
    held = {"activation_peak_bytes": peak - 1, "state_bytes": 1, "actions": 1, **moved, **more}
    return RankMeasured(rank=number, pp=0, **held)


MEASURED = Measured(
    losses=(5.5,),
    gradient_norms=(2.25,),
    ranks=(
        rank(0, 700, allocated_bytes=7000, reserved_bytes=8000, pinned_bytes=90, step_s=SECONDS),
        rank(1, 900, allocated_bytes=6000, reserved_bytes=6500, pinned_bytes=80, step_s=SECONDS),
    ),
)


def rows(made: Campaign, folder: Path, status: str = "ok", **parts: Any) -> list[dict[str, Any]]:
    """All rows, the first cell with a record of these parts."""
    store, cell = Store(folder / "cells"), made.cells[0]
    problem = made.problem(cell.spec)
    plain = make_record(evaluate_method(problem, made.method(cell)), made.method(cell))
    origin = replace(plain.provenance, torch="2.13", device=parts.pop("device", "NVIDIA H800"))
    record = replace(plain, provenance=origin, **parts)
    done = CellRecord(key=made.key(cell), cell=cell, status=status, written="now",
                      record=record if parts else None)  # type: ignore[arg-type]  # fmt: skip
    store.write(done.key, encode(done))
    return number_rows(made, store)


def test_seconds_of_gpus_are_speed_beside_the_simulated_step(tmp_path: Path) -> None:
    made = on_h800(tmp_path)
    row, waiting = rows(made, tmp_path, measured=MEASURED)
    assert [row[key] for key in ("timed_steps", "step_s", "step_min_s", "step_max_s")] == [
        3, 0.03, 0.02, 0.05,
    ]  # fmt: skip
    rate = 2 * 64 / 0.03 / 2  # global batch x length / median / GPUs
    assert row["tokens_per_s_per_gpu"] == pytest.approx(rate)
    work, peak = made.problem(made.cells[0].spec).workload, 9.895e14
    for key, causal in (("mfu_causal", True), ("mfu_dense", False)):
        assert row[key] == pytest.approx(rate * model_flop_per_token(work, causal=causal) / peak)
    simulated = made.simulated(made.cells[0])
    assert row["simulated_step_s"] == simulated.step_s
    assert row["step_error_percent"] == pytest.approx(100 * (0.03 / simulated.step_s - 1), abs=1e-3)
    assert waiting["status"] == "waiting"
    assert waiting["simulated_step_s"] > 0
    assert waiting["step_s"] == waiting["mfu_causal"] == waiting["peak_device_bytes"] == ""


def test_bytes_are_of_the_fullest_rank(tmp_path: Path) -> None:
    made = on_h800(tmp_path)
    row, _ = rows(made, tmp_path, measured=MEASURED)
    of_rank = ("peak_device_bytes", "allocated_bytes", "reserved_bytes", "pinned_bytes")
    assert [row[key] for key in of_rank] == [900, 6000, 6500, 80]
    assert (row["peak_host_bytes"], row["offload_bytes"], row["recompute_flop"]) == (10, 8, 16.0)
    simulated = row["simulated_peak_bytes"]
    assert row["peak_error_percent"] == pytest.approx(100 * (900 / simulated - 1), abs=1e-3)
    assert json.loads(row["losses"]) == [5.5]
    assert json.loads(row["gradient_norms"]) == [2.25]
    assert row["engine"].startswith("rematbench 0")
    assert (row["torch"], row["device"]) == ("2.13", "NVIDIA H800")


def test_a_cpu_has_no_time_measured_or_simulated(tmp_path: Path) -> None:
    """Neither a CPU cluster, nor a cell of a GPU cluster that ran on a CPU."""
    ranks = tuple(rank(number, 900) for number in range(2))
    here = replace(MEASURED, ranks=ranks)
    for made, device in ((campaign(tmp_path), "cpu (x86_64)"), (on_h800(tmp_path), "cpu (arm)")):
        folder = tmp_path / made.center.cluster.generation
        row, waiting = rows(made, folder, measured=here, device=device)
        assert {row[key] for key in TIME} == {""}
        assert {row[key] for key in ("allocated_bytes", "reserved_bytes", "pinned_bytes")} == {""}
        assert row["peak_device_bytes"] == 900
        assert row["simulated_peak_bytes"] > 0
        assert (waiting["simulated_step_s"] == "") == (made.center.cluster.generation == "cpu")
    assert row["peak_error_percent"] != "", "bf16"


def test_states_of_fp32_are_not_those_that_are_simulated(tmp_path: Path) -> None:
    row, _ = rows(campaign(tmp_path, "h800-80gb"), tmp_path, measured=MEASURED)
    assert row["peak_error_percent"] == ""
    assert row["step_error_percent"] != ""


def test_every_row_has_every_column_and_a_failure_its_prediction(tmp_path: Path) -> None:
    row, _ = rows(on_h800(tmp_path), tmp_path, status="oom")
    assert set(COLUMNS) <= row.keys()
    assert row["status"] == "oom"
    assert row["simulated_peak_bytes"] > 0
    assert (row["engine"], row["step_s"]) == ("rematbench", "")


ENGINE = Engine(
    label="megatron-core",
    stack={"megatron-core": "0.16.1", "torch": "2.13.0"},
    kernels={"norm": "torch", "core_attention": "flash"},
    device="NVIDIA H800",
)
SEEN = Measured(
    losses=(5.5, 5.25),
    gradient_norms=(5.0, 1.0),
    ranks=tuple(
        RankMeasured(
            rank=number,
            pp=0,
            **dict(zip(("activation_peak_bytes", "state_bytes"), device, strict=True)),
            **dict(zip(("host_peak_bytes", "host_state_bytes"), host, strict=True)),
            **dict(zip(OF_CUDA, cuda, strict=True)),
            step_s=step_s,
        )
        for number, (device, host, cuda, step_s) in enumerate(
            [
                ((500, 100), (20, 7), (1, 3, 5), (0.01, 0.05, 0.02)),
                ((400, 300), (30, 0), (2, 4, 6), (0.02, 0.04, 0.03)),
            ]
        )
    ),
    warmup_steps=4,
)
PACKAGE = {"measured": SEEN, "engine": ENGINE}


def test_a_package_has_the_same_columns(tmp_path: Path) -> None:
    row, _ = rows(on_h800(tmp_path), tmp_path, **PACKAGE)
    assert row["engine"] == "megatron-core 0.16.1"
    assert row["kernels"] == "norm: torch; core_attention: flash"
    steps = [row[key] for key in ("timed_steps", "step_s", "step_min_s", "step_max_s")]
    assert steps == [3, 0.03, 0.02, 0.05], "of each step the slowest rank"
    assert row["mfu_causal"] > 0
    assert json.loads(row["gradient_norms"]) == [5.0, 1.0]
    assert (row["peak_device_bytes"], row["allocated_bytes"], row["reserved_bytes"]) == (700, 2, 4)
    assert (row["peak_host_bytes"], row["pinned_bytes"], row["offload_bytes"]) == (30, 6, "")
    assert row["torch"] == "2.13.0"


def test_labels_carry_the_version_of_their_package() -> None:
    stack = {"deepspeed": "0.19.8", "torch": "2.13.0"}
    assert engine_of("deepspeed + CPU shim", stack) == "deepspeed 0.19.8 + CPU shim"
    assert engine_of("other", stack) == "other"


@pytest.mark.parametrize(("cluster", "device", "same"), tables(__file__)["peaks"])
def test_a_peak_is_that_of_the_clusters_gpu_only(cluster: str, device: str, same: bool) -> None:
    assert has_peak_of(load_cluster(cluster), device) == same


def test_what_is_printed_leaves_out_an_mfu_of_another_gpu(tmp_path: Path) -> None:
    made = on_h800(tmp_path)
    problem = made.problem(made.cells[0].spec)
    own = speed_text(measured_speed(problem, SECONDS, "NVIDIA H800"))
    assert own.startswith("2,133.3 tokens/s/GPU, MFU 0.")
    assert own.endswith("% dense (of 989.5 TFLOP/s, H800-SXM5-80GB)")
    other = speed_text(measured_speed(problem, SECONDS, "NVIDIA B200"))
    assert other == (
        "2,133.3 tokens/s/GPU (no MFU: the peak of cluster h800-80gb is for H800-SXM5-80GB, but "
        "this ran on NVIDIA B200)"
    )
    assert timing(SECONDS).startswith("step 0.03 s (median of 3 further steps")


def test_baseline_run_prints_speed_after_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = on_h800(tmp_path)
    problem, method = made.problem(made.cells[0].spec), made.method(made.cells[0])
    plain = make_record(evaluate_method(problem, method), method)
    show(replace(plain, **PACKAGE), problem)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("  step 0.03 s (median of 3 further steps")
    assert lines[-1].startswith("  2,133.3 tokens/s/GPU, MFU 0.")
    ranks = tuple(replace(one, step_s=()) for one in SEEN.ranks)
    untimed = {"measured": replace(SEEN, ranks=ranks), "engine": ENGINE}
    show(replace(plain, **untimed), problem)
    assert "tokens/s" not in capsys.readouterr().out
    row, _ = rows(made, tmp_path, **untimed)
    assert (row["step_s"], row["mfu_causal"]) == ("", "")
    assert row["simulated_step_s"] > 0, "of a GPU, which was not timed"
