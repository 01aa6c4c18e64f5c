"""A row for every cell of a campaign, finished or not, and whether a problem's cells train alike.

Weights and batches come from the problem's seed, so all engines start from the same weights: the
first loss and gradient norm of a cell are held against those of the cell that keeps all
activations.  Later steps depend on each engine's optimizer.  A campaign keeps no whole gradients:
equal norms are no proof that a method is lossless, but a wrong gradient seldom has the right norm.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.plan import PlanError
from rematbench.workload import Precision
from rematbench.worlds.records.measured import BOUNDS, Measured
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.cellrecord import CellRecord, decode
from rematbench.worlds.slurm.cells import Campaign, CampaignCell
from rematbench.worlds.slurm.shown import OURS, columns

COLUMNS = ("against", "first_loss_error", "first_norm_error", "alike")


class CellRan(NamedTuple):
    """A cell that ran: its problem, method and precision, whether it keeps all activations, the
    engine that ran it, and its numbers (`found`)."""

    problem: str
    method: str
    precision: Precision
    keeps_all: bool
    engine: str
    found: Measured


def alike(cells: Sequence[CellRan | None]) -> list[dict[str, Any]]:
    """The values of COLUMNS for every cell; empty where the cell is a reference, has no reference
    or did not run (None)."""
    return [
        dict.fromkeys(COLUMNS, "") | (_beside(cell, _reference(cell, cells)) if cell else {})
        for cell in cells
    ]


def _reference(cell: CellRan, cells: Sequence[CellRan | None]) -> CellRan | None:
    """The cell of the same problem that keeps all activations, by our executor if there is one, or
    else by any engine."""
    every = [
        other
        for other in cells
        if other is not None and other.problem == cell.problem and other.keeps_all and _has(other)
    ]
    every.sort(key=lambda other: not _is_ours(other))
    return every[0] if every else None


def _has(cell: CellRan) -> bool:
    return bool(cell.found.losses and cell.found.gradient_norms)


def _is_ours(cell: CellRan) -> bool:
    return cell.engine.split(" ")[0] == OURS


def _beside(cell: CellRan, other: CellRan | None) -> dict[str, Any]:
    if other is None or other is cell or not _has(cell):
        return {}
    loss, norm = cell.found.first_errors(other.found)
    bound = BOUNDS[cell.precision]
    close = loss <= bound and norm <= bound  # False for a NaN
    name = other.method if _is_ours(other) else f"{other.method} ({other.engine})"
    values = (name, loss, norm, "yes" if close else "NO")
    return dict(zip(COLUMNS, values, strict=True))


def cell_rows(campaign: Campaign, store: Store) -> list[dict[str, Any]]:
    """A row per cell with its request and its outcome.  The status of a cell without a record is
    `running` or `waiting`."""
    return [_row(campaign, store, cell)[0] for cell in campaign.cells]


def number_rows(campaign: Campaign, store: Store) -> list[dict[str, Any]]:
    """The rows of `cell_rows` with all measured and simulated numbers (`shown.COLUMNS`,
    `COLUMNS`); every cell is planned and simulated."""
    found: list[dict[str, Any]] = []
    ran: list[CellRan | None] = []
    for cell in campaign.cells:
        row, outcome = _row(campaign, store, cell)
        record = outcome.record if outcome else None
        simulated = _simulated(campaign, cell)
        keeps_all = simulated is not None and campaign.keeps_all(cell, simulated)
        spec, seen = cell.spec, record.measured if record else None
        numbers = columns(record, campaign.problem(spec), simulated)
        numbers["engine"] = numbers["engine"] or campaign.engine(cell)
        found.append(row | numbers | {"keeps_all": "yes" if keeps_all else ""})
        told = (spec.name, cell.variant.method, spec.precision, keeps_all, numbers["engine"])
        ran.append(CellRan(*told, seen) if seen else None)
    return [row | more for row, more in zip(found, alike(ran), strict=True)]


def _simulated(campaign: Campaign, cell: CampaignCell) -> PlanEvaluation | None:
    try:
        return campaign.simulated(cell)
    except PlanError:  # the cell's row has the reason
        return None


def _row(
    campaign: Campaign, store: Store, cell: CampaignCell
) -> tuple[dict[str, Any], CellRecord | None]:
    """The row of a cell, and the cell's record; None where the cell is running or waiting."""
    key = campaign.key(cell)
    spec = cell.spec
    row: dict[str, Any] = {
        "cell": cell.name,
        "problem": spec.name,
        "method": cell.variant.method,
        "settings": msgspec.json.encode(cell.variant.settings, order="sorted").decode(),
        "world": "executed",
        "model": spec.model,
        "cluster": spec.cluster,
        "system": spec.system,
        "gpus": spec.gpus,
        "nodes": campaign.center.nodes(spec.gpus),
        "seq_len": spec.seq_len,
        "precision": spec.precision,
    }
    data = store.read(key)
    number, lease = store.latest(key)
    if lease is not None and store.is_alive(lease):
        blank = _outcome(None)
        return row | blank | {"status": "running", "reason": store.describe(lease)}, None
    if data is None:
        return row | _outcome(None) | {"attempts": number}, None
    found = decode(data)
    return row | _outcome(found), found


def _outcome(found: CellRecord | None) -> dict[str, Any]:
    return {
        "status": found.status if found else "waiting",
        "reason": found.reason if found else "",
        "attempts": found.attempts if found else 0,
        "job_id": found.job_id if found else "",
        "hosts": " ".join(node.host for node in found.hosts) if found else "",
        "remarks": "; ".join(found.remarks) if found else "",
        "written": found.written if found else "",
        "record_key": found.key if found else "",
    }
