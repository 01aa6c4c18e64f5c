"""The device of a GPU measurement, for the provenance of its lines."""

from typing import Any

from msgspec.structs import replace

from rematbench.host.gpu_state import GpuState, gpu_state
from rematbench.inputs.constants import Calibration
from rematbench.worlds.packages.process import Device
from rematbench.worlds.records.record import provenance


class Machine:
    """One device: its name and versions, and its state now."""

    def __init__(self, device: Device) -> None:
        from rematbench.worlds.torch.devices import smi_name  # noqa: PLC0415  # torch is optional
        from rematbench.worlds.torch.rank_processes import versions  # noqa: PLC0415

        self.versions = versions(device)
        self.name = self.versions["device"]
        self.smi = smi_name() if device == "cuda" else ""

    def state(self) -> GpuState:
        return gpu_state(self.smi) if self.smi else GpuState()

    def about(self, calibration: Calibration) -> dict[str, Any]:
        """The fields `gpu` and `provenance` of a line that is written now."""
        made = replace(provenance(calibration), **self.versions)
        return {"gpu": self.state(), "provenance": made}
