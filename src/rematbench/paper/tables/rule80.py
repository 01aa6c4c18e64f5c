"""Fujii's 80 % rule scored on published cells: is an estimate below 80 % of the device safe?

The claim is one-sided (arXiv 2411.06465: runs below 80 % never met an out-of-memory error), so only
a cell called safe that ran out of memory refutes the rule.  A cell that ran although the
rule does not call it safe (a false alarm) costs only a layout that a person would not try.  Fujii's
dashes have no published cause and are counted apart.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rematbench.costs.estimators import SAFE_SHARE, fujii_estimate
from rematbench.evidence.published.closed_forms import fujii_refusal
from rematbench.evidence.published.sheets import RowError, read_case
from rematbench.host.table import Column, Table, percent, whole
from rematbench.plugins.discover import discover
from rematbench.plugins.registry import Registry
from rematbench.spec.configfile import ConfigError
from rematbench.spec.layout import LayoutError

Row = Mapping[str, Any]
CALLED = {True: "safe", False: "not safe"}
MEANING = {
    ("ok", True): "true negative",
    ("ok", False): "false alarm",
    ("oom", True): "missed OOM",
    ("oom", False): "true positive",
}
"""The meaning of (published status, called safe).  A positive is a cell that the rule does not call
safe; a dash has no meaning."""


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


def rule_table(rows: Sequence[Row]) -> Table:
    """The table of cells by source, cluster, published status and the rule's verdict."""
    cells = scored_cells(rows, discover())
    lines = []
    for key in sorted({(c["source"].partition(",")[0], c["cluster"], c["status"]) for c in cells}):
        for safe in (True, False):
            chosen = [
                cell
                for cell in cells
                if (cell["source"].partition(",")[0], cell["cluster"], cell["status"]) == key
                and cell["safe"] is safe
            ]
            if chosen:
                lines.append(_line(key, safe, chosen))
    return Table(
        name="fujii_80_percent_rule",
        title="Fujii's 80 % rule on published cells without recomputation or offloading",
        columns=(
            Column("source", "source"),
            Column("cluster", "cluster"),
            Column("published", "published"),
            Column("called", "rule says"),
            Column("cells", "cells", whole),
            Column("meaning", "which is a"),
            Column("least", "least estimate, % of device", percent),
            Column("most", "most, %", percent),
            Column("ledger_fits", "of these our ledger says fit", whole),
        ),
        rows=tuple(lines),
        note=_note(cells),
    )


def _line(key: tuple[str, str, str], safe: bool, cells: Sequence[Row]) -> dict[str, Any]:
    source, cluster, status = key
    shares = [cell["share"] for cell in cells]
    judged = [cell["pred_status"] for cell in cells if cell.get("pred_status") in ("ok", "oom")]
    return {
        "source": source,
        "cluster": cluster,
        "published": status,
        "called": CALLED[safe],
        "cells": len(cells),
        "meaning": MEANING.get((status, safe), "dash: cause not published"),
        "least": min(shares),
        "most": max(shares),
        "ledger_fits": judged.count("ok") if judged else "",
    }


def _note(cells: Sequence[Mapping[str, Any]]) -> str:
    def count(status: str, safe: bool) -> int:
        return sum(cell["status"] == status and cell["safe"] is safe for cell in cells)

    return (
        "World: a paper's closed form beside published results; positive: not called safe. The "
        "rule was made from Fujii's own cells, so only the other sources test it. "
        f"{count('oom', False)} true positives, {count('ok', False)} false alarms, "
        f"{count('ok', True)} true negatives, {count('oom', True)} missed OOM. "
        f"Dashes, apart: {count('dash', True)} called safe, {count('dash', False)} not."
    )
