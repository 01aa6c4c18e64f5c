"""Validation as tables: accuracy by source, promises, out-of-memory verdicts, bands, evidence,
decisions, calibration and cells."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, get_args

from msgspec.structs import asdict, replace

from rematbench.evidence.accuracy import (
    FEWEST_OOMS,
    MORE,
    RUNS,
    Accuracy,
    Report,
    Verdicts,
    left_out_errors,
    load_accuracy,
    members,
    of_sheet,
    ratio_error,
    split_of,
    validate,
)
from rematbench.evidence.bands import (
    bands_of,
    by_source,
    coverage,
    kind_coverage,
    pooled,
    ratio_band,
    ratio_errors,
    shipped_coverage,
    speed_errors,
    with_outside,
)
from rematbench.evidence.decisions import Decision, decisions, mean_lines, summary
from rematbench.evidence.job_evidence import (
    LeftOutCell,
    expert_errors,
    left_out_by_source,
    left_out_cells,
    out_of_source,
)
from rematbench.evidence.peaks import in_words, left_free
from rematbench.evidence.published.derived import BESIDE, PUBLISHED
from rematbench.evidence.published.sheets import Quantity, Row, number, read_predicted
from rematbench.evidence.quantiles import LEVEL, Errors, quantile
from rematbench.evidence.user_fit import DRAWS, calibrated
from rematbench.host.table import grouped
from rematbench.inputs.constants import Calibration
from rematbench.inputs.kernel_rates import fitted_parameters
from rematbench.inputs.load import calibration as shipped_calibration
from rematbench.paper.sheet.table import Table, declared, percent, table_of, whole

INPUTS = {"predictions": "results/paper/tables/predictions.csv"}
READS = (
    "config/accuracy.yaml",
    "config/left_out.csv",
    "config/left_out_experts.csv",
    "config/left_out_bytes.csv",
    "results/published/offloaded_states.csv",
)
TABLES = (
    "accuracy_by_source",
    "bands",
    "calibrated",
    "cells",
    "decisions",
    "evidence",
    "oom_verdicts",
    "promises",
    "regret",
)
NOTHING, ALL = "nothing", "all rows"
KINDS = (NOTHING, "stack", "generation", "scale", "context", "mechanism", ALL)


def build(predictions: Path) -> list[Table]:
    """The tables of the published cells of all sheets."""
    cells = [cell for cell in read_predicted(predictions) if cell["cell"] in (PUBLISHED, BESIDE)]
    accuracy, constants, unseen = load_accuracy(), shipped_calibration(), out_of_source()
    left_out = left_out_errors(unseen, accuracy, constants)
    report = validate(cells, constants, accuracy, left_out)
    return score_tables(report, cells, constants, accuracy, unseen)


def how_to_read(calibration: Calibration) -> str:
    """The note of the accuracy table: the meaning of its columns, and the numbers of constants and
    kernel parameters that are fitted."""
    note = declared().tables["accuracy_by_source"].note
    return note.format(**_fitted(calibration), means="").strip()


def _fitted(calibration: Calibration) -> dict[str, Any]:
    kernels = sum(fitted_parameters(calibration.kernels).values())
    return {"fitted": len(calibration.fitted), "kernels": kernels}


def score_tables(
    report: Report,
    rows: Sequence[Row],
    calibration: Calibration,
    accuracy: Accuracy,
    unseen: Sequence[Row] = (),
) -> list[Table]:
    """The tables of `rematbench validate`.  `unseen`: rows predicted without their source.  Without
    them, the coverage of bands uses `pred_low` and `pred_high` of `rows`, and the tables of
    evidence, regret and calibration are left out."""
    runs = of_sheet(rows, RUNS)
    cells = left_out_cells() if unseen else ()
    judged = decisions([*runs, *of_sheet(rows, MORE)], unseen)
    return [
        accuracy_table(report, calibration, unseen),
        promise_table(report),
        verdict_table(report.verdicts),
        band_table(cells, runs),
        decision_table(judged),
        *([evidence_table(cells), regret_table(judged), calibrated_table()] if unseen else []),
        cell_table(rows, calibration, accuracy),
    ]


def out_of_source_means(left_out: Mapping[str, float], unseen: Sequence[Row]) -> str:
    """A sentence with two mean errors of predictions fitted without the row's source: over the
    groups of the accuracy table, and over config/left_out.csv, which also has other rows."""
    sources = left_out_by_source(unseen)
    return (
        f"Left out: {percent(fmean(left_out.values()))} % on average over {len(left_out)} groups, "
        f"{percent(fmean(sources.values()))} % over {len(sources)} sources, each of weight 1."
    )


def accuracy_table(report: Report, calibration: Calibration, unseen: Sequence[Row] = ()) -> Table:
    """One line per group of cells whose metric has errors (not verdicts or regrets)."""
    left_out = {one.name: one.left_out for one in report.groups if one.left_out is not None}
    means = out_of_source_means(left_out, unseen) if left_out and unseen else ""
    rows = [
        {**asdict(group), **group.splits, "n": group.cells, "status": group.status}
        for group in report.groups
        if group.metric not in ("verdict", "regret")
    ]
    return table_of("accuracy_by_source", rows, **_fitted(calibration), means=means)


def promise_table(report: Report) -> Table:
    """One line per promised or reported statistic: reached, target, accepted, and the reason for a
    miss."""
    rows: list[Mapping[str, Any]] = []
    for group in report.groups:
        for check in group.checks:
            row = {key: getattr(check, key) for key in check.__struct_fields__}
            rows.append({**row, "status": check.status})
    return table_of(
        "promises", rows, dict.fromkeys(("value", "target", "accepted"), amount), fewest=FEWEST_OOMS
    )


def amount(value: float) -> str:
    """A count as a whole number, or a fraction in percent."""
    return whole(value) if float(value).is_integer() else f"{100 * value:.2f} %"


def verdict_table(verdicts: Verdicts) -> Table:
    """The confusion matrix of published and predicted verdicts, with signed headroom."""
    rows = []
    for (told, said), count in sorted(verdicts.counts.items()):
        left = sorted(verdicts.headroom_bytes.get((told, said), ()))
        row: dict[str, Any] = {"published": told, "predicted": said, "cells": count}
        if left:
            row |= {"least": left[0], "median": left[len(left) // 2], "most": left[-1]}
        rows.append(row)
    return table_of(
        "oom_verdicts",
        rows,
        right=percent(verdicts.right),
        cells=verdicts.cells,
        always_fits=percent(verdicts.always_fits),
        tight=verdicts.tight,
        free=left_free(),
        of_oom=_of_oom(verdicts),
    )


def _of_oom(verdicts: Verdicts) -> str:
    missed = verdicts.counts.get(("oom", "ok"), 0)
    said = f"{missed} of {verdicts.ooms} cells out of memory are predicted to fit"
    few = verdicts.ooms < FEWEST_OOMS
    return f"{said}: {f'fewer than {FEWEST_OOMS}, so ' if few else ''}reported, not promised."


def band_table(cells: Sequence[LeftOutCell], rows: Sequence[Row]) -> Table:
    """Coverage of bands by source: for `cells`, bands learnt from the other sources; without cells,
    the predicted bands of `rows`."""
    found = coverage(cells) if cells else shipped_coverage(rows)
    margins = "; ".join(f"{kind} {in_words(kind)}" for kind in get_args(Quantity))
    if cells:
        errors = speed_errors(cells)
        found += [pooled(found, errors), pooled(found, errors, by_row=True)]
        own = kind_coverage(expert_errors())
        whole = replace(pooled(own, expert_errors()), source="experts: all, each source weighs 1")
        found += [*(replace(one, source=f"experts: {one.source}") for one in own), whole]
    return table_of(
        "bands",
        (asdict(one) for one in found),
        level=100 * LEVEL,
        one_layout=_ratios(one_layout=True),
        layouts=_ratios(one_layout=False),
        margins=margins,
    )


def _ratios(*, one_layout: bool) -> str:
    """The half-width of the band of speed ratios, and the share of ratios inside it when it is
    learnt from the other sources."""
    cells = left_out_cells()
    errors = ratio_errors(cells, one_layout=one_layout)
    found = kind_coverage(errors)
    every = pooled(found, errors)
    return (
        f"{percent(ratio_band(one_layout=one_layout))} % ({len(found)} sources; left out in turn, "
        f"{percent(every.inside)} % lie inside)"
    )


def decision_table(judged: Sequence[Decision]) -> Table:
    """One line per sweep: the rank correlation of speeds, and the regrets of the picks."""
    lines: list[Mapping[str, Any]] = [{**one.job, **asdict(one)} for one in judged]
    lines += [
        {"source": f"mean over {count} sweeps", **means} for count, means in mean_lines(judged)
    ]
    return table_of("decisions", lines)


def evidence_table(cells: Sequence[LeftOutCell]) -> Table:
    """Errors by the job property that no other source published. A row counts in the line ALL and
    in the line of each such property; without any, it counts in NOTHING."""
    errors: dict[str, Errors] = {kind: defaultdict(list) for kind in KINDS}
    widths: dict[str, list[float]] = defaultdict(list)
    bands = {
        source: bands_of([cell for cell in cells if cell.source != source])
        for source in by_source(cells)
    }
    for cell, outside in with_outside(cells):
        width = bands[cell.source].band(cell.job).half_width
        for kind in (*(outside or (NOTHING,)), ALL):
            errors[kind][cell.source].append(abs(cell.log_error))
            widths[kind].append(width)
    rows = [
        {
            "outside": kind,
            "sources": len(some),
            "rows": len(widths[kind]),
            "mean": fmean(fmean(own) for own in some.values()) if some else None,
            "error": quantile(some) if some else None,
            "half_width": median(widths[kind]) if some else None,
        }
        for kind, some in errors.items()
    ]
    return table_of("evidence", rows, level=100 * LEVEL)


def regret_table(judged: Sequence[Decision]) -> Table:
    """The mean regrets of every source over its sweeps, and over all sweeps."""
    groups = grouped((one.job["source"], one) for one in judged)
    lines: list[Mapping[str, Any]] = [
        {"source": source.partition(",")[0], "sweeps": len(some), **summary(some)}
        for source, some in groups.items()
    ]
    lines += [
        {"source": "mean over sweeps", "sweeps": count, **means}
        for count, means in mean_lines(judged)
    ]
    return table_of("regret", lines)


def calibrated_table() -> Table:
    """One line per published stack: mean errors by the number of calibrating rows."""
    rows = [
        {
            **{key: getattr(one, key) for key in ("source", "system", "cluster", "rows")},
            "after_0": one.uncalibrated,
            **{f"after_{k}": value for k, value in one.after.items()},
            "fitted": one.fitted,
            **{f"mfu_{k}": value for k, value in one.mfu.items()},
        }
        for one in calibrated()
    ]
    return table_of("calibrated", rows, draws=DRAWS)


def cell_table(rows: Sequence[Row], calibration: Calibration, accuracy: Accuracy) -> Table:
    """One line per group and scored cell of its sheet: the data of the accuracy figure."""
    lines = []
    for group in accuracy.groups:
        if group.metric not in ("tokens_per_s_per_gpu", "peak_device_bytes"):
            continue
        for row in members(group, rows):
            published = number(row, group.metric)
            predicted = number(row, f"pred_{group.metric}")
            lines.append(
                {
                    **row,
                    "source_name": group.name.partition(",")[0],
                    "metric": group.metric,
                    "published": published,
                    "predicted": predicted,
                    "error": ratio_error(row, group.metric),
                    "split": split_of(row, group, calibration),
                }
            )
    return table_of("cells", lines)
