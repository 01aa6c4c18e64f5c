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

from rematbench.cost.constants import Calibration, FitRule

Row: TypeAlias = Mapping[str, Any]
Predict: TypeAlias = Callable[[Row, Calibration], float]
PredictAll: TypeAlias = Callable[[Sequence[tuple[Row, Calibration]]], Sequence[float]]


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

DIFFERENCE = 0.01
"""Logarithmic step of the Jacobian."""

PRIORS: dict[str, Prior] = {
    "gemm_efficiency": Prior(0.3, 0.7, 0.95),
    "gemm_tail_waves": Prior(0.05, 0.5, 2.0),
    "gemm_half_k": Prior(10.0, 150.0, 1500.0, 0.3),
    "hbm_efficiency": Prior(0.4, 0.8, 0.95, 0.15),
    "launch_s": Prior(1e-6, 5e-6, 4e-5),
    "nvlink_efficiency": Prior(0.2, 0.75, 1.0, 0.2),
    "nic_efficiency": Prior(0.1, 0.75, 1.0, 0.3),
    "kernel_scale": Prior(0.7, 1.0, 1.8, 0.1),
    "tp_stall": Prior(0.01, 0.25, 3.0, 0.7),
    "dp_stall": Prior(0.01, 0.25, 3.0, 0.7),
    "ring_nics": Prior(1.0, 1.6, 8.0, 1.0),
}


class FitReport(Struct, frozen=True, kw_only=True):
    """The fitted calibration and its log errors by source on the rows it was fitted to."""

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
        and rule.table in row.get("table", "")
        and all(not allowed or _typed(row.get(key, ""), allowed) for key, allowed in lists.items())
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


def fit(rows: Iterable[Row], calibration: Calibration, predict_all: PredictAll) -> FitReport:
    """Least squares on log step seconds over the FIT rows, robust, with log-normal priors, from
    the calibration's present values."""
    from scipy.optimize import least_squares  # noqa: PLC0415 (slow, and only fitting needs it)

    problem = _Problem(fit_rows(rows, calibration.fit), calibration, predict_all)
    low, high = problem.bounds()
    found = least_squares(
        problem.residuals,
        problem.start(),
        jac=problem.jacobian,
        bounds=(low, high),
        x_scale=0.1,
        ftol=1e-4,
        xtol=1e-4,
        max_nfev=30,
    )
    fitted = with_values(calibration, problem.names, np.exp(found.x))
    errors: dict[str, list[float]] = {}
    for row, error in zip(problem.rows, problem.log_errors(found.x), strict=True):
        errors.setdefault(row["source"], []).append(float(error))
    return FitReport(
        calibration=fitted, rows=len(problem.rows), constants=len(problem.names), errors=errors
    )


class _Problem:
    """Residuals over the FIT rows and their Jacobian, which is sparse: a constant of one cluster,
    stack or generation moves only the rows that ran there."""

    def __init__(self, rows: list[Row], calibration: Calibration, predict_all: PredictAll) -> None:
        self.rows, self.calibration, self.predict_all = rows, calibration, predict_all
        self.target = np.log([published_step_s(row) for row in rows])
        self.scale = row_weights(rows) / ROW_SPREAD
        base = predict_all([(row, calibration) for row in rows])
        self.names: list[str] = []
        self.moves: list[list[int]] = []
        for name in calibration.fitted:
            moved = self._moved(name, base)
            if moved:
                self.names.append(name)
                self.moves.append(moved)
        self.priors = [PRIORS[name.rsplit(".", 1)[1]] for name in self.names]

    def _moved(self, name: str, base: Sequence[float]) -> list[int]:
        """Rows that a constant moves."""
        section, entry, key = name.split(".")
        value = getattr(getattr(self.calibration, section)[entry], key)
        trial = with_values(self.calibration, [name], [value * 1.2 if value < 1 else value / 1.2])
        after = self.predict_all([(row, trial) for row in self.rows])
        return [i for i, (a, b) in enumerate(zip(after, base, strict=True)) if a != b]

    def start(self) -> NDArray[np.float64]:
        """Logarithms of the calibration's present values, inside the priors' limits."""
        low, high = self.bounds()
        values = []
        for name in self.names:
            section, entry, key = name.split(".")
            values.append(getattr(getattr(self.calibration, section)[entry], key))
        return np.clip(np.log(values), low + 1e-6, high - 1e-6)

    def bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Logarithms of the priors' limits."""
        low = np.log([prior.low for prior in self.priors]) - 1e-9
        return low, np.log([prior.high for prior in self.priors]) + 1e-9

    def log_errors(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """log(predicted / published seconds) of every FIT row."""
        trial = with_values(self.calibration, self.names, np.exp(logs))
        seconds = self.predict_all([(row, trial) for row in self.rows])
        errors: NDArray[np.float64] = np.log(np.asarray(seconds)) - self.target
        return errors

    def residuals(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Robust weighted errors, then the pull of the priors."""
        pull = [(x - np.log(p.centre)) / p.spread for x, p in zip(logs, self.priors, strict=True)]
        return np.concatenate([_soft(self.log_errors(logs) * self.scale), np.array(pull)])

    def jacobian(self, logs: NDArray[np.float64]) -> NDArray[np.float64]:
        """Forward differences of 1 % (the step model has corners), one batch for all of them."""
        base = self.log_errors(logs)
        _, high = self.bounds()
        steps = np.where(logs + DIFFERENCE > high, -DIFFERENCE, DIFFERENCE)
        jobs: list[tuple[Row, Calibration]] = []
        for j, moved in enumerate(self.moves):
            shifted = logs.copy()
            shifted[j] += steps[j]
            trial = with_values(self.calibration, self.names, np.exp(shifted))
            jobs += [(self.rows[i], trial) for i in moved]
        seconds = iter(self.predict_all(jobs))
        matrix = np.zeros((len(self.rows) + len(self.names), len(self.names)))
        for j, moved in enumerate(self.moves):
            for i in moved:
                error = np.log(next(seconds)) - self.target[i]
                after, before = _soft(error * self.scale[i]), _soft(base[i] * self.scale[i])
                matrix[i, j] = (after - before) / steps[j]
            matrix[len(self.rows) + j, j] = 1.0 / self.priors[j].spread
        return matrix


def one_by_one(predict: Predict) -> PredictAll:
    """The batch form of a single-row predictor."""
    return lambda jobs: [predict(row, calibration) for row, calibration in jobs]


def _soft(residual: Any) -> Any:
    """Residuals whose squares are the soft-L1 loss 2 (sqrt(1 + r^2) - 1): outliers are linear."""
    loss = 2.0 * (np.sqrt(1.0 + residual**2) - 1.0)
    return np.sign(residual) * np.sqrt(loss)
