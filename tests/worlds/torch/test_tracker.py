"""The tracker of live storages: device and host apart, also where both are a CPU's memory."""

import pytest
import torch

from rematbench.worlds.torch import movers
from rematbench.worlds.torch.dispatch import DispatchMode, MetaMode, Tracker
from rematbench.worlds.torch.single_rank import trace_rank
from tests.worlds.torch import cases


def test_host_memory_never_counts_as_the_devices() -> None:
    tracker = Tracker()
    with tracker:
        here = torch.zeros(10, dtype=torch.uint8)
        with tracker.on_host():
            there = torch.empty(1000, dtype=torch.uint8)
        there[:10].copy_(here)
        again = torch.zeros(5, dtype=torch.uint8)
    assert (tracker.device_bytes, tracker.host_bytes) == (15, 1000)
    assert tracker.device_peak_bytes == 15
    del there, again
    assert (tracker.device_bytes, tracker.host_bytes) == (10, 0)


def test_what_a_copy_takes_on_the_device_is_not_hidden() -> None:
    """The mutation: the copy makes its source contiguous first, in device memory."""
    tracker = Tracker()
    with tracker:
        here = torch.zeros(10, 10, dtype=torch.uint8)
        with tracker.on_host():
            there = torch.empty(100, dtype=torch.uint8)
        there.copy_(here.t().contiguous().view(-1))
    assert tracker.device_peak_bytes == 200


@pytest.mark.parametrize("mode", [Tracker, MetaMode])
def test_no_operator_asks_for_torchs_compiler(mode: type[DispatchMode]) -> None:
    """Torch would wrap the method in one that imports it, at two CPU seconds a rank."""
    assert not hasattr(mode.__torch_dispatch__, "__wrapped__")


def walked(plan: str, patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """For each copy to the host in a step: live device bytes before it, and the device's peak while
    it ran."""
    case = cases.case("one", plan)
    before, peaks = [], []
    to_host = movers.Movers.to_host

    def noted(self: movers.Movers, *args: object) -> None:
        self.tracker.device_peak_bytes = self.tracker.device_bytes
        before.append(self.tracker.device_bytes)
        to_host(self, *args)  # type: ignore[arg-type]
        peaks.append(self.tracker.device_peak_bytes)

    patch.setattr(movers.Movers, "to_host", noted)
    trace_rank(case.problem, case.plan)
    return before, peaks


@pytest.mark.parametrize("plan", ["offload", "offload-layers", "skeletal"])
def test_a_copy_to_the_host_takes_no_device_memory(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, peaks = walked(plan, monkeypatch)
    assert before
    assert peaks == before
