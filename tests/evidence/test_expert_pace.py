"""The pace of experts' launches, and the band of jobs with experts."""

import math

import pytest
from msgspec.structs import replace

from rematbench.evidence.bands import kind_coverage, pooled, shipped
from rematbench.evidence.expert_pace import at_pace, fitted_pace, left_out_experts, mean_error
from rematbench.evidence.job_evidence import EXPERTS, expert_errors, job_of
from rematbench.evidence.published.sheets import SPEED, read_sheet
from rematbench.evidence.quantiles import quantile
from rematbench.inputs.constants import FitRule
from rematbench.inputs.load import calibration
from rematbench.inputs.paths import data_dir
from rematbench.workload import Experts
from tests.problems import LLAMA, problem


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
