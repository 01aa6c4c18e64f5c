"""Fit the `fitted` constants of config/calibration.yaml to the declared FIT rows, and to no others.

The step model is a callable, so that this file knows constants and rows but no engine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from scipy.optimize import least_squares

from rematbench.cost.constants import Calibration, FitRule

Row: TypeAlias = Mapping[str, Any]
Predict: TypeAlias = Callable[[Row, Calibration], float]


class Prior(Struct, frozen=True):
    """What is believed of a constant before any row is read: its bounds and its centre.

    `spread` is the standard deviation of the logarithm; one row's spread is ROW_SPREAD.
    """

    low: float
    centre: float
    high: float
    spread: float = 0.5


ROW_SPREAD = 0.03
"""Logarithmic spread of a published speed around a perfect model: run-to-run noise and rounding;
also where the loss turns from square to linear."""

PRIORS: dict[str, Prior] = {
    "gemm_efficiency": Prior(0.3, 0.7, 0.95),
    "gemm_tail_waves": Prior(0.05, 0.5, 2.0),
    "gemm_half_k": Prior(10.0, 150.0, 1500.0, 1.0),
    "flash_forward_efficiency": Prior(0.2, 0.5, 0.85),
    "flash_backward_efficiency": Prior(0.15, 0.4, 0.85),
    "flash_half_rows": Prior(20.0, 500.0, 5000.0, 1.0),
    "hbm_efficiency": Prior(0.4, 0.8, 0.95, 0.15),
    "launch_s": Prior(1e-6, 5e-6, 3e-5),
    "overlap_slowdown": Prior(1.0, 1.1, 1.6, 0.1),
    "nvlink_efficiency": Prior(0.2, 0.75, 1.0, 0.2),
    "nic_efficiency": Prior(0.1, 0.75, 1.0, 0.3),
    "kernel_scale": Prior(0.7, 1.0, 1.8, 0.1),
    "attention_scale": Prior(0.5, 1.0, 2.5, 0.2),
}


class FitReport(Struct, frozen=True, kw_only=True):
    """The fitted calibration and how it does on the rows it was fitted to (log errors by source)."""

    calibration: Calibration
    rows: int
    constants: int
    errors: dict[str, list[float]]


def matches(rule: FitRule, row: Row) -> bool:
    """Whether a row belongs to a rule's sweep, judged by what was run and never by a result."""
    lists = {
        "system": rule.system,
        "cluster": rule.cluster,
        "model": rule.model,
        "gpus": rule.gpus,
        "tp": rule.tp,
        "cp": rule.cp,
        "pp": rule.pp,
    }
    return (
        rule.source in row["source"]
        and rule.table in row["table"]
        and all(not allowed or _typed(row[key], allowed) for key, allowed in lists.items())
    )


def _typed(value: Any, allowed: tuple[Any, ...]) -> bool:
    if isinstance(allowed[0], int):
        return value not in ("", None) and int(float(value)) in allowed
    return value in allowed


def is_fit(row: Row, rules: Iterable[FitRule]) -> bool:
    """Whether any rule claims the row."""
    return any(matches(rule, row) for rule in rules)


def fit_rows(rows: Iterable[Row], rules: Sequence[FitRule]) -> list[Row]:
    """The FIT rows with a published speed; results of other rows are not even read."""
    chosen = [row for row in rows if is_fit(row, rules)]
    return [row for row in chosen if row["status"] == "ok" and _speed(row) > 0]


def _speed(row: Row) -> float:
    value = row["tokens_per_s_per_gpu"]
    return float(value) if value not in ("", None) else 0.0


def published_step_s(row: Row) -> float:
    """Seconds of a step from the published tokens/s per GPU: batch x sequence / (GPUs x rate)."""
    return float(row["global_batch"]) * float(row["seq_len"]) / (float(row["gpus"]) * _speed(row))


def with_values(calibration: Calibration, names: Sequence[str], values: Any) -> Calibration:
    """The calibration with `section.entry.field` constants replaced."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in zip(names, values, strict=True):
        section, entry, key = name.split(".")
        table = sections.setdefault(section, dict(getattr(calibration, section)))
        table[entry] = msgspec.structs.replace(table[entry], **{key: float(value)})
    return msgspec.structs.replace(calibration, **sections)


def row_weights(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Square-root weights: a source (on one cluster) counts as the root of its number of rows, so
    that a long sweep speaks louder than a short one without drowning it."""
    keys = [(row["source"], row["cluster"]) for row in rows]
    counts = Counter(keys)
    return np.array([counts[key] ** -0.25 for key in keys])


def fit(rows: Iterable[Row], calibration: Calibration, predict: Predict) -> FitReport:
    """Least squares on log step seconds over the FIT rows, robust, with log-normal priors."""
    chosen = fit_rows(rows, calibration.fit)
    names = used_names(chosen, calibration, predict)
    priors = [PRIORS[name.rsplit(".", 1)[1]] for name in names]
    target = np.log([published_step_s(row) for row in chosen])
    weights = row_weights(chosen)

    def residuals(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        trial = with_values(calibration, names, np.exp(logs))
        predicted = np.log([predict(row, trial) for row in chosen])
        return (predicted - target) * weights / ROW_SPREAD

    def penalised(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        robust = _soft(residuals(logs))
        pull = [(x - np.log(p.centre)) / p.spread for x, p in zip(logs, priors, strict=True)]
        return np.concatenate([robust, np.array(pull)])

    start = np.log([p.centre for p in priors])
    bounds = (np.log([p.low for p in priors]) - 1e-9, np.log([p.high for p in priors]) + 1e-9)
    found = least_squares(penalised, start, bounds=bounds, x_scale=0.1, ftol=1e-6, xtol=1e-6)
    fitted = with_values(calibration, names, np.exp(found.x))
    errors: dict[str, list[float]] = {}
    for row in chosen:
        error = float(np.log(predict(row, fitted) / published_step_s(row)))
        errors.setdefault(row["source"], []).append(error)
    return FitReport(calibration=fitted, rows=len(chosen), constants=len(names), errors=errors)


def _soft(residual: NDArray[np.float64]) -> NDArray[np.float64]:
    """Residuals whose squares are the soft-L1 loss 2 (sqrt(1 + r^2) - 1): outliers count linearly."""
    loss = 2.0 * (np.sqrt(1.0 + residual**2) - 1.0)
    return np.sign(residual) * np.sqrt(loss)


def used_names(rows: Sequence[Row], calibration: Calibration, predict: Predict) -> list[str]:
    """The fitted constants that some FIT row depends on (others keep their value)."""
    base = [predict(row, calibration) for row in rows]
    used = []
    for name in calibration.fitted:
        section, entry, key = name.split(".")
        value = getattr(getattr(calibration, section)[entry], key)
        trial = with_values(calibration, [name], [value * 1.05])
        if any(predict(row, trial) != before for row, before in zip(rows, base, strict=True)):
            used.append(name)
    return used
