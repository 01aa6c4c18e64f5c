"""The pace at which the host issues the launches of a mixture of experts (seconds of a launch,
relative to a dense layer), fitted to its declared rows, and the errors of published rows with
experts that are predicted without their source.

config/calibration.yaml declares whole sources (`fit_experts`).  A row of one of them is predicted
with the pace fitted to the others, every other row with the shipped pace
(config/left_out_experts.csv).
"""

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import Any

from msgspec.structs import replace

from rematbench.evidence.job_evidence import log_error
from rematbench.evidence.predict import joined
from rematbench.evidence.published.sheets import SPEED, Cell
from rematbench.evidence.quantiles import Errors
from rematbench.host.table import grouped
from rematbench.inputs.constants import Calibration, FitRule, is_fit

SHEETS = ("moe.csv", "moe_more.csv")
MOST = 16.0
"""The largest pace that a fit tries; the smallest is 1, the pace of a dense layer."""
CLOSE = 0.01
"""Precision of a fitted pace, in its logarithm."""


def at_pace(calibration: Calibration, pace: float) -> Calibration:
    """The calibration with another pace of experts."""
    return replace(calibration, common=replace(calibration.common, expert_pace=pace))


def predicted(calibration: Calibration, processes: int = 2) -> list[dict[str, Any]]:
    """The rows with experts in 16 bits that have a speed, published and predicted."""
    rows = joined(SHEETS, processes=processes, constants=calibration)
    return [row for row in rows if row["precision"] == "bf16" and log_error(row) is not None]


def mean_error(rows: Iterable[dict[str, Any]], rules: Sequence[FitRule]) -> float:
    """The mean of the absolute log errors of declared rows; each source has weight 1."""
    declared = (row for row in rows if is_fit(row, rules))
    errors: Errors = grouped((row["source"], abs(log_error(row) or 0.0)) for row in declared)
    return fmean(fmean(own) for own in errors.values())


def fitted_pace(calibration: Calibration, rules: Sequence[FitRule], processes: int = 2) -> float:
    """The pace with the smallest mean error of the declared rows, to CLOSE of its logarithm."""
    from scipy.optimize import minimize_scalar  # noqa: PLC0415 (slow, and only fitting needs it)

    def error(log: float) -> float:
        return mean_error(predicted(at_pace(calibration, math.exp(log)), processes), rules)

    found = minimize_scalar(
        error, bounds=(0.0, math.log(MOST)), method="bounded", options={"xatol": CLOSE}
    )
    return math.exp(found.x)


def left_out_experts(calibration: Calibration, processes: int = 2) -> list[Cell]:
    """The lines of config/left_out_experts.csv."""
    shipped = {_place(row): row for row in predicted(calibration, processes)}
    for rule in calibration.fit_experts:
        others = [other for other in calibration.fit_experts if other.source != rule.source]
        pace = fitted_pace(calibration, others, processes)
        own = predicted(at_pace(calibration, pace), processes)
        shipped |= {_place(row): row for row in own if rule.source in row["source"]}
    return [
        {
            **{key: row[key] for key in ("sheet", "row", "source")},
            SPEED: row[SPEED],
            f"pred_{SPEED}": f"{row[f'pred_{SPEED}']:.5g}",
        }
        for row in shipped.values()
    ]


def _place(row: Cell) -> tuple[str, str]:
    return row["sheet"], row["row"]
