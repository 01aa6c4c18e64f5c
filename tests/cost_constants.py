"""Round constants for tests of the cost model: literal expectations never move with a new fit."""

from msgspec import convert
from msgspec.structs import replace

from rematbench.inputs.constants import (
    Calibration,
    CommonConstants,
    GpuConstants,
    NetworkConstants,
    SystemConstants,
    shipped_kernels,
)
from tests.tables import tables

TABLES = tables(__file__)
GPU = convert(TABLES["gpu"], GpuConstants)
NETWORK = convert(TABLES["network"], NetworkConstants)
SYSTEM = convert(TABLES["system"], SystemConstants)
COMMON = convert(TABLES["common"], CommonConstants)
ROUND = Calibration(
    gpus={"hopper": GPU, "ampere": GPU},
    networks={"default": NETWORK},
    systems={"default": SYSTEM},
    common=COMMON,
    kernels=shipped_kernels(),
)


def instant_hosts(calibration: Calibration) -> Calibration:
    """The calibration with hosts that take zero seconds to issue a kernel."""
    systems = calibration.systems.items()
    instant = {name: replace(stack, host_launch_s=0.0) for name, stack in systems}
    return replace(calibration, systems=instant)
