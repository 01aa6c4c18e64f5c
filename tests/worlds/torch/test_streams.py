"""How CUDA streams are ordered against what is issued outside of them, on stand-ins: no GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rematbench.worlds.torch import groups, streams
from rematbench.worlds.torch.streams import CudaStreams


def test_executors_of_one_process_share_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives out 32 in turn: were they new each time, one's compute would be another's."""
    made: list[object] = []
    monkeypatch.setattr(streams, "CUDA_STREAMS", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or len(made))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    work: Any = SimpleNamespace(wait=lambda: None)
    for _ in range(10):
        own = CudaStreams(torch.device("cuda", 0))
        for channel in ("forward", "backward"):
            own.pending(channel, work)
            own.pending(channel, work)
    assert len(made) == len(own.streams) + 2
    CudaStreams(torch.device("cuda", 1))
    assert len(made) == 2 * len(own.streams) + 2


def test_communicators_take_their_streams_from_another_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    named = SimpleNamespace(Options=SimpleNamespace)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", named, raising=False)
    monkeypatch.setattr(dist, "new_group", lambda ranks, pg_options: given.append(pg_options))
    for backend in ("nccl", "gloo"):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        groups.new_group([0, 1])
    assert given[0].is_high_priority_stream is True
    assert given[1] is None
