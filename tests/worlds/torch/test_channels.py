"""Messages between stages, as NCCL does them: no deadlock, and no need for tags."""

import random
from collections.abc import Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Kind
from rematbench.engine.program.program import Program
from rematbench.worlds.torch import groups, streams
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.exchanges import reordered_channel, used_channels
from rematbench.worlds.torch.groups import Channel, channels
from rematbench.worlds.torch.streams import CudaStreams
from tests.worlds.torch import cases
from tests.worlds.torch.rendezvous import Comm, Walk

PIPELINES = [name for name, degrees in cases.LAYOUTS.items() if degrees.get("pp", 1) > 1]


def lowered(layout: str, plan: str, tied: bool) -> tuple[Case, Program]:
    case = cases.case(layout, plan, model=cases.TIED if tied else cases.TINY)
    return case, lower(case.plan, case.problem)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", ["keep", "offload", "windows"])
@pytest.mark.parametrize("layout", PIPELINES)
def test_every_message_meets_its_receiver(layout: str, plan: str, tied: bool) -> None:
    case, program = lowered(layout, plan, tied)
    assert reordered_channel(program, case.problem.layout) == ""
    assert Walk(program, case.problem.layout, lambda channel: channel).stuck() == []


def by_direction(channel: Channel) -> Hashable:
    """One communicator for both ways of a direction."""
    return channel.direction


def ends_on_forward(channel: Channel) -> Hashable:
    """Both ends send their shared embedding's gradient over the forward's communicator."""
    closing = channel in (Channel("b", 0, 1), Channel("f", 1, 0))
    return "f" if closing else channel.direction


@pytest.mark.parametrize(
    ("layout", "tied", "comm"), [("pp2-vpp2", False, by_direction), ("pp2", True, ends_on_forward)]
)
def test_two_ways_over_one_communicator_would_wait_for_ever(
    layout: str, tied: bool, comm: Comm
) -> None:
    case, program = lowered(layout, "keep", tied)
    assert Walk(program, case.problem.layout, comm).stuck() != []


@pytest.mark.parametrize(("layout", "tied"), [("pp2", False), ("pp2-vpp2", False), ("pp2", True)])
def test_closing_links_are_opened_where_they_are_used(layout: str, tied: bool) -> None:
    case, program = lowered(layout, "keep", tied)
    straight = {Channel("f", 0, 1), Channel("b", 1, 0)}
    closing = {Channel("f", 1, 0), Channel("b", 0, 1)}
    used = used_channels(program, case.problem.layout)
    assert used == (straight | closing if layout != "pp2" or tied else straight)


def test_a_message_that_overtakes_another_is_named() -> None:
    case, program = lowered("pp2", "keep", False)
    rank = program.ranks[1]
    receives = [
        number
        for number, step in enumerate(rank.steps)
        if rank.blocks[step.block].actions[0].kind is Kind.RECV
    ]
    steps = list(rank.steps)
    a, b = receives[:2]
    steps[a], steps[b] = steps[b], steps[a]
    mixed = Program(ranks=(program.ranks[0], replace(rank, steps=tuple(steps))))
    assert reordered_channel(mixed, case.problem.layout) == "stage 0 to 1 (f)"


def test_a_pipeline_has_two_rings_of_one_way_channels() -> None:
    assert channels(1) == []
    for stages in (2, 3, 8):
        found = channels(stages)
        random.Random(stages).shuffle(found)
        assert len(set(found)) == 2 * stages
        for direction, step in (("f", 1), ("b", -1)):
            ends = {(c.sender, c.receiver) for c in found if c.direction == direction}
            assert ends == {(s, (s + step) % stages) for s in range(stages)}


# -- how CUDA streams are ordered against what is issued outside of them, on stand-ins: no GPU -----


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
