"""Fit the `fitted` constants of config/calibration.yaml to the declared FIT rows only.

The step model is a callable argument, so that this file depends on no engine.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.evidence.published.sheets import Row
from rematbench.host.table import grouped
from rematbench.inputs.constants import Calibration, FitRule, is_fit

Concerns: TypeAlias = Callable[[str, Row], bool]
"""Whether a constant (`section.entry.field`) may change a row's predicted step."""
PredictAll: TypeAlias = Callable[[Sequence[tuple[Row, Calibration]]], Sequence[float]]
Logs: TypeAlias = NDArray[np.float64]


class Prior(Struct, frozen=True):
    """The prior belief about a constant before any row is read: its bounds and its centre.

    `spread` is the standard deviation of the logarithm; one row's spread is ROW_SPREAD.
    """

    low: float
    centre: float
    high: float
    spread: float = 0.5


ROW_SPREAD = 0.03
"""Logarithmic spread of a published speed around a perfect model, from run-to-run noise and
rounding; also the error at which the loss turns from square to linear."""

DIFFERENCE = 0.01
"""Step of the Jacobian's differences, in the logarithm of a constant."""

PRIORS: dict[str, Prior] = {
    "gemm_efficiency": Prior(0.3, 0.7, 0.95),
    "gemm_tail_waves": Prior(0.05, 0.5, 2.0),
    "gemm_half_k": Prior(10.0, 150.0, 1500.0, 0.3),
    "hbm_efficiency": Prior(0.4, 0.8, 0.95, 0.15),
    "gap_s": Prior(1e-6, 5e-6, 4e-5),
    "host_launch_s": Prior(5e-6, 3e-5, 2e-4),
    "nvlink_efficiency": Prior(0.2, 0.75, 1.0, 0.2),
    "nic_efficiency": Prior(0.1, 0.75, 1.0, 0.3),
    "kernel_scale": Prior(0.7, 1.0, 1.8, 0.1),
    "tp_stall": Prior(0.01, 0.25, 3.0, 0.7),
    "dp_stall": Prior(0.01, 0.25, 3.0, 0.7),
    "ring_nics": Prior(1.0, 1.6, 8.0, 1.0),
    "host_ranks": Prior(1.0, 8.0, 16.0),
}


class FitReport(Struct, frozen=True, kw_only=True):
    """The fitted calibration and its log errors by source on the rows it was fitted to."""

    calibration: Calibration
    rows: int
    constants: int
    errors: dict[str, list[float]]


# Why: docs/decisions/evidence.md, How are constants fitted?
def fit_rows(rows: Iterable[Row], rules: Sequence[FitRule]) -> list[Row]:
    """The FIT rows with a published speed; the results of other rows are never read."""
    chosen = [row for row in rows if is_fit(row, rules)]
    return [row for row in chosen if row["status"] == "ok" and _speed(row) > 0]


def _speed(row: Row) -> float:
    value = row["tokens_per_s_per_gpu"]
    return float(value) if value not in ("", None) else 0.0


def published_step_s(row: Row) -> float:
    """Seconds of a step from the published tokens/s per GPU: batch x sequence / (GPUs x rate)."""
    return float(row["global_batch"]) * float(row["seq_len"]) / (float(row["gpus"]) * _speed(row))


def with_values(calibration: Calibration, names: Sequence[str], values: Any) -> Calibration:
    """The calibration with the constants `names` (`section.entry.field`) replaced by `values`."""
    sections: dict[str, dict[str, Any]] = {}
    for name, value in zip(names, values, strict=True):
        section, entry, key = name.split(".")
        table = sections.setdefault(section, dict(getattr(calibration, section)))
        table[entry] = msgspec.structs.replace(table[entry], **{key: float(value)})
    return msgspec.structs.replace(calibration, **sections)


def value_of(calibration: Calibration, name: str) -> float:
    """The constant `section.entry.field`."""
    section, entry, key = name.split(".")
    return float(getattr(getattr(calibration, section)[entry], key))


def row_weights(rows: Sequence[Row]) -> Logs:
    """Square roots of row weights. The total weight of a source on one cluster is the square root
    of its number of rows: a long sweep weighs more than a short sweep without dominating it."""
    keys = [(row["source"], row["cluster"]) for row in rows]
    counts = Counter(keys)
    return np.array([counts[key] ** -0.25 for key in keys])


def fit(
    rows: Iterable[Row],
    calibration: Calibration,
    predict_all: PredictAll,
    concerns: Concerns,
) -> FitReport:
    """Fit by robust least squares on log step seconds over the FIT rows, with log-normal priors,
    from the calibration's present values."""
    step_fit = StepFit(fit_rows(rows, calibration.fit), calibration, predict_all, concerns)
    every = range(len(step_fit.rows))
    fitted = step_fit.solved(calibration, every)
    logs = zip(step_fit.rows, step_fit.log_errors(fitted, every), strict=True)
    errors: dict[str, list[float]] = grouped((row["source"], float(log)) for row, log in logs)
    return FitReport(
        calibration=fitted, rows=len(every), constants=len(step_fit.names), errors=errors
    )


class StepFit:
    """The FIT rows, the fitted constants that affect them, and fits to any subset of the rows.

    The Jacobian is sparse: a constant of one cluster, stack or generation moves only the rows that
    ran there.
    """

    def __init__(
        self,
        rows: list[Row],
        calibration: Calibration,
        predict_all: PredictAll,
        concerns: Concerns,
    ) -> None:
        self.rows, self.calibration, self.predict_all = rows, calibration, predict_all
        self.target = np.log([published_step_s(row) for row in rows])
        self.scale = row_weights(rows) / ROW_SPREAD
        base = predict_all([(row, calibration) for row in rows])
        self.names: list[str] = []
        self.moves: list[list[int]] = []
        for name in calibration.fitted:
            near = [i for i, row in enumerate(rows) if concerns(name, row)]
            if moved := self._moved(name, near, base):
                self.names.append(name)
                self.moves.append(moved)

    def _moved(self, name: str, near: list[int], base: Sequence[float]) -> list[int]:
        """The rows of `near` whose predicted seconds change with the constant `name`."""
        value = value_of(self.calibration, name)
        trial = with_values(self.calibration, [name], [value * 1.2 if value < 1 else value / 1.2])
        after = self.predict_all([(self.rows[i], trial) for i in near])
        return [i for i, seconds in zip(near, after, strict=True) if seconds != base[i]]

    def log_errors(self, trial: Calibration, chosen: Sequence[int]) -> Logs:
        """log(predicted / published seconds) of the chosen rows."""
        seconds = self.predict_all([(self.rows[i], trial) for i in chosen])
        errors: Logs = np.log(np.asarray(seconds)) - self.target[list(chosen)]
        return errors

    def slopes(self, at: Calibration) -> Logs:
        """d log(seconds) / d log(constant), [rows, names], by differences of 1 % (the step model
        has corners), predicted in one batch."""
        base = self.log_errors(at, range(len(self.rows)))
        steps, jobs = [], []
        for name, moved in zip(self.names, self.moves, strict=True):
            value, prior = value_of(at, name), PRIORS[name.rsplit(".", 1)[1]]
            steps.append(-DIFFERENCE if np.log(value / prior.high) > -DIFFERENCE else DIFFERENCE)
            trial = with_values(at, [name], [value * np.exp(steps[-1])])
            jobs += [(self.rows[i], trial) for i in moved]
        seconds = iter(self.predict_all(jobs))
        found = np.zeros((len(self.rows), len(self.names)))
        for j, moved in enumerate(self.moves):
            for i in moved:
                found[i, j] = (np.log(next(seconds)) - self.target[i] - base[i]) / steps[j]
        return found

    def solved(
        self, start: Calibration, chosen: Sequence[int], slopes: Logs | None = None
    ) -> Calibration:
        """The constants fitted to the chosen rows, starting from `start`.  A constant that affects
        none of the rows keeps its value.  `slopes`: slopes to use at every trial."""
        from scipy.optimize import least_squares  # noqa: PLC0415 (slow, and only fitting needs it)

        own = set(chosen)
        columns = [j for j, moved in enumerate(self.moves) if own.intersection(moved)]
        names = [self.names[j] for j in columns]
        priors = [PRIORS[name.rsplit(".", 1)[1]] for name in names]
        low = np.log([prior.low for prior in priors]) - 1e-9
        high = np.log([prior.high for prior in priors]) + 1e-9
        scale, picked = self.scale[list(chosen)], np.ix_(list(chosen), columns)

        def trial(logs: Logs) -> Calibration:
            return with_values(start, names, np.exp(logs))

        def residuals(logs: Logs) -> Logs:
            """Robust weighted errors, then the residuals of the priors."""
            pull = [(x - np.log(p.centre)) / p.spread for x, p in zip(logs, priors, strict=True)]
            return np.concatenate([_soft(self.log_errors(trial(logs), chosen) * scale), pull])

        def jacobian(logs: Logs) -> Logs:
            at = trial(logs)
            found = self.slopes(at) if slopes is None else slopes
            bend = _soft_slope(self.log_errors(at, chosen) * scale) * scale
            return np.vstack(
                [bend[:, None] * found[picked], np.diag([1.0 / prior.spread for prior in priors])]
            )

        first = np.clip(np.log([value_of(start, n) for n in names]), low + 1e-6, high - 1e-6)
        found = least_squares(
            residuals,
            first,
            jac=jacobian,
            bounds=(low, high),
            x_scale=0.1,
            ftol=1e-4,
            xtol=1e-4,
            max_nfev=30,
        )
        return trial(found.x)


def _soft(residual: Any) -> Any:
    """Residuals whose squares are the soft-L1 loss 2 (sqrt(1 + r^2) - 1): outliers are linear."""
    loss = 2.0 * (np.sqrt(1.0 + residual**2) - 1.0)
    return np.sign(residual) * np.sqrt(loss)


def _soft_slope(residual: Any) -> Any:
    """d _soft(r) / dr, which is 1 at r = 0."""
    root = np.sqrt(1.0 + residual**2)
    return np.sqrt((root + 1.0) / 2.0) / root
