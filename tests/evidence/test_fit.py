"""The fit reads FIT rows only, recovers known constants, and respects budgets."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rematbench.evidence.accuracy import left_out_errors, load_accuracy
from rematbench.evidence.bands import kind_coverage, pooled, shipped
from rematbench.evidence.calibrate import _lowered, _seconds, sources, step_model, without_source
from rematbench.evidence.expert_pace import at_pace, fitted_pace, left_out_experts, mean_error
from rematbench.evidence.fit import PRIORS, PredictAll, fit, fit_rows, published_step_s, with_values
from rematbench.evidence.job_evidence import (
    EXPERTS,
    REFITTED,
    SHEETS,
    expert_errors,
    job_of,
    joined,
    line_of,
    log_error,
    out_of_source,
)
from rematbench.evidence.predict import predict_rows
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import SPEED, Row, read_sheet
from rematbench.evidence.quantiles import quantile
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.constants import (
    Calibration,
    FitRule,
    load_calibration,
    parse_calibration,
    updated_text,
)
from rematbench.inputs.load import calibration
from rematbench.inputs.paths import data_dir
from rematbench.workload import Experts
from tests.cost_constants import ROUND
from tests.problems import LLAMA, all_methods, problem
from tests.wrong_inputs import ROW

RESULTS = ("tokens_per_s_per_gpu", "tflops_per_gpu_as_published", "mfu_pct_as_published", "status")
RULE = FitRule(source="Somebody", model=("a", "b"), tp=(2,))


class Guarded(Mapping[str, Any]):
    """A row whose results raise when read."""

    def __init__(self, cells: dict[str, Any], *, sealed: bool) -> None:
        self.cells, self.sealed = cells, sealed

    def __getitem__(self, key: str) -> Any:
        if self.sealed and key in RESULTS:
            raise AssertionError(f"the result {key} of a TEST row was read")
        return self.cells[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)


def row(model: str, tp: str = "2", speed: str = "100", **more: str) -> dict[str, Any]:
    own = {"source": "Somebody et al.", "system": "default", "cluster": "here", "model": model}
    sizes = {"tp": tp, "pp": "1", "seq_len": "1000", "tokens_per_s_per_gpu": speed}
    return ROW | own | sizes | more


def predict(given: Mapping[str, Any], calibration: Calibration) -> float:
    """A toy engine: work of known weights over the constants."""
    gpu = calibration.gpus["hopper"]
    work = float(given["micro_batch"])
    return 10.0 * work / gpu.gemm_efficiency + 3.0 / gpu.hbm_efficiency


def any_row(name: str, row: Row) -> bool:
    return bool(name and row)


def toy() -> Calibration:
    fitted = ("gpus.hopper.gemm_efficiency", "gpus.hopper.hbm_efficiency")
    return replace(ROUND, fitted=fitted, fit=(RULE,))


def one_by_one(predict: Callable[[Row, Calibration], float]) -> PredictAll:
    """The batch form of a single-row predictor."""
    return lambda jobs: [predict(row, calibration) for row, calibration in jobs]


def test_results_of_test_rows_are_never_read() -> None:
    rows = [
        Guarded(row("a"), sealed=False),
        Guarded(row("c"), sealed=True),
        Guarded(row("b", tp="4"), sealed=True),
        Guarded(row("a", source="Somebody else's cousin's table", table="x"), sealed=False),
    ]
    report = fit(rows, toy(), one_by_one(predict), any_row)
    assert report.rows == 2
    assert set(report.errors) == {"Somebody et al.", "Somebody else's cousin's table"}


def test_rows_without_a_speed_are_left_out() -> None:
    rows = [row("a", speed=""), row("a", status="oom"), row("a")]
    assert fit_rows(rows, (RULE,)) == [rows[2]]


@pytest.mark.parametrize(
    ("cells", "expected"),
    [({}, True), ({"tp": "2.0"}, True), ({"tp": "4"}, False), ({"tp": ""}, False),
     ({"layers": "12"}, False), ({"micro_batch": "2"}, False)],
)  # fmt: skip
def test_matching(cells: dict[str, str], expected: bool) -> None:
    """Also a sweep of one depth and micro-batch."""
    rule = replace(RULE, layers=(24,), micro_batch=(1,))
    assert rule.matches(row("a", **{"layers": "24", **cells})) is expected


def test_known_constants_are_recovered() -> None:
    truth = {"gemm_efficiency": 0.62, "hbm_efficiency": 0.75}
    true = replace(ROUND, gpus={"hopper": replace(ROUND.gpus["hopper"], **truth)})
    rows = []
    for work in np.linspace(0.1, 20, 40):
        given = row("a", micro_batch=str(work))
        speed = 16 * 1000 / 8 / predict(given, true)
        rows.append({**given, "tokens_per_s_per_gpu": repr(speed)})
    assert published_step_s(rows[0]) == pytest.approx(predict(rows[0], true))
    found = fit(rows, toy(), one_by_one(predict), any_row).calibration.gpus["hopper"]
    assert found.gemm_efficiency == pytest.approx(0.62, rel=0.02)
    assert found.hbm_efficiency == pytest.approx(0.75, rel=0.1)  # its prior pulls


def test_a_constant_that_no_row_moves_keeps_its_value() -> None:
    asked = replace(toy(), fitted=("gpus.hopper.gemm_efficiency", "gpus.ampere.gemm_efficiency"))
    report = fit([row("a")], asked, one_by_one(predict), any_row)
    assert report.constants == 1
    assert report.calibration.gpus["ampere"] == ROUND.gpus["ampere"]


def shipped_text() -> str:
    return (data_dir("config") / "calibration.yaml").read_text(encoding="utf-8")


def test_shipped_calibration_keeps_its_budget() -> None:
    calibration = load_calibration(data_dir("config") / "calibration.yaml")
    for entry in calibration.gpus:
        assert sum(n.startswith(f"gpus.{entry}.") for n in calibration.fitted) <= 4
    assert len(calibration.fitted) == 33
    for section, most in (("networks", 3), ("systems", 2)):
        for entry in getattr(calibration, section):
            own = [n for n in calibration.fitted if n.startswith(f"{section}.{entry}.")]
            assert len(own) <= most


def test_a_number_without_a_source_is_an_error() -> None:
    text = shipped_text().replace("sm_count: {value: 132, source:", "sm_count: {value: 132, why:")
    with pytest.raises(ValueError, match="why"):
        parse_calibration(text.encode())


def test_a_fitted_scalar_past_the_budget_is_an_error() -> None:
    text = shipped_text()
    fact = "sm_count: {value: 132"
    text = text.replace(f"{fact}, source: ", f"{fact}, source: fitted}} #", 1)
    with pytest.raises(ValueError, match=r"gpus\.hopper fits more than 4"):
        parse_calibration(text.encode())


def test_new_values_keep_sources_and_comments() -> None:
    text = shipped_text()
    calibration = parse_calibration(text.encode())
    assert parse_calibration(updated_text(text, calibration).encode()) == calibration
    hopper = replace(calibration.gpus["hopper"], gemm_efficiency=0.4321)
    moved = replace(calibration, gpus={**calibration.gpus, "hopper": hopper})
    changed = updated_text(text, moved)
    assert parse_calibration(changed.encode()).gpus["hopper"].gemm_efficiency == 0.4321
    assert [a for a, b in zip(text.split("\n"), changed.split("\n"), strict=True) if a != b] == [
        next(line for line in text.split("\n") if "gemm_efficiency" in line)
    ]


# -- the engine as the step model of the fit, and refits that never see a source -------------------


ROWS = read_sheet(data_dir("published") / "runs.csv")


def fitted(source: str) -> list[Any]:
    return [row for row in fit_rows(ROWS, calibration().fit) if source in row["source"]]


@pytest.mark.parametrize("source", ["Yuan", "Korthikanti", "Fujii", "MosaicML"])
def test_the_step_model_predicts_what_predict_does(source: str) -> None:
    row = fitted(source)[-1]
    whole = predict_rows([row], processes=1)[0]["pred_step_s"]
    lowered = _lowered(read_case(row, all_methods()), calibration())
    assert _seconds(lowered, calibration()) == pytest.approx(whole, rel=1e-9)


def test_a_long_step_is_computed_from_two_short_ones() -> None:
    row = fitted("Fujii")[0]
    lowered = _lowered(read_case(row, all_methods()), calibration())
    assert len(lowered.parts) == 2
    assert lowered.beyond > 0


def test_trials_come_back_in_order() -> None:
    start = calibration()
    slow = with_values(start, ["gpus.ampere.gemm_efficiency"], [0.4])
    one, other = fitted("Korthikanti")[:2]
    with step_model(start, processes=1) as model:
        found = model([(one, start), (other, start), (one, slow), (other, slow)])
    whole = [
        row["pred_step_s"]
        for constants in (None, slow)
        for row in predict_rows([one, other], processes=1, constants=constants)
    ]
    assert found == pytest.approx(whole, rel=1e-9)
    assert found[2] > 1.2 * found[0]
    assert found[3] > 1.2 * found[1]


def test_what_only_the_lost_source_informed_is_back_at_its_prior() -> None:
    start = calibration()
    left = without_source(start, ROWS, "Fujii")
    assert left.networks["h100-94gb-tsubame4"].nic_efficiency == PRIORS["nic_efficiency"].centre
    assert left.networks["h800-80gb"] == start.networks["h800-80gb"]
    assert left.gpus == start.gpus
    assert not [rule for rule in left.fit if "Fujii" in rule.source]
    assert len(left.fit) < len(start.fit)


def test_every_group_of_speeds_in_a_sheet_of_steps_has_a_left_out_error() -> None:
    groups = [group for group in load_accuracy().groups if group.metric == SPEED]
    names = {group.name for group in groups if group.sheet in SHEETS}
    assert set(left_out_errors(out_of_source(), load_accuracy(), calibration())) == names
    assert len(names) < len(groups)  # steps with experts have a sheet of their own
    assert "" not in sources(load_accuracy())  # a refit without it would leave every row out


def test_a_line_is_of_the_row_that_was_predicted() -> None:
    rows = [dict(ROWS[0], status="oom"), dict(ROWS[1])]
    made = [{**row, "pred_tokens_per_s_per_gpu": "3000"} for row in rows]
    found = [line_of("runs.csv", i, rows[i], made[i], REFITTED) for i in range(2)]
    assert found[0] == {}  # what ran out of memory has no error
    line = found[1]
    assert joined(line, {"runs.csv": rows})["model"] == rows[1]["model"]
    assert log_error(joined(line, {"runs.csv": rows})) == pytest.approx(
        math.log(3000 / float(rows[1]["tokens_per_s_per_gpu"]))
    )
    with pytest.raises(ConfigError, match="row 2: the prediction is for another row"):
        joined(line, {"runs.csv": rows[::-1]})


def test_every_fitted_source_is_refitted_without_and_no_other() -> None:
    """A row of a sheet with FIT rows is out of source only after a refit without its source."""
    declared = [rule.source for rule in calibration().fit]
    for row in out_of_source():
        if log_error(row) is None:
            continue  # a peak alone, to which no constant is fitted
        fitted_to = any(source in row["source"] for source in declared)
        assert fitted_to == (row["constants"] == REFITTED) or row["sheet"] == "runs_more.csv"


# -- the pace of experts' launches, and the band of jobs with experts ------------------------------


def test_a_fit_weighs_sources_alike_and_reads_declared_rows_alone() -> None:
    rows = [
        {"source": name, SPEED: "100", f"pred_{SPEED}": 100 * math.exp(error)}
        for name, error in (("a", 0.1), ("a", -0.1), ("a", 0.4), ("b", -0.6), ("c", 9.0))
    ]
    rules = [FitRule(source="a"), FitRule(source="b")]
    assert mean_error(rows, rules) == pytest.approx((0.2 + 0.6) / 2)


def test_a_pace_of_one_is_a_dense_layers() -> None:
    assert at_pace(calibration(), 1.0).common.expert_pace == 1.0
    assert at_pace(calibration(), 1.0).systems == calibration().systems


def test_experts_are_a_kind_of_evidence_by_themselves() -> None:
    """Whatever else such a job is outside of, its band is that of rows with experts, and the words
    of what is outside do not name experts."""
    bands, errors = shipped(), expert_errors()
    job = job_of(problem(model=replace(LLAMA, experts=Experts(count=8, active=2, ffn=64))), "")
    found = bands.band(job)
    dense = bands.band(replace(job, experts=False))
    assert found.half_width == quantile(errors)
    assert found.half_width > dense.half_width
    assert found.sources == len(errors)
    assert found.outside == dense.outside
    assert "experts" not in found.outside
    assert bands.band(replace(job, gpus=10**6)).half_width == found.half_width


def test_the_band_of_experts_holds_most_sources() -> None:
    """75 % of the rows, by source, was asked."""
    errors = expert_errors()
    assert pooled(kind_coverage(errors), errors).inside >= 0.75


@pytest.mark.full
def test_the_shipped_pace_is_the_fitted_one() -> None:
    constants = calibration()
    fitted = fitted_pace(constants, constants.fit_experts)
    assert constants.common.expert_pace == pytest.approx(fitted, rel=0.01)


@pytest.mark.full
def test_the_committed_lines_are_those_of_this_code() -> None:
    committed = read_sheet(data_dir("config") / EXPERTS)
    assert [dict(line) for line in committed] == left_out_experts(calibration())
