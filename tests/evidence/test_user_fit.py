"""Calibrated by its user: the scales come back, few rows move little, what cannot be is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rematbench.cli.calibrate import calibrate_user_stack
from rematbench.cli.sheet import predict
from rematbench.cli.show import trust
from rematbench.evidence.accuracy import load_accuracy
from rematbench.evidence.bands import band_of
from rematbench.evidence.calibrate import SCALES, SLOW_HOST, leave_one_out, tangents
from rematbench.evidence.fit import with_values
from rematbench.evidence.job_evidence import LATE_STEP, slope_column
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.sheets import SPEED, read_sheet
from rematbench.evidence.user_fit import (
    COUNTS,
    SPREADS,
    Array,
    MeasuredRows,
    ScalePrior,
    band_after,
    band_of_rows,
    calibrated,
    learnt,
    leave_one_out_errors,
    mean_error,
    measured,
    prior,
    refusals,
    solved,
    stacks,
    suspects,
)
from rematbench.host.console import CommandError
from rematbench.host.table import write_sheet
from rematbench.inputs.constants import Calibration
from rematbench.inputs.layout import Layout
from rematbench.inputs.load import calibration, load_system
from rematbench.inputs.paths import data_dir
from tests.problems import make_problem

ROWS = read_sheet(data_dir("published") / "runs.csv")
TRUE = np.log([1.1, 0.9, 1.3, 1.2])


def drawn(count: int, noise: float = 0.0) -> MeasuredRows:
    random = np.random.default_rng(7)
    rows = random.uniform(0.05, 1.0, (count, len(SCALES)))
    return linear(rows, rows @ TRUE + noise * random.standard_normal(count))


def linear(slopes: Array, errors: Array) -> MeasuredRows:
    """Rows of one tangent."""
    return MeasuredRows(slopes[None], np.zeros((1, len(errors))), errors)


def test_many_exact_rows_give_the_scales_back() -> None:
    theta, covariance = solved(drawn(400), ScalePrior(spreads=SPREADS, noise=1e-4))
    assert theta == pytest.approx(TRUE, abs=1e-3)
    assert np.all(np.diag(covariance) < np.array(SPREADS) ** 2)


def test_few_rows_move_what_is_believed_least() -> None:
    """One row that all scales explain alike moves those of the widest prior most."""
    one = linear(np.ones((1, len(SCALES))), np.array([0.2]))
    theta, _ = solved(one, ScalePrior(spreads=SPREADS, noise=0.05))
    assert 0.0 < theta.sum() < 0.2
    assert theta / theta.max() == pytest.approx((np.array(SPREADS) / max(SPREADS)) ** 2)
    nothing, _ = solved(one.some([]), ScalePrior(spreads=SPREADS, noise=0.05))
    assert not nothing.any()


def test_noise_is_that_of_the_stacks() -> None:
    assert learnt([drawn(300, 0.02), drawn(300, 0.02)]).noise == pytest.approx(0.02, rel=0.2)


def test_rows_left_out_are_predicted_by_the_others() -> None:
    data = drawn(30)
    left = leave_one_out_errors(data, ScalePrior(spreads=SPREADS, noise=0.01))
    assert mean_error(np.array(left)) < 0.1 * mean_error(data.errors)


def test_the_band_follows_the_rows_where_they_disagree() -> None:
    """Rows that agree have the band of published stacks; a row of three that does not has its own,
    and so has a single row that no scale explains."""
    before, alike = prior(), linear(0.25 * np.ones((3, len(SCALES))), np.zeros(3))
    theta, _ = solved(alike, before)
    assert band_of_rows(alike, theta, before) == band_after(3)
    for errors in (np.array([0.0, 0.0, 0.9]), np.array([3.0])):
        rows = linear(alike.slopes[0][: len(errors)], errors)
        theta, _ = solved(rows, before)
        known = leave_one_out_errors(rows, before) if len(errors) > 1 else rows.left(theta)
        wide = band_of_rows(rows, theta, before)
        assert wide == pytest.approx(float(np.max(np.abs(known))))
        assert wide > 2.0 * band_after(len(errors))


def test_a_mistyped_row_is_named() -> None:
    before = ScalePrior(spreads=SPREADS, noise=0.05)
    rows = linear(np.eye(len(SCALES)), np.array([0.02, 0.0, 6.9, 0.01]))
    theta, _ = solved(rows, before)
    left, scale = suspects(rows, theta, before)
    assert left.startswith("row 3 is suspect: after the fit it is off by +")
    assert scale.startswith("row 3 is suspect: the fit needs scales outside of the usual range")
    assert "communication x" in scale
    assert "kernels" not in scale
    calm = linear(np.eye(len(SCALES)), np.array([0.02, 0.0, 0.3, 0.01]))
    assert suspects(calm, solved(calm, before)[0], before) == []


def test_a_host_that_nobody_saw_is_found() -> None:
    """Rows that are bound by kernels as predicted, and by a host three times as slow when measured:
    no slope at the prediction says so, the second tangent does."""
    kernels, host = np.array([1.0, 0.3, 0.0, 0.0]), np.array([0.0, 0.0, 0.0, 1.0])
    heights = -np.random.default_rng(7).uniform(0.1, 0.9, 12)
    told = np.maximum(0.0, heights + math.log(3.0))
    rows = MeasuredRows(
        np.stack([np.tile(kernels, (12, 1)), np.tile(host, (12, 1))]),
        np.stack([np.zeros(12), heights]),
        told,
    )
    prior = ScalePrior(spreads=SPREADS, noise=0.02)
    theta, _ = solved(rows, prior)
    assert math.exp(theta[-1]) == pytest.approx(3.0, rel=0.02)
    assert mean_error(rows.left(theta)) < 0.01
    blind = linear(rows.slopes[0], told)
    assert mean_error(blind.left(solved(blind, prior)[0])) > 0.1


def test_slopes_are_shares_of_the_step() -> None:
    """What a scale multiplies takes its share of the step; a second cannot count twice."""
    found = tangents(ROWS[0], calibration())
    assert len(found) == 2 * len(SCALES) + 1
    for late in (False, True):
        shares = {name: found[slope_column(name, late=late)] for name in SCALES}
        assert 0.0 < shares["attention"] < shares["kernels"] < 1.0
        attention = shares.pop("attention")
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.02), attention


def host_bound() -> dict[str, str]:
    """A published row of a small model under tensor parallelism, one sequence at a time."""
    single = read_sheet(data_dir("published") / "runs_more.csv")
    small = {"tp": "8", "micro_batch": "1", "pp": "1", "layers": "24"}
    return next(r for r in single if small.items() <= r.items())


def test_tangents_are_below_the_step_and_near_it() -> None:
    """A step that its device binds as predicted and its host where that is slow, and between."""
    asked, constants = host_bound(), with_launch(1.2e-5)
    found = tangents(asked, constants)
    assert found[slope_column("host")] < 0.01
    assert found[slope_column("host", late=True)] > 0.9
    data = measured([{**asked, f"pred_{SPEED}": asked[SPEED], **found}])
    first_s = step_s(asked, constants, 1.0)
    for scale in (1.5, 2.0, 3.0, SLOW_HOST):
        theta = np.log([1.0, 1.0, 1.0, scale])
        told = math.log(step_s(asked, constants, scale) / first_s)
        assert -0.005 < -float(data.left(theta)[0]) - told < 1e-6


def with_launch(seconds: float) -> Calibration:
    return with_values(calibration(), ["systems.megatron-deepspeed.host_launch_s"], [seconds])


def step_s(asked: dict[str, str], constants: Calibration, host: float) -> float:
    """A step under a host scale, which multiplies the seconds of a launch."""
    launch = constants.systems["megatron-deepspeed"].host_launch_s
    (made,) = predict_rows([asked], processes=1, constants=with_launch(host * launch))
    return float(made["pred_step_s"])


def test_tangents_out_of_source_are_those_of_the_constants_that_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A refit that never saw a slow host must not say that a row is bound by it."""
    asked, blind, told = host_bound(), with_launch(1e-6), with_launch(3e-4)

    def refitted(rows: Any, *_: Any) -> Any:
        yield "vTrain", predict_rows(rows, processes=1, constants=blind), blind

    monkeypatch.setattr("rematbench.evidence.calibrate.left_out_rows", refitted)
    (line,) = leave_one_out({"runs.csv": [], "runs_more.csv": [asked]}, told, load_accuracy(), 1)
    assert float(line[slope_column("host")]) < 0.1 < tangents(asked, told)[slope_column("host")]
    assert float(line[LATE_STEP]) == pytest.approx(tangents(asked, blind)[LATE_STEP], abs=1e-3)


def row(**changes: Any) -> dict[str, Any]:
    given = {**ROWS[0], SPEED: 100.0, f"pred_{SPEED}": 100.0, "pred_step_s": 2.0}
    return {**given, **{slope_column(name): 0.5 for name in SCALES}, **changes}


def test_what_cannot_be_is_refused_by_line() -> None:
    before = ScalePrior(spreads=SPREADS, noise=0.01)
    assert refusals([row(), row(seq_len="8192")], before) == []
    (fast,) = refusals([row(), row(**{SPEED: 300.0}, seq_len="8192")], before)
    assert "row 2: the measured step takes 0.6667 s, but its kernels alone take 1 s" in fast


@pytest.mark.parametrize(
    "column", ["note", "table", "source", "tflops_per_gpu_as_published", "mfu_pct_as_published"]
)
def test_one_job_at_two_speeds_is_refused_whatever_else_the_rows_say(column: str) -> None:
    before = ScalePrior(spreads=SPREADS, noise=0.01)
    again = row(**{SPEED: 110.0, column: "1"}, micro_batch="1.0")
    (twice,) = refusals([row(), again], before)
    assert twice.startswith("rows 1 and 2 contradict each other")
    assert refusals([row(), {**again, "recompute": "none"}], before) == []


# -- as typed -------------------------------------------------------------------------------------


def test_a_sheet_becomes_a_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stack a fifth slower than predicted: its file says so, and predictions follow it."""
    plain = predict_rows(ROWS[:2], processes=1)
    mine, stack, out = (tmp_path / name for name in ("mine.csv", "mine.yaml", "out.csv"))
    rows = [{**ROWS[i], SPEED: "", "step_s": 1.2 * plain[i]["pred_step_s"]} for i in range(2)]
    write_sheet(mine, rows)
    calibrate_user_stack(mine, stack, 1)
    assert "80 % band of the calibrated stack: +-" in capsys.readouterr().out
    found = load_system(stack)
    assert found.scales.kernels > 1.02
    assert found.scales.half_width == pytest.approx(band_after(2), abs=1e-4)
    predict(mine, out, 1, system=str(stack))
    for before, after in zip(plain, read_sheet(out), strict=True):
        moved = float(after["pred_step_s"]) / before["pred_step_s"]
        assert 1.1 < moved < 1.2
    layout = Layout(pp=4, vpp=8, global_batch=16)
    asked = {"model": "llama-7b", "cluster": "a800-80gb", "seq_len": 12288, "layout": layout}
    problem = make_problem(**asked, system=str(stack))
    band = band_of(problem, "full_recompute")
    assert "stack" not in band.outside
    assert band.half_width == found.scales.half_width
    assert "the stack's calibration rows" in trust(band)[0]


def test_the_stack_file_carries_the_band_of_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps typed in milliseconds, but for one row: the band is that of the rows, the row named."""
    plain = predict_rows(ROWS[:2], processes=1)
    mine, stack = tmp_path / "mine.csv", tmp_path / "mine.yaml"
    steps = [plain[0]["pred_step_s"], 1000.0 * plain[1]["pred_step_s"]]
    pairs = zip(ROWS[:2], steps, strict=True)
    write_sheet(mine, [{**row, SPEED: "", "step_s": step_s} for row, step_s in pairs])
    with pytest.raises(CommandError, match=r"not written: .* has a band of .* or add --force"):
        calibrate_user_stack(mine, stack, 1)
    assert not stack.exists()
    capsys.readouterr()
    calibrate_user_stack(mine, stack, 1, force=True)
    told = capsys.readouterr().out
    assert "of these rows, each left out of its fit" in told
    assert "WARNING: row 2 is suspect" in told
    half_width = load_system(stack).scales.half_width
    assert half_width > 1.0
    predict(mine, tmp_path / "out.csv", 1, system=str(stack))
    for row in read_sheet(tmp_path / "out.csv"):
        ratio = float(row["pred_high"]) / float(row[f"pred_{SPEED}"])
        assert math.log(ratio) == pytest.approx(half_width, rel=1e-3)
    write_sheet(mine, [{**ROWS[0], SPEED: "", "step_s": 1e12}])
    with pytest.raises(CommandError, match="the fitted scales are outside the range"):
        calibrate_user_stack(mine, tmp_path / "none.yaml", 1, force=True)
    assert not (tmp_path / "none.yaml").exists()
    assert "WARNING: row 1 is suspect" in capsys.readouterr().out
    peak = 2.0 * plain[0]["pred_peak_device_bytes"]
    write_sheet(mine, [{**ROWS[0], SPEED: "", "step_s": steps[0], "peak_device_bytes": peak}])
    calibrate_user_stack(mine, None, 1)
    alone = capsys.readouterr().out
    assert "error of each row when fitted without it: not possible with a single row" in alone
    assert "peak bytes" not in told
    assert "peak bytes, predicted against measured (not fitted): row 1 -50.0%" in alone


def test_a_calibrated_stack_is_calibrated_again(tmp_path: Path) -> None:
    """Rows as fast as the calibrated stack says move nothing: its scales stay."""
    scales = {"kernels": 1.3, "attention": 1.1, "communication": 0.8, "host": 1.5}
    said = {"name": "first", "version": "1", "base": ROWS[0]["system"], "scales": scales}
    first, second, mine = (tmp_path / name for name in ("first.yaml", "second.yaml", "mine.csv"))
    first.write_text(json.dumps({**said, "scales": {"value": scales, "source": "mine"}}))
    asked = [{**row, "system": str(first)} for row in ROWS[:2]]
    steps = [row["pred_step_s"] for row in predict_rows(asked, processes=1)]
    pairs = zip(asked, steps, strict=True)
    write_sheet(mine, [{**row, SPEED: "", "step_s": step_s} for row, step_s in pairs])
    calibrate_user_stack(mine, second, 1)
    found = load_system(second).scales
    assert {k: getattr(found, k) for k in SCALES} == pytest.approx(scales, rel=1e-3)


def test_a_stack_file_works_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base is a shipped stack's name or the path of a user's file, never the file itself.  Rows
    need no source and no status."""
    monkeypatch.chdir(tmp_path)
    logged = {k: v for k, v in ROWS[0].items() if k not in ("source", "status")}
    write_sheet(Path("mine.csv"), [{**logged, "cluster": "h800-80gb", "system": "nemo-24.12"}])
    calibrate_user_stack(Path("mine.csv"), Path("first.yaml"), 1)
    assert yaml.safe_load(Path("first.yaml").read_text())["base"] == "nemo-24.12"
    write_sheet(Path("mine.csv"), [{**logged, "cluster": "h800-80gb", "system": "first.yaml"}])
    calibrate_user_stack(Path("mine.csv"), Path("second.yaml"), 1)
    with pytest.raises(CommandError, match="the rows use this stack file"):
        calibrate_user_stack(Path("mine.csv"), Path("first.yaml"), 1)
    with pytest.raises(CommandError, match=r"end in \.yaml"):
        calibrate_user_stack(Path("mine.csv"), Path("first"), 1)
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert (
        load_system("../second.yaml").parallel.tp_overlap
        == load_system("nemo-24.12").parallel.tp_overlap
    )


def test_rows_of_two_stacks_are_refused(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    write_sheet(mine, ROWS[:3])
    with pytest.raises(CommandError, match="column system: all rows need the same value"):
        calibrate_user_stack(mine, None, 1)


# -- the protocol on published stacks -------------------------------------------------------------


def test_a_few_rows_never_harm_and_mostly_help() -> None:
    """The bars that are met; docs/decisions/evidence.md says which are not."""
    found = calibrated()
    assert len(found) == sum(len(rows) >= 10 for rows in stacks().values())
    for one in found:
        assert one.after[3] <= one.uncalibrated + 0.01
    assert sum(one.after[3] < one.uncalibrated for one in found) > len(found) / 2
    assert sum(one.after[3] < one.mfu[3] for one in found) > len(found) / 2
    assert math.isfinite(prior().noise)
    assert band_after(4) == band_after(COUNTS[1])
