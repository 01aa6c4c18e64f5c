"""Fujii's 80 % rule scored on published cells: is an estimate below 80 % of the device safe?

The claim is one-sided (arXiv 2411.06465: runs below 80 % never met an out-of-memory error), so only
a cell called safe that ran out of memory refutes the rule.  A cell that ran although the rule does
not call it safe (a false alarm) costs only a layout that a person would not try.  Dashes in Fujii's
tables have no published cause and are counted separately.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rematbench.evidence.published.estimators import SAFE_SHARE, fujii_estimate, fujii_refusal
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.sheets import RowError
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.layout import LayoutError
from rematbench.plugins.registry import Registry

Row = Mapping[str, Any]


def scored_cells(rows: Sequence[Row], registry: Registry) -> list[dict[str, Any]]:
    """The cells that Fujii's formula covers (nothing recomputed or offloaded, and no refusal), each
    with its share of device memory and the rule's verdict."""
    found = []
    for row in rows:
        share = _share(row, registry)
        if share is not None:
            found.append({**row, "share": share, "safe": share < SAFE_SHARE})
    return found


def _share(row: Row, registry: Registry) -> float | None:
    """Estimated bytes over the device's bytes; None where the formula does not cover the cell."""
    if row["status"] not in ("ok", "oom", "dash"):
        return None
    try:
        case = read_case(row, registry)
        if case.method != "keep_all" or case.offload != 0.0:
            return None
        problem = case.problem()
    except (RowError, LayoutError, ConfigError):
        return None
    if fujii_refusal(problem):
        return None
    estimate = fujii_estimate(problem.workload.model, problem.layout, problem.workload.seq_len)
    return estimate.total_bytes / problem.cluster.hbm_bytes
