"""What recomputation makes and nobody keeps needs no whole tensor (it was 1 GiB at 128K tokens)."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.engine.program.action import Action, Kind
from rematbench.host.gpu_state import GpuState
from rematbench.measure.torch.turns import Turns
from rematbench.worlds.torch.dispatch import Tracker
from rematbench.worlds.torch.executor import Executor
from tests.worlds.torch import cases


def test_the_last_sum_of_a_recomputed_layer_is_made_in_pieces() -> None:
    case = cases.case("one", "full")
    tracker, rises = Tracker(), []

    class Watched(Executor):
        def __init__(self, *given: Any, **known: Any) -> None:
            super().__init__(*given, **known, tracker=tracker)

        def _act(self, action: Action, micro_batch: int, chunk: int) -> None:
            tracker.device_peak_bytes = tracker.device_bytes
            super()._act(action, micro_batch, chunk)
            if (action.kind, action.op) == (Kind.RECOMPUTE, "mlp_add"):
                assert not action.allocs
                rises.append(tracker.device_peak_bytes - tracker.device_bytes)

    executor = Turns(torch.device("cpu"), GpuState).executor(case.problem, case.plan, Watched)
    executor.run_step()
    boundary = executor.model.chunks[0].boundary
    layers = case.problem.workload.model.num_layers
    assert len(rises) == layers * case.problem.layout.num_micro_batches
    assert 0 < max(rises) <= boundary.nbytes / 8
