"""The commands about traced baselines, with the packages' process replaced."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rematbench.cli.app import command_line
from rematbench.host.console import CommandError
from rematbench.paper.studies import baseline_points
from rematbench.paper.studies.baseline_points import load_points
from rematbench.paper.tables.baselines import build
from rematbench.worlds import package
from rematbench.worlds.packages.process import NotInstalled, PackageJob
from rematbench.worlds.records.plan_replay import spec_problem
from rematbench.worlds.records.record import Record, read_record, write_record
from rematbench.worlds.records.suite import Variant
from rematbench.worlds.reruns import differences
from tests.tables import tables

APP = command_line()

TRACED = Path(__file__).resolve().parents[2] / "results" / "measured" / "traced" / "baselines"
POINT = "k22b-selective"
RUN = CliRunner()
TRACE = [
    "trace", "megatron_core", "--set", "recompute=selective", "--model", "gpt-22b",
    "--cluster", "a100-80gb-selene", "--gpus", "16", "--seq-len", "2048", "--global-batch", "4",
    "--tp", "4", "--pp", "4", "--attention", "unfused",
]  # fmt: skip


def committed() -> Record:
    return read_record(TRACED / f"{POINT}.json")


def heavier(record: Record) -> Record:
    (rank,) = record.measured.ranks
    rank = msgspec.structs.replace(rank, activation_peak_bytes=rank.activation_peak_bytes + 1)
    seen = msgspec.structs.replace(record.measured, ranks=(rank,))
    return msgspec.structs.replace(record, measured=seen)


def again(folder: Path) -> Any:
    record = str(TRACED / f"{POINT}.json")
    return RUN.invoke(APP, ["verify", record, "-o", str(folder), "--if-installed"])


@pytest.mark.parametrize(("change", "code"), [(lambda r: r, 0), (heavier, 1)])
def test_a_number_that_differs_is_an_error(
    change: Any, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "run_jobs", lambda *_: [change(committed())])
    done = again(tmp_path)
    assert done.exit_code == code
    assert read_record(tmp_path / f"{POINT}.json") == change(committed())
    assert done.output.startswith(f"{POINT} (traced): ")
    assert ("every number equal" in done.output) == (code == 0)
    assert ("activation_peak_bytes" in done.output) == (code == 1)


def test_without_the_package_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> list[Record]:
        raise NotInstalled("megatron_core: 'megatron' is not installed here")

    monkeypatch.setattr(package, "run_jobs", missing)
    done = again(tmp_path)
    assert done.exit_code == 0
    assert done.output.splitlines() == [
        f"{POINT}: not run again: megatron_core: 'megatron' is not installed here"
    ]


def test_a_record_that_is_not_there_is_said_before_anything_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "run_jobs", lambda *_: pytest.fail("traced"))
    asked = [str(TRACED / f"{POINT}.json"), str(tmp_path / f"none/{POINT}.json")]
    done = RUN.invoke(APP, ["verify", *asked])
    assert done.exit_code != 0
    assert f"none/{POINT}.json: cannot be read" in str(done.exception)


def test_a_record_of_another_outcome_differs() -> None:
    broken = msgspec.structs.replace(committed(), status="failed", reason="why", measured=None)
    said = differences(broken, committed())
    assert said[:2] == ["status failed, committed ok", "reason why, committed "]
    assert "only one of the two records has measured numbers" in said


@pytest.mark.parametrize(("stage", "rank"), [(None, 0), (0, 0), (3, 12)])
def test_trace_takes_a_baseline_and_a_stage(
    stage: int | None, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[PackageJob] = []

    def run_jobs(name: str, jobs: list[PackageJob]) -> list[Record]:
        asked.extend(jobs)
        return [committed()]

    pytest.importorskip("torch")
    monkeypatch.setattr(package, "run_jobs", run_jobs)
    done = RUN.invoke(APP, TRACE if stage is None else [*TRACE, "--stage", str(stage)])
    assert done.exit_code == 0, done.output
    assert (asked[0].rank, asked[0].run.world) == (rank, "traced")
    assert asked[0].run.parameters["megatron_core"]["recompute"] == "selective"
    assert "megatron-core + CPU shim (fake tensors)" in done.output


def test_trace_refuses_a_stage_that_is_not_there() -> None:
    pytest.importorskip("torch")
    done = RUN.invoke(APP, [*TRACE, "--stage", "4"])
    assert done.exit_code != 0
    assert "--stage 4: the pipeline has ranks 0 to 3" in str(done.exception or done.output)


def test_the_tables_have_every_committed_point_and_tensor(tmp_path: Path) -> None:
    agreement = TRACED.parents[1] / "executed/agreement"
    _, traced, tensors = build(TRACED, agreement)
    text = traced.markdown()
    assert all(f"| {point.name} " in text for point in load_points())
    assert {"qkv_before_rope", "up_out_offset", "rope_tables"} <= set(tensors.csv().split(","))
    with pytest.raises(CommandError, match="no record of any point"):
        build(tmp_path, agreement)


def test_an_equal_record_keeps_its_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = committed()
    write_record(old, tmp_path / f"{POINT}.json")
    later = msgspec.structs.replace(old.provenance, written="2099-01-01T00:00:00+00:00")
    record = msgspec.structs.replace(old, provenance=later)
    monkeypatch.setattr(baseline_points, "run_jobs", lambda *_: [record])
    (point,) = (point for point in load_points() if point.name == POINT)
    baseline_points.trace_points((point,), tmp_path)
    assert read_record(tmp_path / f"{POINT}.json") == old


def test_what_does_not_run_is_said_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = msgspec.structs.replace(
        committed(), status="unsupported", reason="megatron_core: --x is not known", measured=None
    )
    monkeypatch.setattr(package, "run_jobs", lambda *_: [refused])
    done = RUN.invoke(APP, ["baseline", "run", *TRACE[1:]])
    assert done.exit_code == 1
    assert done.output == "UNSUPPORTED: megatron_core: --x is not known\n"


def test_states_on_the_host_are_said_beside_those_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = read_record(TRACED / "llama2-7b-4k-offload.json")
    monkeypatch.setattr(package, "run_jobs", lambda *_: [record])
    done = RUN.invoke(APP, TRACE)
    assert "shim: places, streams, norm, order" in done.output
    assert "host 0.97 GiB, states 0.93 GiB and 15.69 GiB on the host" in done.output


@pytest.mark.parametrize(("command", "given"), tables(__file__)["base_plans"])
def test_a_base_plan_that_no_package_runs_is_refused(
    command: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "run_jobs", lambda *_: pytest.fail("run"))
    done = RUN.invoke(APP, [*command, *TRACE[1:], *given])
    assert isinstance(done.exception, CommandError)
    assert str(done.exception) == (
        f"{given[0]}: megatron_core runs only 1F1B with the same number of layers in every chunk"
    )


@pytest.mark.parametrize(("words", "said"), tables(__file__)["refused"])
def test_what_does_not_run_is_not_predicted(words: list[str], said: str) -> None:
    job = ["--model", "tiny-llama", "--cluster", "this-machine", "--gpus", "2"]
    size = ["--seq-len", "2044", "--global-batch", "2", "--precision", "fp32"]
    done = RUN.invoke(APP, ["baseline", "predict", *words, *job, *size])
    assert f"(simulated): unsupported {said}" in done.output


@pytest.mark.parametrize(("cluster", "timed"), [("h100-80gb-dos", True), ("h100-80gb", False)])
def test_a_prediction_has_seconds_where_the_node_has_a_rate(cluster: str, *, timed: bool) -> None:
    words = [
        "deepspeed",
        "--model",
        "llama2-7b",
        "--cluster",
        cluster,
        "--gpus",
        "4",
        "--zero",
        "3",
    ]
    size = ["--seq-len", "2048", "--global-batch", "4", "--set", "offload_optimizer=true"]
    done = RUN.invoke(APP, ["baseline", "predict", *words, *size])
    assert ("  step 1." in done.output) == timed
    assert ("time not modelled: an optimizer in host memory" in done.output) != timed
    assert "stage 0: peak" in done.output


def said_of(name: str) -> tuple[list[str], int]:
    """The options that say a point's job, and the device's bytes that were traced of its rank."""
    (point,) = [point for point in load_points() if point.name == name]
    seen = read_record(TRACED / f"{name}.json").measured
    words = Variant(method=point.baseline, settings=point.settings).to_arguments(point)
    return words, seen.ranks[0].peak_bytes


@pytest.mark.parametrize(
    ("name", "bound"),
    [("llama2-7b-4k-offload", 0.015), ("llama2-7b-4k-zero2", 1e-6), ("atc24-65b-offload", 0.005)],
)
def test_a_prediction_is_what_the_package_holds(name: str, bound: float, tmp_path: Path) -> None:
    """The plan alone says 2.42, 26.31 and 70.09 GiB; what is traced is 4.48, 25.32 and 78.61."""
    words, traced = said_of(name)
    done = RUN.invoke(APP, ["baseline", "predict", *words, "--out", str(tmp_path / "run.json")])
    assert done.exit_code == 0, done.output
    record = read_record(tmp_path / "run.json")
    assert record.ranks[0].device_peak == pytest.approx(traced, rel=bound)
    usable = spec_problem(record.spec).usable_bytes
    reserved = usable - (record.headroom_bytes or 0)
    assert traced < reserved < 1.4 * traced
    if name == "llama2-7b-4k-offload":  # its node has no rate for an update on the host
        assert (record.status, record.repeats) == ("ok", ())
        assert record.reason.startswith("time not modelled: an optimizer in host memory")
    else:
        assert record.status == ("ok" if reserved <= usable else "oom")
        assert record.repeats[0].peak_device_bytes == record.ranks[0].device_peak
    assert f"stage 0: peak {record.ranks[0].device_peak / 2**30:.2f} GiB" in done.output
