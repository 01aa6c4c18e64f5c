"""What a folder of `measure-gpu` shows: what failed, is missing or unreadable is never right."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

pytest.importorskip("torch", reason="the executed world needs torch")

from rematbench.inputs.paths import data_dir
from rematbench.measure.parts import checks, run
from rematbench.measure.parts.checks import Finding, Ran, findings
from rematbench.worlds import executed
from rematbench.worlds.executed import How, compared_outcome, run_cells
from rematbench.worlds.records.measured import Comparison, Measured, largest
from rematbench.worlds.records.record import Record, keep_record, read_record, write_record
from tests.measure.test_measure_gpu import CELLS, suite

RECORD = "bf16-one.keep_all.0.json"
PEAKS = "the allocator's peak is the simulated one's"
BYTES = "live bytes equal the ledger after every action"
SAME = "gradients are keep_all's (lossless-fp32)"


def held(folder: Path, *planned: str) -> dict[str, Finding]:
    return {finding.claim: finding for finding in findings(folder, planned)}


def large(folder: Path) -> tuple[Record, Path]:
    """A record of a large cell whose peak is right, and the folder that it is in."""
    record = read_record(data_dir("config").parent / "results/measured/executed" / RECORD)
    (rank,) = record.measured.ranks
    rank = replace(rank, allocated_bytes=rank.simulated_peak_bytes)
    record = replace(record, measured=replace(record.measured, ranks=(rank,)))
    write_record(record, folder / "records" / "large.keep_all.0.json")
    return record, folder / "records"


def test_a_cell_that_failed_or_is_missing_is_never_taken_for_right(tmp_path: Path) -> None:
    record, records = large(tmp_path)
    found = held(tmp_path, "large.keep_all.0")
    assert (found[PEAKS].holds, found[BYTES].holds) == (True, True)
    refused = replace(record, measured=None, status="unsupported", reason="two streams")
    write_record(refused, records / "large.lynx.0.json")
    assert held(tmp_path)[PEAKS] == found[PEAKS]

    found = held(tmp_path, "large.keep_all.0", "large.memo.0")
    assert (found[PEAKS].holds, found[BYTES].holds) == (None, None)
    assert "memo.0 missing" in found[PEAKS].text
    for status, reason in (("failed", "timeout: no result within 90 s"), ("oom", "full")):
        lost = replace(record, measured=None, status=status, reason=reason)
        write_record(lost, records / "large.memo.0.json")
        found = held(tmp_path, "large.keep_all.0", "large.memo.0", "large.mst.0")
        for claim in (PEAKS, BYTES):
            assert found[claim].holds is False
            assert f"memo.0 {status} {reason}" in found[claim].text
    write_record(lost, records / "lossless-fp32.memo.0.json")
    assert (held(tmp_path)[SAME].holds, held(tmp_path)[SAME].text) == (False, "memo.0 oom full")
    found = held(tmp_path, "lossless-bf16.memo.0")
    assert found["gradients are keep_all's (lossless-bf16)"].text == "memo.0 missing"


def test_what_a_part_should_have_left_is_missed(tmp_path: Path) -> None:
    """By the summary, of the parts that have ended and the cells that were asked for."""
    large(tmp_path)
    path = suite(tmp_path, "lossless-fp32", "large")
    asked = run.GpuRequest(suite=path, output=tmp_path, device="cpu", only=())
    ended = Ran(part="large", status="ok", seconds=1.0)
    alone = replace(ended, only=("large.keep_all",))
    one = {f.claim: f.holds for f in run.summarize((alone,), asked, "").findings}
    every = run.summarize((ended,), asked, "")
    assert (one[PEAKS], one[BYTES]) == (True, True)
    found = {finding.claim: finding for finding in every.findings}
    assert found[PEAKS].holds is None
    assert "full_recompute.0 missing" in found[PEAKS].text
    assert not every.sound


def test_a_part_begins_without_its_own_files_of_before(tmp_path: Path) -> None:
    kept = tmp_path / "records" / "large.keep_all.0.json", tmp_path / "agreement" / "old.json"
    old = tmp_path / "baselines" / "old.json", tmp_path / "baselines.jsonl"
    for path in (*old, *kept):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    run.forget("baselines", tmp_path)
    assert [path for path in (*old, *kept) if path.exists()] == [*kept]


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("records/lossless-fp32.memo.0.json", SAME),
        ("records/large.memo.0.json", PEAKS),
        ("records/large.memo.0.json", BYTES),
        ("baselines/deepspeed-none.json", "the packages run"),
    ],
)
@pytest.mark.parametrize("text", ['{"status": "ok"', '{"status": "ok"}'])
def test_a_file_that_cannot_be_read_is_wrong_and_ends_nothing(
    name: str, claim: str, text: str, tmp_path: Path
) -> None:
    large(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (finding,) = (f for f in findings(tmp_path) if f.claim.startswith(claim))
    assert finding.holds is False
    assert finding.text.count("\n") == 0
    assert str(tmp_path) not in finding.text
    assert len(finding.text) > len("memo.0 ")


def comparison(**errors: float) -> Comparison:
    given = {"gradient_error": 0.0, "loss_error": 0.0, "first_gradient_error": 0.0} | errors
    return Comparison(against="keep_all", bitwise=False, bound=1e-5, **given)


@pytest.mark.parametrize("what", ["gradient_error", "loss_error", "first_gradient_error"])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_an_error_that_is_no_number_fails_its_record(what: str, error: float) -> None:
    status, reason, seen = compared_outcome(Measured(), comparison(**{what: error}))
    words = f"nan: NotFinite: against keep_all {what.replace('_', ' ')} {error}"
    assert (status, reason, seen) == ("failed", words, None)
    status, reason, seen = compared_outcome(Measured(), comparison())
    assert (status, reason) == ("ok", "")
    assert seen is not None
    assert seen.comparison == comparison()


def test_the_error_that_is_judged_is_the_one_that_is_said(tmp_path: Path) -> None:
    """In bf16 the first step's; an H200 had 0.0115 there and 0.065 over all steps."""
    first = replace(comparison(first_gradient_error=2e-6, gradient_error=0.5), first_only=True)
    assert (first.judged_error, first.lossless) == (2e-6, True)
    assert checks._verdict(first) == "2.0e-06 of 1e-05 (the first step)"
    every = comparison(gradient_error=0.5)
    assert (every.judged_error, every.lossless) == (0.5, False)
    assert checks._verdict(every) == "5.0e-01 of 1e-05 (all steps)"
    assert checks._verdict(replace(every, bitwise=True)) == "bitwise"


def test_no_error_that_is_no_number_is_passed_over() -> None:
    assert largest([0.1, 0.3, 0.2]) == 0.3
    assert math.isnan(largest([0.1, math.nan, 0.2]))


def test_a_cell_that_cannot_be_compared_has_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which can be read, as those of the cells beside it."""
    wrong = comparison(gradient_error=math.nan)
    monkeypatch.setattr(executed, "compared", lambda *_: wrong)
    path = suite(tmp_path, "lossless-fp32")
    found = run.GpuRequest(suite=path, output=tmp_path, device="cpu", only=CELLS[:1]).cells(
        "lossless"
    )
    for one, record in run_cells(found, 100.0, How(steps=1)):
        keep_record(record, tmp_path / "records", one.name)
    (finding,) = (f for f in findings(tmp_path) if f.claim == SAME)
    assert finding.holds is False
    assert finding.text.startswith("keep_all.0 failed nan: NotFinite: against keep_all gradient")


def test_a_summary_keeps_the_parts_of_earlier_commands_on_the_same_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that were run one by one: the last command's summary had only its own part."""
    monkeypatch.setattr(run, "_run", lambda part, asked, say: Ran(
        part=part, status="ok", seconds=1.0, only=asked.only
    ))  # fmt: skip
    asked = run.GpuRequest(suite=None, output=tmp_path, device="cpu", only=("large.keep_all",))

    def parts(*names: str, **changes: Any) -> list[str]:
        found = run.measure(names, replace(asked, **changes), lambda text: None)
        assert found == checks.read_summary(tmp_path / checks.SUMMARY)
        peaks = next(f for f in found.findings if "allocator's peak" in f.claim)
        assert "keep_all.0 missing" in peaks.text
        assert "memo" not in peaks.text  # `large` was asked for one cell
        return [ran.part for ran in found.parts]

    assert parts("large") == ["large"]
    assert parts("baselines", only=()) == ["large", "baselines"]
    assert parts("large", "layers") == ["baselines", "large", "layers"]
    other = replace(checks.read_summary(tmp_path / checks.SUMMARY), device="another")
    (tmp_path / checks.SUMMARY).write_bytes(msgspec.json.encode(other))
    assert parts("large") == ["large"]
    (tmp_path / checks.SUMMARY).write_text("{")
    assert parts("large") == ["large"]
