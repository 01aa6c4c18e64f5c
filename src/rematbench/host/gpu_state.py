"""The driver, clocks, power and temperature of this machine's GPUs, from nvidia-smi."""

import csv
import subprocess
from collections.abc import Sequence

from msgspec import Struct

FIELDS = {
    "driver": "driver_version",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_w": "power.draw",
    "power_limit_w": "power.limit",
    "temperature_c": "temperature.gpu",
}
TIMEOUT_S = 5.0


class GpuState(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The driver, clocks in MHz, power in W and temperature in degrees Celsius of a GPU.  A field
    that nvidia-smi does not report keeps its default."""

    driver: str = ""
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    temperature_c: float | None = None


def gpu_state(name: str) -> GpuState:
    """The state of a GPU, by its UUID or number; empty if nvidia-smi is missing or fails."""
    return read_state(query_smi(list(FIELDS.values()), "-i", name, timeout_s=TIMEOUT_S))


def query_smi(fields: Sequence[str], *options: str, timeout_s: float) -> str:
    """The output of nvidia-smi, a CSV line for each GPU; empty if it is missing or fails."""
    query = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *options]
    try:
        done = subprocess.run(
            ["nvidia-smi", *query], capture_output=True, text=True, check=True, timeout=timeout_s
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def read_state(text: str) -> GpuState:
    """The state in nvidia-smi's line for one GPU; values that are not numbers are skipped."""
    values = next(csv.reader([text.strip()], skipinitialspace=True), [])
    found: dict[str, str | float] = {}
    for name, value in zip(FIELDS, values, strict=False):
        if name == "driver":
            found[name] = value
        elif value.replace(".", "", 1).isdigit():
            found[name] = float(value)
    return GpuState(**found)  # type: ignore[arg-type]
