"""The table of measured speed: executed compared with simulated cells.

A row has the step, MFU and bytes of an executed cell, and its method's gain within its engine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.sheet.table import (
    Column,
    Table,
    columns,
    gib,
    hidden,
    seconds,
    signed_percent,
    whole,
)
from rematbench.plugins.registry import IDENTITY

INPUTS = {"executed": "results/{suite}/executed.csv"}

Row = Mapping[str, str]
NEEDED = ("problem", "engine", "method", "status", "record_key")

NOTE = (
    "Step: median of the timed steps, which run without checks; each step takes the time of its "
    "slowest rank (the CSV also has the minimum and the maximum). MFU: relative to the peak in "
    "the cluster file, by the simulator's formula. Peak: live bytes including states on the "
    "fullest rank. Reserved: bytes that CUDA's allocator holds on that rank. Errors: (measured - "
    "simulated) / simulated; peaks in bf16 only. Gain: speed relative to a run that keeps all "
    f"activations in the same engine on the same GPUs ({IDENTITY}, or the package without "
    "recomputation and offloading). Engines are not ranked because their kernels differ. Trains "
    f"alike: the first loss and gradient norm equal those of {IDENTITY} on the same problem up to "
    "rounding; otherwise the row has no gain. Times on a CPU are not shown."
)


def build(executed: Path) -> Table:
    return speed_table(read_sheet(executed, NEEDED))


def signed(value: Any) -> str:
    """A percentage with its sign and one decimal."""
    return f"{float(value):+.1f}"


def speed_table(rows: Sequence[Row]) -> Table:
    return Table(
        name="measured_speed",
        title="Measured speed and memory, problem x engine x method (executed)",
        columns=(
            *columns("problem engine method"),
            Column("alike", "trains alike"),
            *hidden("against first_loss_error first_norm_error"),
            *columns("step_s"),
            *hidden("step_min_s step_max_s"),
            Column("timed_steps", "timed steps", whole),
            *columns("tokens_per_s_per_gpu mfu_causal mfu_dense"),
            Column("gain", "gain in the engine %", signed_percent),
            *columns("peak_device_bytes reserved_bytes"),
            *hidden("allocated_bytes pinned_bytes"),
            Column("simulated_step_s", "simulated step s", seconds),
            Column("step_error_percent", "step error %", signed),
            Column("simulated_peak_bytes", "simulated peak GiB", gib),
            Column("peak_error_percent", "peak error %", signed),
            *columns("device"),
            *hidden("kernels"),
            *columns("remark"),
        ),
        rows=tuple(_line(row, _base(row, rows)) for row in rows),
        note=NOTE,
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
