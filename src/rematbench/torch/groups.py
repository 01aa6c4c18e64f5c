"""A rank's coordinates and its process groups: tp, cp, dp (state peers: dp x cp), pp."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rematbench.layout import Layout


class Coordinates(NamedTuple):
    """A rank's place along every dimension."""

    tp: int
    cp: int
    dp: int
    pp: int


def coordinates(rank: int, layout: Layout, order: tuple[str, ...]) -> Coordinates:
    """Place of a rank when the first dimension of `order` varies fastest."""
    sizes = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp, "pp": layout.pp}
    place: dict[str, int] = {}
    for name in order:
        rank, place[name] = divmod(rank, sizes[name])
    return Coordinates(**place)


def members(layout: Layout, order: tuple[str, ...], along: tuple[str, ...]) -> list[list[int]]:
    """The groups whose ranks differ only along the given dimensions, each ordered by (dp, cp)."""
    groups: dict[tuple[int, ...], list[tuple[tuple[int, ...], int]]] = {}
    for rank in range(layout.gpus):
        place = coordinates(rank, layout, order)
        fixed = tuple(v for name, v in place._asdict().items() if name not in along)
        within = tuple(getattr(place, name) for name in along)
        groups.setdefault(fixed, []).append((within, rank))
    return [[rank for _, rank in sorted(group)] for group in groups.values()]


DIMENSIONS: dict[str, tuple[str, ...]] = {"tp": ("tp",), "cp": ("cp",), "dp": ("dp", "cp")}


class Group(NamedTuple):
    """One communicator: its size, this rank's place in it, and torch's handle (None: alone)."""

    size: int
    rank: int
    handle: dist.ProcessGroup | None

    def all_gather(self, out: Tensor, own: Tensor) -> None:
        """out = every rank's rows, in rank order."""
        if self.handle is None:
            out.view(-1).copy_(own.reshape(-1))
            return
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        call(out, own.contiguous(), group=self.handle)

    def reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        """out = this rank's rows of the sum over ranks."""
        if self.handle is None:
            out.view(-1).copy_(whole.reshape(-1))
            return
        call = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        call(out, whole.contiguous(), group=self.handle)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """In place; `op` is sum or max."""
        if self.handle is not None:
            kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            dist.all_reduce(tensor, kind, group=self.handle)


class Groups:
    """All groups of one layout.  Every process must build them (creation is collective)."""

    def __init__(self, layout: Layout, order: tuple[str, ...], rank: int) -> None:
        self.layout, self.order, self.rank = layout, order, rank
        self.place = coordinates(rank, layout, order)
        self.by_name = {name: self._group(along) for name, along in DIMENSIONS.items()}
        self.pipelines = {d: self._handle(("pp",)) for d in ("f", "b")}

    def _group(self, along: tuple[str, ...]) -> Group:
        mine = next(g for g in members(self.layout, self.order, along) if self.rank in g)
        return Group(len(mine), mine.index(self.rank), self._handle(along))

    def _handle(self, along: tuple[str, ...]) -> dist.ProcessGroup | None:
        """This rank's communicator along the dimensions; all ranks create all of them."""
        found: dist.ProcessGroup | None = None
        for ranks in members(self.layout, self.order, along):
            if len(ranks) > 1:
                handle = dist.new_group(ranks)
                found = handle if self.rank in ranks else found
        return found

    def peer(self, stage: int) -> int:
        """Global rank of the process at another pipeline stage, all else equal."""
        wanted = self.place._replace(pp=stage)
        ranks = range(self.layout.gpus)
        return next(r for r in ranks if coordinates(r, self.layout, self.order) == wanted)

    def send(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        """Start sending; the work holds until the receiver has it."""
        group = self.pipelines[direction]
        work = dist.isend(tensor, self.peer(stage), group=group, tag=tag)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        """Start receiving into a tensor."""
        group = self.pipelines[direction]
        work = dist.irecv(tensor, self.peer(stage), group=group, tag=tag)
        assert work is not None
        return work


def default_backend(device: torch.device) -> str:
    """gloo on a CPU, NCCL on CUDA."""
    return "nccl" if device.type == "cuda" else "gloo"
