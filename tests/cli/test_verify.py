"""`rematbench verify`: what records say, run again in its world; no torch needed."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rematbench.cli.app import command_line
from rematbench.worlds import executed, package, traced
from rematbench.worlds import reruns as world
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.records.record import Record, RecordError, read_record, write_record
from rematbench.worlds.records.suite_cells import recorded_cell
from rematbench.worlds.reruns import rerun_record
from tests.problems import all_methods

APP = command_line()

MEASURED = Path(__file__).resolve().parents[2] / "results" / "measured"
RUN = CliRunner()
PIPE = (
    *("--model", "llama-7b", "--cluster", "a800-80gb", "--gpus", "4", "--pp", "4"),
    *("--seq-len", "4096", "--global-batch", "8"),
)


def simulated(path: Path, *words: str) -> Path:
    method, *more = words
    done = RUN.invoke(APP, ["simulate", method, *PIPE, *more, "--out", str(path)])
    assert done.exit_code == 0, done.output
    return path


ALL_ON_HOST = shlex.split(
    "--cluster h100-80gb-dos --system deepspeed --pp 1 --zero 3 --optimizer host --parameters host"
)


def verified(*words: object) -> tuple[int, str]:
    done = RUN.invoke(APP, ["verify", *map(str, words)])
    return done.exit_code, done.output or str(done.exception)


@pytest.mark.parametrize(
    "words",
    [
        ("full_recompute",),
        ("full_recompute", "--set", "num_layers=2"),
        ("keep_all", "--gpipe"),
        ("full_recompute", "--partition", "7,9,8,8"),
        ("pp_offload+mst", "--set", "pp_offload.alpha=0.5", "--vpp", "2"),
        ("pp_offload", "--reserve-gib", "30", "--vpp", "2"),
        ("keep_all", "--cluster", "h100-80gb-dos", "--optimizer", "host"),
        ("keep_all", *ALL_ON_HOST),
    ],
)
def test_a_record_says_all_that_its_run_needs(words: tuple[str, ...], tmp_path: Path) -> None:
    path = simulated(tmp_path / "run.json", *words)
    assert (read_record(path).ranks[0].optimizer == 0) == ("host" in words)
    assert verified(path) == (0, "run (simulated): every number equal\n")


def test_each_number_that_differs_is_said(tmp_path: Path) -> None:
    path = simulated(tmp_path / "run.json", "keep_all")
    record = read_record(path)
    assert record.headroom_bytes is not None
    rank = replace(record.ranks[1], parameter=record.ranks[1].parameter + 1)
    wrong = {
        "headroom_bytes": {"headroom_bytes": record.headroom_bytes + 1},
        "rank 1: parameter ": {"ranks": (record.ranks[0], rank, *record.ranks[2:])},
        "repeats 0 hfu ": {"repeats": (replace(record.repeats[0], hfu=0.5),)},
        "plan_hash ": {"plan_hash": "0"},
    }
    for said, what in wrong.items():
        write_record(replace(record, **what), path)
        code, text = verified(path)
        assert code == 1
        assert text.startswith(f"run (simulated): {said}"), text
    other = replace(record, provenance=replace(record.provenance, written="1970", platform="x"))
    write_record(other, path)
    assert verified(path, "-o", tmp_path / "new")[0] == 0
    made = read_record(tmp_path / "new" / "run.json")
    assert made.repeats == record.repeats


def test_what_is_no_record_is_said_before_anything_runs(tmp_path: Path) -> None:
    good = simulated(tmp_path / "run.json", "keep_all")
    code, text = verified(good, tmp_path / "none.json")
    assert code != 0
    assert "none.json: cannot be read" in text
    assert "every number equal" not in text


@pytest.mark.parametrize("what", ["cluster", "system", "calibration"])
def test_a_run_whose_inputs_have_changed_is_not_replayed_but_can_be_verified(
    what: str, tmp_path: Path
) -> None:
    """Its numbers are compared; a timeline of other numbers would pass for the record's."""
    path = simulated(tmp_path / "run.json", "keep_all")
    record = read_record(path)
    spec = replace(record.spec, **{f"{what}_hash": "0"})
    write_record(replace(record, spec=spec), path)
    done = RUN.invoke(APP, ["timeline", str(path), "-o", str(tmp_path / "trace.json")])
    assert f"its {what} has changed since" in str(done.exception)
    assert verified(path)[0] == 0


def test_a_published_record_is_its_authors(tmp_path: Path) -> None:
    record = read_record(simulated(tmp_path / "run.json", "keep_all"))
    spec = replace(record.spec, world="published")
    with pytest.raises(RecordError, match="only its authors"):
        rerun_record(replace(record, spec=spec), lambda: pytest.fail("planned"), all_methods())


@pytest.mark.parametrize(
    ("name", "module", "told"),
    [
        ("executed/tp2.memo.1", executed, {"compare": True, "steps": 3, "device": "cpu"}),
        ("traced/llama-65b-figure7.keep_all.0", traced, {"stage": 0}),
    ],
)
def test_a_world_is_told_what_the_record_knows(
    name: str, module: Any, told: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = read_record(MEASURED / f"{name}.json")
    asked: dict[str, Any] = {}

    def run(cell: Any, *words: Any, **more: Any) -> Record:
        asked["words"], asked["cell"] = words, cell
        return record

    monkeypatch.setattr(module, "run", run)
    registry = all_methods()
    cell = recorded_cell(name, record, registry)
    assert rerun_record(record, lambda: cell, registry) == record
    assert asked["cell"].method.parameters == record.spec.parameters
    how = asked["words"][0]
    assert all(
        (how if key == "stage" else getattr(how, key)) == value for key, value in told.items()
    )
    if module is executed:
        other = asked["words"][1]
        assert (other.name, other.plan) == ("keep_all", cell.problem.base_plan)


def test_a_package_takes_its_job_from_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[tuple[str, PackageJob]] = []
    monkeypatch.setattr(
        package, "run_jobs", lambda name, some: jobs.extend((name, j) for j in some) or [record]
    )
    for path in ("traced/baselines/k22b-selective", "executed/agreement/megatron_core-tp2-fp32"):
        record = read_record(MEASURED / f"{path}.json")
        assert rerun_record(record, lambda: pytest.fail("planned"), all_methods()) == record
    (name, traced_job), (_, executed_job) = jobs
    assert (name, traced_job.rank, traced_job.run.world) == ("megatron_core", 0, "traced")
    assert traced_job.run.parameters["megatron_core"]["recompute"] == "selective"
    assert (executed_job.steps, executed_job.timed_steps, executed_job.device) == (2, 0, "cpu")


def test_the_executors_own_run_of_the_agreement_is_executed_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = read_record(MEASURED / "executed/agreement/executor-one-fp32.json")
    monkeypatch.setattr(world, "executor_record", lambda problem, device, steps: (device, steps))
    registry = all_methods()
    made = rerun_record(record, lambda: recorded_cell("one", record, registry), registry)
    assert made == ("cpu", 2)
