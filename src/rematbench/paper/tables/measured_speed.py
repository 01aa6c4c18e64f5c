"""The table of measured speed: executed compared with simulated cells.

A row has the step, MFU and bytes of an executed cell, and its method's gain within its engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.sheet.table import Table, table_of
from rematbench.plugins.registry import IDENTITY

INPUTS = {"executed": "results/{suite}/executed.csv"}

Row = Mapping[str, str]
NEEDED = ("problem", "engine", "method", "status", "record_key")


def build(executed: Path) -> Table:
    return speed_table(read_sheet(executed, NEEDED))


def speed_table(rows: Sequence[Row]) -> Table:
    return table_of(
        "measured_speed", (_line(row, _base(row, rows)) for row in rows), keeps=IDENTITY
    )


def _line(row: Row, base: Row | None) -> dict[str, Any]:
    line: dict[str, Any] = {**row, "method": label(row), "remark": remark(row)}
    counts = row.get("step_s") and is_alike(row)
    if base is not None and base is not row and counts:
        line["gain"] = float(base["step_s"]) / float(row["step_s"]) - 1.0
    return line


def label(row: Row) -> str:
    """The method with its settings."""
    settings = msgspec.json.decode(row.get("settings") or "{}", type=dict[str, Any])
    words = [f"{key}={_plain(value)}" for key, value in settings.items()]
    return f"{row['method']} ({', '.join(words)})" if words else row["method"]


def _plain(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def is_alike(row: Row) -> bool:
    """Whether a cell trains correctly: neither its first loss nor its gradient norm is wrong."""
    return row.get("alike") != "NO"


def remark(row: Row) -> str:
    """The reason why a cell lacks a time, a gain or an MFU; empty if it has all three."""
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}".removesuffix(": ")
    if not is_alike(row):
        loss, norm = (float(row[f"first_{what}_error"]) for what in ("loss", "norm"))
        return f"not {row['against']}'s numbers: first loss {loss:.1e} apart, norm {norm:.1e}"
    if not row.get("step_s"):
        return "cpu" if row.get("device", "").startswith("cpu") else "no timed steps"
    return "" if row.get("mfu_causal") else "no MFU: not the GPU of the cluster file"


def _base(row: Row, rows: Sequence[Row]) -> Row | None:
    """The cell that a gain refers to: same problem, engine and device, keeping all activations."""
    keys = ("problem", "engine", "device")
    for other in rows:
        same = all(other.get(key) == row.get(key) for key in keys)
        if same and other.get("keeps_all") and other.get("step_s") and is_alike(other):
            return other
    return None
