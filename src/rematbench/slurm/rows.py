"""Every cell of a measurement as a row, finished or not."""

from typing import Any

import msgspec

from rematbench.slurm.cellrecord import CellRecord, decode
from rematbench.slurm.cells import Campaign, Cell
from rematbench.store import Store


def cell_rows(campaign: Campaign, store: Store) -> list[dict[str, Any]]:
    """A row per cell.  Beside the statuses of records there are `running` and `waiting`."""
    return [_row(campaign, store, cell) for cell in campaign.cells]


def _row(campaign: Campaign, store: Store, cell: Cell) -> dict[str, Any]:
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
        "gpus": spec.gpus,
        "nodes": campaign.site.nodes(spec.gpus),
        "seq_len": spec.seq_len,
        "precision": spec.precision,
    }
    data = store.read(key)
    number, lease = store.latest(key)
    if lease is not None and store.is_alive(lease):
        blank = _outcome(None)
        return row | blank | {"status": "running", "reason": store.describe(lease)}
    outcome = _outcome(decode(data) if data is not None else None)
    if data is None:
        outcome["attempts"] = number
    return row | outcome


def _outcome(found: CellRecord | None) -> dict[str, Any]:
    record = (found.record if found else None) or {}
    numbers = measured_numbers(record)
    origin = record.get("provenance") or {}
    return {
        "status": found.status if found else "waiting",
        "reason": found.reason if found else "",
        "attempts": found.attempts if found else 0,
        "job_id": found.job_id if found else "",
        "hosts": " ".join(node.host for node in found.hosts) if found else "",
        "remarks": "; ".join(found.remarks) if found else "",
        "written": found.written if found else "",
        "device": origin.get("device", ""),
        "torch": origin.get("torch", ""),
        **numbers,
        "record_key": found.key if found else "",
    }


def measured_numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Losses, and bytes and FLOPs of the fullest rank or of all ranks, of an executed record."""
    inside = record.get("measured") or {}
    if inside:
        ranks = inside["ranks"]
        peaks = [rank["peak_bytes"] for rank in ranks]
        hosts = [rank["host_peak_bytes"] for rank in ranks]
        offloaded = sum(rank["offload_bytes"] for rank in ranks)
        again = sum(rank["recompute_flop"] for rank in ranks)
    else:
        peaks, hosts = record.get("peak_device_bytes") or [], record.get("peak_host_bytes") or []
        offloaded, again = record.get("offload_bytes", ""), record.get("recompute_flop", "")
    losses = (inside or record).get("losses", [])
    return {
        "losses": msgspec.json.encode(losses).decode() if losses else "",
        "peak_device_bytes": max(peaks, default=""),
        "peak_host_bytes": max(hosts, default=""),
        "offload_bytes": offloaded,
        "recompute_flop": again,
    }
