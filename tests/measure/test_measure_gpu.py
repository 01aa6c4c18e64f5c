"""`rematbench measure-gpu` as a person runs it, as far as a CPU goes: parts, files, a crash."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="the executed world needs torch")

from rematbench.cli.real import timing, verdict
from rematbench.inputs.paths import data_dir
from rematbench.measure.parts.checks import Ran, Summary, findings
from rematbench.worlds.records.measured import Comparison
from rematbench.worlds.records.record import Record, read_record, write_record
from tests.campaigns import suite_text, tiny
from tests.typed import typed
from tests.worlds.torch.test_execute_cli import rematbench

CELLS = ("lossless-fp32.keep_all", "lossless-fp32.full_recompute", "large.keep_all")


def suite(folder: Path, *names: str) -> Path:
    path = folder / "suite.yaml"
    sizes = {"model": "tiny-llama-deep", "gpus": 1, "seq_len": 32, "global_batch": 2}
    kinds = {name: "bf16" if name == "large" else "fp32" for name in names}
    problems = [tiny(name, precision=kind, **sizes) for name, kind in kinds.items()]
    path.write_text(suite_text(problems))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    folder = tmp_path_factory.mktemp("gpu")
    path = suite(folder, "lossless-fp32", "large")
    words = ["-o", str(folder / "out"), "--suite", str(path), "--device", "cpu"]
    for name in CELLS:
        words += ["--only", name]
    done = rematbench("measure-gpu", *words)
    return folder / "out", done.returncode, done.stdout + done.stderr


@pytest.mark.full
def test_every_part_writes_its_file_and_the_summary_says_what_held(
    whole: tuple[Path, int, str],
) -> None:
    folder, code, text = whole
    found = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    assert [(ran.part, ran.status) for ran in found.parts] == [
        (part, "ok") for part in ("lossless", "large")
    ], text
    held = {finding.claim: finding.holds for finding in found.findings}
    assert held["gradients are keep_all's (lossless-fp32)"] is True
    assert held["live bytes equal the ledger after every action"] is True
    assert held["the allocator's peak is the simulated one's"] is None
    assert code == 1  # a CPU has no such allocator, so not every claim is known
    assert "not known" in text


@pytest.mark.full
def test_records_are_those_of_every_cell(whole: tuple[Path, int, str]) -> None:
    records = sorted((whole[0] / "records").glob("*.json"))
    assert {path.stem for path in records} == {f"{name}.0" for name in CELLS}
    done = {path.stem: read_record(path) for path in records}
    keep = done["lossless-fp32.keep_all.0"]
    assert keep.measured is not None
    assert keep.measured.comparison is not None
    assert keep.measured.comparison.bitwise  # run twice
    large = done["large.keep_all.0"]
    assert large.measured is not None
    assert large.measured.comparison is None


@pytest.mark.full
def test_what_crashes_loses_nothing_of_the_others(tmp_path: Path) -> None:
    path, out = suite(tmp_path, "lossless-fp32"), tmp_path / "out"
    words = ("--part", "large", "--part", "lossless", "--only", CELLS[0])
    done = rematbench(
        "measure-gpu", "-o", str(out), "--suite", str(path), "--device", "cpu", *words
    )
    assert done.returncode == 1
    found = msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary)
    assert [(ran.part, ran.status) for ran in found.parts] == [
        ("large", "failed"),
        ("lossless", "ok"),
    ]
    assert (out / "records" / f"{CELLS[0]}.0.json").is_file()
    assert "no selected problem's name begins with large" in found.parts[0].reason


def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ran = typed("measure-gpu", "-o", str(tmp_path / "out"))
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "torch sees no GPU" in ran.err
    assert not (tmp_path / "out").exists()


def test_verdicts_say_which_step_a_bound_is_of_and_how_steps_were_timed() -> None:
    found = Comparison(
        against="keep_all",
        bitwise=False,
        gradient_error=0.03,
        loss_error=1e-5,
        bound=1e-2,
        first_gradient_error=2e-3,
        first_only=True,
    )
    assert "yes (largest norm-wise gradient error 0.002 at the first step, at most 0.03" in verdict(
        found
    )
    assert timing([0.3, 0.1, 0.2]).startswith("step 0.2 s (median of 3 further steps")


def record_of(name: str, **numbers: Any) -> Record:
    made = Path("results/measured/executed/agreement") / f"{name}.json"
    record = read_record(data_dir("config").parent / made)
    assert record.measured is not None
    return replace(record, measured=replace(record.measured, **numbers))


def test_packages_that_ran_have_seconds_and_bytes(tmp_path: Path) -> None:
    there, plain = tmp_path / "baselines", record_of("megatron_core-one-bf16").measured
    rank = replace(plain.ranks[0], step_s=(0.5, 0.7, 0.6), allocated_bytes=3 << 30)
    timed = record_of("megatron_core-one-bf16", ranks=(rank,))
    write_record(timed, there / "megatron_core-none.json")
    held = {finding.claim: finding for finding in findings(tmp_path)}
    ran = held["the packages run"]
    assert (ran.holds, ran.text) == (True, "megatron_core-none 0.6 s, allocated 3.000 GiB")

    lost = replace(record_of("megatron_core-one-bf16"), measured=None, status="oom", reason="full")
    write_record(lost, there / "megatron_core-full.json")
    held = {finding.claim: finding for finding in findings(tmp_path)}
    ran = held["the packages run"]
    assert (ran.holds, "megatron_core-full oom full" in ran.text) == (False, True)


def test_nothing_measured_is_nothing_known(tmp_path: Path) -> None:
    found = findings(tmp_path)
    assert {finding.holds for finding in found} == {None}
    ran = (Ran(part="large", status="ok", seconds=1.0),)
    assert not Summary(written="", device="", parts=ran, findings=found).sound


@pytest.mark.full
@pytest.mark.parametrize(
    ("extra_mib", "holds"), [(0, True), (32, True), (66, True), (120, False), (-60, False)]
)
def test_the_allocators_peak_is_held_within_workspaces_and_activations(
    extra_mib: int, holds: bool, whole: tuple[Path, int, str], tmp_path: Path
) -> None:
    """One GiB of activations beside sixteen of states: two per cent are of the activations."""
    record = read_record(whole[0] / "records" / "large.keep_all.0.json")
    (rank,) = record.measured.ranks
    mib = 1 << 20
    rank = replace(
        rank,
        simulated_peak_bytes=17408 * mib,
        simulated_state_bytes=16384 * mib,
        allocated_bytes=(17408 + extra_mib) * mib,
    )
    written = replace(record, measured=replace(record.measured, ranks=(rank,)))
    write_record(written, tmp_path / "records" / "large.keep_all.0.json")
    held = {finding.claim: finding.holds for finding in findings(tmp_path)}
    assert held["the allocator's peak is the simulated one's"] is holds


@pytest.mark.full
def test_old_files_are_not_taken_for_this_runs(
    whole: tuple[Path, int, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    records = out / "records"
    for name in ("large.keep_all.0", "lossless-x.keep_all.0"):
        write_record(
            read_record(whole[0] / "records" / f"{CELLS[-1]}.0.json"), records / f"{name}.json"
        )
    (out / "actions.jsonl").write_text("{}")
    path, parts = suite(tmp_path, "lossless-fp32"), ("--part", "large", "--part", "baselines")
    words = ("-o", str(out), "--suite", str(path), "--device", "cpu")
    done = rematbench("measure-gpu", *words, *parts)
    assert done.returncode == 1
    found = msgspec.json.decode((out / "summary.json").read_bytes(), type=Summary)
    assert [ran.status for ran in found.parts] == ["failed", "failed"]
    assert (out / "actions.jsonl").exists()
    assert [path.stem for path in records.iterdir()] == ["lossless-x.keep_all.0"]  # another part's
    held = {finding.claim: finding.holds for finding in found.findings}
    assert held["the allocator's peak is the simulated one's"] is None
