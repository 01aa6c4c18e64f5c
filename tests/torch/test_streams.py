"""How CUDA streams are ordered against what is issued outside of them, on stand-ins: no GPU."""

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.torch.streams import CudaStreams


class Stream:
    """Notes whom it waits for."""

    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The device's current stream."""
    found = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: found)
    return found


def test_a_step_starts_after_its_batch_and_is_read_after_its_end(current: Stream) -> None:
    streams = CudaStreams(torch.device("cuda", 0))
    every = list(streams.streams.values())
    streams.begin()
    assert [stream.waited for stream in every] == [[current]] * len(every)
    assert current.waited == []
    streams.flush()
    assert current.waited == every
