"""Leave out each place where the runtime orders streams, one at a time: it is found missing, or it
is said why not.  The tables name every one that the sources have (edges.py finds them)."""

import pytest

from tests.worlds.torch import edges
from tests.worlds.torch.edge_cases import MADE, SCENES, fault_of
from tests.worlds.torch.edges import Edge

RUNTIME: dict[str, tuple[str, ...]] = {
    "one offload": (
        "executor.Executor.issue_step: self.streams.begin",
        "executor.Executor.issue_step: self.streams.flush",
        "executor.Executor._record: self.streams.mark",
        "executor.Executor.wait: self.streams.wait",
        "movers.Movers.to_device: self.streams.storage_pool",
        "streams.CudaStreams.mark: event.record",
        "streams.CudaStreams.wait: self.streams[stream].wait_event",
        "streams.CudaStreams.storage_pool: self.on",
        "streams.CudaStreams.begin: stream.wait_stream",
        "streams.CudaStreams.flush: current.wait_stream",
    ),
    "tp2 keep": (
        "exchanges.Exchanges._output_pool: self.streams.storage_pool",
        "exchanges.Exchanges.all_gather: self.streams.storage_pool",
        "exchanges.Exchanges.reduce_scatter: self._output_pool",
    ),
    "cp2 rows": (
        "exchanges.Exchanges._gather_several: self.streams.storage_pool",
        "exchanges.Exchanges._scatter_several: self.streams.storage_pool",
    ),
    "tp2-ulysses2 offload": ("exchanges.Exchanges.all_to_all: self._output_pool",),
    "pp2 offload": (
        "executor.Executor._act: self.streams.on",
        "executor.Executor._act: self.streams.share",
        "executor.Executor._record: self.messages.attach",
        "streams.CudaStreams.wait: work.wait",
        "streams.CudaStreams.pending: work.wait",
        "streams.CudaStreams.pending: event.record",
        "streams.CudaStreams.share: tensor.record_stream",
    ),
    "pp2 vocab-1": ("shared_vocabulary.SharedVocabulary._lend: self.streams.share",),
    "pp2 late copies": (
        "movers.Movers.to_host: self.streams.wait",
        "movers.Movers.free: self.streams.mark",
    ),
    "one hosted": (
        "executor.Executor._record: self.host_updates.attach",
        "movers.HostUpdates.start: self.streams.mark",
        "movers.HostUpdates.start.run: self.streams.synchronize",
        "movers.PendingUpdate.wait: self.future.result",
        "streams.CudaStreams.synchronize: mark.event.synchronize",
    ),
    "dp2-zero3 keep beside": (
        "exchanges.Exchanges._gather_into_room: self.streams.wait",
        "exchanges.Exchanges._gather_into_room: self.streams.mark",
        "exchanges.Exchanges._gather_into_room: self.streams.storage_pool",
    ),
    "dp2-zero3 gradients leave": ("movers.Movers._add_on_host: states.added.wait",),
    "dp2-zero3 all leave": ("movers.Movers._shard_up: self.streams.storage_pool",),
    "one pieces": ("piece_states.Pieces.to_device: streams.storage_pool",),
    "sums on the host": (
        "executor.Executor.update: self.host_updates.finish",
        "movers.HostUpdates.finish: self.latest.wait",
    ),
    "on a CPU": (
        "executor.Executor.issue_step: self.messages.flush",
        "exchanges.Messages.flush: self.posted.pop()[0].wait",
        "streams.Mark.finish: self.messages.pop(0).wait",
        "streams.Streams.wait: mark.finish",
    ),
    "waiting from elsewhere": ("streams.CudaStreams.wait: self.on",),
    "timed steps": (
        "streams.CudaStreams.clock: start.record",
        "streams.CudaStreams.clock.stop: end.record",
        "streams.CudaStreams.clock.stop: end.synchronize",
    ),
    "turning": (
        "exchanges.Messages.send: self.streams.mark",
        "exchanges.Messages.receive: self.streams.wait",
    ),
    "opened channels": ("groups.Groups.connect: start(token, other, channel.direction, 0).wait",),
}
"""Edges by the case or scene in which it is found that one is missing."""
NO_ORDER = {
    "groups.Groups.connect: torch.cuda.synchronize": (
        "before the first step: what NCCL does to open a communicator is no part of any step's time"
    ),
    "streams.stamp: event.record": "a clock, which nothing waits for",
    "draws.Draws.take: drawn.result": "a weight's values, without which there is no parameter",
    "worker.run: dist.barrier": "between cases, so that each has the whole timeout",
}


def found_in(name: str) -> str:
    return SCENES[name]() if name in SCENES else fault_of(name)


def test_every_edge_of_the_runtime_is_in_a_table() -> None:
    named = [edge for every in RUNTIME.values() for edge in every] + list(NO_ORDER)
    assert sorted(named) == sorted(str(edge) for edge in edges.of_runtime())


FURTHER = {
    *("tp2 apart beside", "one pieces master", "tp2-dp2-zero2 early host", "dp2 hosted"),
    *("tp2 once", "dp2-zero3 gradients leave"),
}
"""Cases that repeat another's mechanism on a further layout or setting."""
SOUND = [
    pytest.param(name, marks=[pytest.mark.full] if name in FURTHER else [])
    for name in (*SCENES, *MADE)
]


@pytest.mark.parametrize("name", SOUND)  # the others: test_fake_cuda.py
def test_nothing_is_found_where_nothing_is_missing(name: str) -> None:
    assert found_in(name) == ""


@pytest.mark.parametrize(("name", "edge"), [(n, e) for n, every in RUNTIME.items() for e in every])
def test_a_runtime_without_one_of_its_edges_is_found(
    name: str, edge: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name: dict[str, Edge] = {str(e): e for e in edges.of_runtime()}
    edges.leave_out(by_name[edge], monkeypatch)
    assert found_in(name) != ""
