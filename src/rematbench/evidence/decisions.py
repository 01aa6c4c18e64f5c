"""Predictions judged as decisions: how much speed the predicted layout loses in each sweep.

A sweep is one job (source, stack, cluster, model, GPUs, length, batch) in four layouts or more. The
simulator's pick is compared with the choice of a person without a simulator. That person assumes
one MFU for all layouts that fit by a published memory formula.
"""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from msgspec import Struct

from rematbench.costs.states import state_bytes
from rematbench.evidence.published.estimators import (
    Recomputation,
    fujii_estimate,
    fujii_refusal,
    korthikanti_activation_bytes,
)
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import (
    LAYOUT,
    SPEED,
    SWEEP,
    Row,
    RowError,
    is_scored,
    number,
)
from rematbench.host.table import grouped
from rematbench.inputs.configfile import ConfigError
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry
from rematbench.problem import rank_parameters

RECOMPUTED: dict[str, Recomputation] = {
    "keep_all": "none",
    "selective_recompute": "selective",
    "full_recompute": "full",
}
"""Methods that Korthikanti's formula covers, and the name of their recomputation in the formula."""


FEWEST_LAYOUTS = 4


def sweeps(rows: Sequence[Row]) -> dict[tuple[str, ...], list[Row]]:
    """Rows that have a speed or are out of memory, grouped by SWEEP, for jobs that a source ran in
    at least FEWEST_LAYOUTS layouts."""
    judged = (r for r in rows if is_scored(r) and (r["status"] == "oom" or number(r, SPEED)))
    jobs = grouped((tuple(str(row.get(key, "")) for key in SWEEP), row) for row in judged)
    return {
        key: cells
        for key, cells in jobs.items()
        if len({tuple(row.get(name) for name in LAYOUT) for row in cells}) >= FEWEST_LAYOUTS
    }


def regret(rows: Sequence[Row]) -> float:
    """Share of the best measured speed that a sweep's pick loses.  The pick is the row with the
    highest predicted speed among the rows predicted to fit.  1 if the pick ran out of memory or no
    row is predicted to fit."""
    fitting = [row for row in rows if row["pred_status"] == "ok"]
    pick = max(fitting, key=lambda row: number(row, f"pred_{SPEED}") or 0.0, default=None)
    return 1.0 if pick is None else lost(pick, rows)


def lost(pick: Row, rows: Sequence[Row]) -> float:
    """Share of the best measured speed that a row loses; 1 if the row ran out of memory."""
    return 1.0 - (number(pick, SPEED) or 0.0) / max(number(row, SPEED) or 0.0 for row in rows)


class Decision(Struct, frozen=True, kw_only=True):
    """The scores of a sweep.  `correlation` is Spearman's, of predicted and measured speeds.
    `regret` is the share of the best measured speed that the pick loses, `left_out` the regret with
    constants fitted without the source, and `floor` the regret of one MFU with a memory formula
    (`constant_mfu_regret`).  None if nothing can be compared."""

    job: dict[str, str]
    rows: int
    correlation: float | None
    regret: float | None
    left_out: float | None
    floor: float | None


def decisions(rows: Sequence[Row], out_of_source: Sequence[Row]) -> list[Decision]:
    """A decision for each sweep of predicted rows, then for each sweep that appears only in
    `out_of_source`, the rows predicted without their source."""
    registry = discover()
    timed = [row for row in out_of_source if number(row, f"pred_{SPEED}")]
    unseen_sweeps = sweeps([{**row, "pred_status": "ok"} for row in timed])
    ours = sweeps(rows)
    found = []
    for key in dict.fromkeys((*ours, *unseen_sweeps)):
        seen, unseen = ours.get(key, []), unseen_sweeps.get(key, [])
        found.append(
            Decision(
                job=dict(zip(SWEEP, key, strict=True)),
                rows=len(seen or unseen),
                correlation=rank_correlation(seen or unseen),
                regret=regret(seen) if seen else None,
                left_out=regret(unseen) if unseen else None,
                floor=constant_mfu_regret(seen or unseen, registry),
            )
        )
    return found


def rank_correlation(rows: Sequence[Row]) -> float | None:
    """Spearman's correlation of predicted and measured speeds; None if fewer than three rows have
    both, or if all predicted or all measured speeds are equal."""
    from scipy.stats import spearmanr  # noqa: PLC0415 (slow, and only validation needs it)

    pairs = [(number(row, SPEED), number(row, f"pred_{SPEED}")) for row in rows]
    known = [(one, other) for one, other in pairs if one and other]
    told, made = [pair[0] for pair in known], [pair[1] for pair in known]
    if len(known) < 3 or min(len(set(told)), len(set(made))) < 2:
        return None
    return float(spearmanr(told, made).statistic)


def constant_mfu_regret(rows: Sequence[Row], registry: Registry) -> float | None:
    """The regret of one MFU for all layouts.  All layouts then have the same predicted speed, so
    the regret is the mean loss over the rows that fit by the memory formula (over all rows if none
    fits).  None if the formula does not cover a row."""
    shares = [formula_share(row, registry) for row in rows]
    if any(share is None for share in shares):
        return None
    fitting = [row for row, share in zip(rows, shares, strict=True) if (share or 0.0) <= 1.0]
    return fmean(lost(row, rows) for row in fitting or rows)


def formula_share(row: Row, registry: Registry) -> float | None:
    """Estimated bytes of the first pipeline rank over usable device bytes; None if no formula
    covers the row.  The bytes are states plus activations.  Activations are by Fujii et al.  if
    `fujii_refusal` is empty and nothing is recomputed, otherwise by Korthikanti et al."""
    try:
        case = read_case(row, registry)
        problem = case.problem()
    except (RowError, ConfigError):
        return None
    kind = RECOMPUTED.get(case.method)
    if kind is None or case.settings or case.offload:
        return None
    lay, work = problem.layout, problem.workload
    if kind == "none" and not fujii_refusal(problem):
        activations = fujii_estimate(work.model, lay, work.seq_len).activation_bytes
    else:
        activations = korthikanti_activation_bytes(work.model, lay, work.seq_len, kind) / lay.cp
    count = rank_parameters(problem, problem.base_plan, 0)
    states = state_bytes(count, lay, problem.system).total
    return (states + activations) / problem.usable_bytes


COMPARED = ("regret", "left_out", "floor")
"""The scores of a decision that are compared, and therefore averaged over the same sweeps."""


def mean_lines(judged: Sequence[Decision]) -> list[tuple[int, Mapping[str, Any]]]:
    """Lines of (number of sweeps, means).  The first line averages sweeps that have every available
    score of COMPARED, so that its means compare the same sweeps.  If this leaves sweeps out, a
    second line averages the common scores of all sweeps."""
    some = [key for key in COMPARED if any(getattr(one, key) is not None for one in judged)]
    same = [one for one in judged if all(getattr(one, key) is not None for key in some)]
    lines = [(len(same), summary(same))] if same else []
    if len(same) < len(judged):
        rare = [key for key in some if any(getattr(one, key) is None for one in judged)]
        lines.append((len(judged), {**summary(judged), **dict.fromkeys(rare)}))
    return lines


def summary(judged: Sequence[Decision]) -> Mapping[str, Any]:
    """The total number of rows, and the mean of each score over the sweeps that have it."""
    names = ("correlation", "regret", "left_out", "floor")
    values = {key: [getattr(one, key) for one in judged] for key in names}
    known = {key: [v for v in some if v is not None] for key, some in values.items()}
    means = {key: fmean(some) if some else None for key, some in known.items()}
    return {"rows": sum(one.rows for one in judged), **means}
