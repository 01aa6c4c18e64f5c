"""A rank's coordinates and its process groups: tp, cp, dp (the ranks that share states: dp x cp),
those of experts (etp, ep, edp), and channels of pp.

The ranks of a Ulysses group are neighbours along dp; they use the dimension cp.

A channel is a communicator of two stages that carries messages in one direction of one of the two
rings (forward: to the next stage, backward: to the previous stage). NCCL runs a communicator's
messages in the order of issue. So on a shared communicator a send could wait forever behind a
receive that waits for the peer's send, for example between two stages with interleaved chunks, or
between two ends that exchange the gradient of a shared embedding. The default group has no device,
so that torch opens each communicator at its first use or in `connect`.
"""

import time
from collections.abc import Callable, Container
from functools import partial
from itertools import permutations
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rematbench.costs.collectives import degrees, group_ranks
from rematbench.costs.operators.ops import STREAMS_OF
from rematbench.costs.operators.ops import Group as GroupName
from rematbench.engine.program.storage import OF_VOCABULARY, STEP
from rematbench.inputs.layout import Layout

RELEASE_S = 1.0


class Coordinates(NamedTuple):
    tp: int
    cp: int
    dp: int
    pp: int


def coordinates(rank: int, layout: Layout, order: tuple[str, ...]) -> Coordinates:
    """The coordinates of a rank; the first dimension of `order` varies fastest."""
    sizes = degrees(layout)
    place: dict[str, int] = {}
    for name in order:
        rank, place[name] = divmod(rank, sizes[name])
    return Coordinates(**place)


def members(layout: Layout, order: tuple[str, ...], along: tuple[str, ...]) -> list[list[int]]:
    """The groups of ranks that differ only along the dimensions `along`. A group lists its ranks in
    ascending order, as torch orders the ranks of a communicator."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(layout.gpus):
        place = coordinates(rank, layout, order)
        fixed = tuple(v for name, v in place._asdict().items() if name not in along)
        groups.setdefault(fixed, []).append(rank)
    return list(groups.values())


DIMENSIONS: dict[GroupName, tuple[str, ...]] = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp", "cp")}
EXPERT_GROUPS: tuple[GroupName, ...] = ("etp", "ep", "edp")
"""The groups over which experts are spread, from neighbouring ranks (etp) to distant ones."""


def state_rank(
    layout: Layout,
    order: tuple[str, ...],
    place: Coordinates,
    along: Container[str] = DIMENSIONS["dp"],
) -> int:
    """A rank's index in the communicator of the ranks that differ from it only along `along` (by
    default the ranks that share states)."""
    sizes, number, stride = degrees(layout), 0, 1
    for name in (one for one in order if one in along):
        number += getattr(place, name) * stride
        stride *= sizes[name]
    return number


class ExpertPlace(NamedTuple):
    """A rank's place in the expert groups of its stage: which part of each of its experts it holds
    (`etp`), which share of all experts (`ep`), its index among holders of the same (`edp`)."""

    etp: int
    ep: int
    edp: int


def expert_place(layout: Layout, order: tuple[str, ...], place: Coordinates) -> ExpertPlace:
    number = state_rank(layout, order, place, order)
    axes = {
        axis: next(ranks.index(number) for ranks in groups if number in ranks)
        for axis in ExpertPlace._fields
        for groups in [group_ranks(layout, axis, place.pp, order)]
    }
    return ExpertPlace(**axes)


class Group(NamedTuple):
    """A communicator: its size, this rank's index in it, and torch's handle (None: one rank)."""

    size: int
    rank: int
    handle: dist.ProcessGroup | None

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """out = every rank's rows in rank order. `part` may be this rank's rows of `out`."""
        if self.handle is None:
            out.view(-1).copy_(part.reshape(-1))
            return
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._call(partial(call, group=self.handle), out, part.contiguous())

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        """out = this rank's rows of the sum over ranks. `out` may be a part of `whole`."""
        if self.handle is None:
            out.view(-1).copy_(whole.reshape(-1))
        elif is_gloo(self.handle):  # exchange the rows, then add them here in rank order
            parts = torch.empty_like(whole)
            self.all_to_all(parts, whole)
            torch.sum(parts.view(self.size, -1), 0, out=out.view(-1))
        else:
            call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            call(out, whole.contiguous(), group=self.handle)

    def all_to_all(self, out: Tensor, whole: Tensor) -> None:
        """out = all ranks' parts for this rank; `whole` has a part for each rank. Both in rank
        order."""
        if self.handle is None:
            out.view(-1).copy_(whole.reshape(-1))
            return
        call = partial(dist.all_to_all_single, group=self.handle)
        self._call(call, out.view(-1), whole.contiguous().view(-1))

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduce over ranks in place; `op` is sum or max."""
        if self.handle is not None:
            kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            self._call(partial(dist.all_reduce, op=kind, group=self.handle), tensor)

    def _call(self, call: Callable[..., object], *tensors: Tensor) -> None:
        if self.handle is not None and is_gloo(self.handle):
            run_and_release(call, *tensors)
        else:
            call(*tensors)


def is_gloo(handle: dist.ProcessGroup | None) -> bool:
    """Whether a communicator uses gloo, whose threads hold tensors after a call returns."""
    return dist.get_backend(handle) == "gloo"


def run_and_release(call: Callable[..., object], *tensors: Tensor) -> None:
    """Run a collective and wait until gloo's threads have released its tensors, which happens a
    moment after the collective is done. Until then the tracker would count freed tensors."""
    holders = getattr(torch._C, "_storage_Use_Count")  # noqa: B009  # torch's type stubs lack it
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    before = [holders(storage) for storage in storages]
    call(*(tensor.detach() for tensor in tensors))  # gloo then holds aliases of the storages
    deadline = time.monotonic() + RELEASE_S
    while time.monotonic() < deadline:
        if all(holders(s) <= n for s, n in zip(storages, before, strict=True)):
            return
        time.sleep(0)


class Channel(NamedTuple):
    """The channel for messages in one direction from one stage of a pipeline to another."""

    direction: str
    sender: int
    receiver: int


def channels(stages: int, *, vocabulary: bool = False) -> list[Channel]:
    """Every channel of a pipeline: both rings with the links between the last and the first stage,
    which interleaved chunks and a shared embedding use. `vocabulary`: also between any two
    stages."""
    rings = [
        Channel(direction, stage, (stage + STEP[direction]) % stages)
        for direction in "fb"
        for stage in range(stages)
        if stages > 1
    ]
    pairs = permutations(range(stages), 2) if vocabulary else ()
    return rings + [Channel(word, *pair) for pair in pairs for word in OF_VOCABULARY]


def new_group(ranks: list[int]) -> dist.ProcessGroup:
    """A communicator of these ranks. NCCL's communicator gets a stream of torch's high-priority
    pool. A pool hands out its 32 streams in turn, so a communicator's stream from the normal pool
    could also be a stream of the executor, which a message would then block."""
    options = None
    if dist.get_backend() == "nccl":
        options = getattr(dist, "ProcessGroupNCCL").Options()  # noqa: B009  # some builds lack it
        options.is_high_priority_stream = True
    made: dist.ProcessGroup = dist.new_group(ranks, pg_options=options)
    return made


class Groups:
    """All groups of one layout. Every process must make them, because all ranks make a group
    together."""

    def __init__(
        self,
        layout: Layout,
        order: tuple[str, ...],
        rank: int,
        *,
        experts: bool = False,
        vocabulary: bool = False,
    ) -> None:
        """`experts`: also make the groups over which experts are spread; `vocabulary`: also make
        the groups of stages that share a vocabulary."""
        self.layout, self.order, self.rank = layout, order, rank
        self.vocabulary = vocabulary
        self.place = coordinates(rank, layout, order)
        self._handles: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
        self.by_name: dict[str, Group] = {
            name: self._group(name, members(layout, order, along))
            for name, along in DIMENSIONS.items()
            if name != "tp" or layout.tp_columns == 1
        }
        if vocabulary:
            self.by_name["pp"] = self._group("pp", members(layout, order, ("pp",)))
        nested: tuple[GroupName, ...] = ("tp", "columns") if layout.tp_columns > 1 else ()
        for axis in (*nested, *(EXPERT_GROUPS if experts else ())):
            by_stage = (group_ranks(layout, axis, stage, order) for stage in range(layout.pp))
            ranks = [list(ranks) for each in by_stage for ranks in each]
            self.by_name[axis] = self._group(axis, ranks)
        self.channels = self._channels()
        self.buffered = any(map(is_gloo, self.channels.values()))
        """Whether a send copies its tensor first: gloo's send waits for the receiver."""
        self._peers: dict[int, int] = {}
        self._open: set[str | Channel] = set()

    def _group(self, name: GroupName, groups: list[list[int]]) -> Group:
        """This rank's group of a kind. Groups of the same ranks share a communicator only if their
        collectives run on one stream, because ranks may issue those of two streams in different
        orders."""
        mine, handle = [self.rank], None
        for ranks in groups:
            key = STREAMS_OF.get(name, name), tuple(ranks)
            if len(ranks) > 1 and key not in self._handles:
                self._handles[key] = new_group(ranks)
            if self.rank in ranks:
                mine, handle = ranks, self._handles.get(key)
        return Group(len(mine), mine.index(self.rank), handle)

    def _channels(self) -> dict[Channel, dist.ProcessGroup]:
        """This rank's channels; every rank takes part in creating the channels of all pipelines."""
        found = {}
        for ranks in members(self.layout, self.order, ("pp",)):
            for channel in channels(self.layout.pp, vocabulary=self.vocabulary):
                ends = [ranks[channel.sender], ranks[channel.receiver]]
                handle = new_group(ends)
                if self.rank in ends:
                    found[channel] = handle
        return found

    def connect(self, device: torch.device, used: Container[Channel]) -> None:
        """Open the communicators of the groups and of the used channels, on all ranks in the same
        order.

        NCCL opens a communicator at its first use and blocks the host until the peers do the same.
        This must not happen inside a step. Each communicator costs memory, so an unused channel
        stays closed.
        """
        token = torch.zeros(1, device=device)
        for name, group in self.by_name.items():
            if name not in self._open:
                group.all_reduce(token)
        due = [channel for channel in self.channels if channel in used]
        for channel in due:
            if channel in self._open:
                continue
            start = self.send if channel.sender == self.place.pp else self.receive
            other = channel.receiver if channel.sender == self.place.pp else channel.sender
            start(token, other, channel.direction, 0).wait()
        self._open |= {*self.by_name, *due}
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def peer(self, stage: int) -> int:
        if stage not in self._peers:
            wanted = self.place._replace(pp=stage)
            ranks = range(self.layout.gpus)
            found = (r for r in ranks if coordinates(r, self.layout, self.order) == wanted)
            self._peers[stage] = next(found)
        return self._peers[stage]

    def send(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        """Start a send; the work is done when the receiver has the tensor."""
        group = self.channels[Channel(direction, self.place.pp, stage)]
        work = dist.isend(tensor, self.peer(stage), group=group, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        """Start to receive into a tensor. NCCL has no tags: its messages arrive in the order of
        their sends (see `exchanges.reordered_channel`)."""
        group = self.channels[Channel(direction, stage, self.place.pp)]
        work = dist.irecv(tensor, self.peer(stage), group=group, tag=tag)
        assert work is not None
        return work


def default_backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
