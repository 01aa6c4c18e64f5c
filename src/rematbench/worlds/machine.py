"""The device of a GPU measurement, for the provenance of its lines."""

from typing import Any

from msgspec.structs import replace

from rematbench.cost.constants import Calibration
from rematbench.host.gpu_state import GpuState, gpu_state
from rematbench.packages.process import Device
from rematbench.runs.record import provenance


class Machine:
    """One device: its name and versions, and its state now."""

    def __init__(self, device: Device) -> None:
        from rematbench.torch.job import versions  # noqa: PLC0415  # torch is optional

        self.versions = versions(device)
        self.name = self.versions["device"]
        self.uuid = _uuid() if device == "cuda" else ""

    def state(self) -> GpuState:
        """The GPU's state now; empty on a CPU."""
        return gpu_state(self.uuid) if self.uuid else GpuState()

    def about(self, calibration: Calibration) -> dict[str, Any]:
        """The fields `gpu` and `provenance` of a line that is written now."""
        made = replace(provenance(calibration), **self.versions)
        return {"gpu": self.state(), "provenance": made}


def _uuid() -> str:
    """nvidia-smi's name of the current GPU: its UUID, or its number where torch does not say."""
    import torch  # noqa: PLC0415  # torch is optional

    found = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return f"GPU-{found}" if found else str(torch.cuda.current_device())
