"""The fit reads FIT rows only, recovers known constants, and respects budgets."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rematbench.evidence.fit import PredictAll, fit, fit_rows, published_step_s
from rematbench.evidence.published.sheets import Row
from rematbench.inputs.constants import (
    Calibration,
    FitRule,
    load_calibration,
    parse_calibration,
    updated_text,
)
from rematbench.inputs.paths import data_dir
from tests.cost_constants import ROUND
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
    report = fit(rows, toy(), one_by_one(predict))
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
    found = fit(rows, toy(), one_by_one(predict)).calibration.gpus["hopper"]
    assert found.gemm_efficiency == pytest.approx(0.62, rel=0.02)
    assert found.hbm_efficiency == pytest.approx(0.75, rel=0.1)  # its prior pulls


def test_a_constant_that_no_row_moves_keeps_its_value() -> None:
    asked = replace(toy(), fitted=("gpus.hopper.gemm_efficiency", "gpus.ampere.gemm_efficiency"))
    report = fit([row("a")], asked, one_by_one(predict))
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
    with pytest.raises(ValueError, match=r"gpus\.hopper has 5 fitted"):
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
