"""The costs of a chunk's passes, read from the blocks of a probe's program."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from itertools import takewhile
from math import fsum
from operator import add
from typing import Any, NamedTuple

from rematbench.engine.program.action import COMPUTE as COMPUTE_STREAM
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import pool_bytes
from rematbench.engine.program.profile import Profile
from rematbench.engine.program.program import Block, Part, Program
from rematbench.engine.simulate.block_rows import rows_with
from rematbench.engine.simulate.copy_contention import (
    KERNELS,
    collectives,
    copied_bytes,
    trailing_bytes,
)
from rematbench.engine.simulate.macro import COMPUTE, macro_of
from rematbench.engine.simulate.op_level import HOST, TIMELESS, Timing
from rematbench.engine.simulate.seconds import ActionCosts


class PassCost(NamedTuple):
    """One pass of a chunk.  Seconds until compute ends: `compute_s` from when compute is free,
    `issued_s` from when the host begins to issue, `called_s` if each kernel began when it was
    issued, `landed_s` from when copies are back.  Seconds of the host and of kernels alone; device
    bytes that the pass leaves, and its highest point above the bytes at entry."""

    compute_s: float
    issued_s: float
    called_s: float
    landed_s: float
    host_s: float
    kernel_s: float
    net_bytes: float
    high_bytes: float

    def least(self, other: "PassCost") -> "PassCost":
        """The lower of the two passes in every number."""
        return PassCost._make(min(a, b) for a, b in zip(self, other, strict=True))


class ChunkCost(NamedTuple):
    """A chunk's two passes.  `released_bytes`: device bytes freed after its copy to the host;
    `out_s`, `back_s`: seconds of the copies to the host and back that run beside other passes of
    the rank, of the whole chunk or of its last layer; `out_bytes`, `back_bytes`: bytes of all
    copies of activations to the host and back; `trailing_bytes`, `inside_bytes`: bytes of the last
    copy of a forward, which runs on beside the next pass, and of a backward's own copies back;
    `boundary_bytes`: device bytes that messages add between forward and backward; `host_bytes`: its
    bytes in host memory; `pool_bytes`: its rank's staging pools; `crossing_bytes`,
    `recrossing_bytes`: bytes that a GPU sends to other nodes in the collectives of the forward, and
    of the backward, where the chunk copies."""

    forward: PassCost
    backward: PassCost
    released_bytes: float
    out_s: float
    back_s: float
    out_bytes: float
    back_bytes: float
    trailing_bytes: float
    inside_bytes: float
    boundary_bytes: float
    host_bytes: float
    pool_bytes: float
    crossing_bytes: float
    recrossing_bytes: float

    @property
    def kept_bytes(self) -> float:
        """Device bytes that the chunk keeps between forward and backward."""
        return self.forward.net_bytes + self.boundary_bytes - self.released_bytes


def further(more: ChunkCost, less: ChunkCost) -> ChunkCost:
    """What one layer adds to a chunk's costs."""
    return combined(more, less, lambda a, b: a - b)


def combined(one: ChunkCost, other: ChunkCost, numbers: Callable[[Any, Any], Any]) -> ChunkCost:
    """A chunk's costs: `numbers` applied to each pair of numbers of two chunks."""
    forward, backward = (
        PassCost._make(map(numbers, a, b))
        for a, b in ((one.forward, other.forward), (one.backward, other.backward))
    )
    return ChunkCost(forward, backward, *map(numbers, one[2:], other[2:]))


def behind_embedding(chunk: ChunkCost, first: ChunkCost, inner: ChunkCost) -> ChunkCost:
    """The costs of a chunk behind the embedding, from those of the same chunk on an inner rank:
    forwards begin with the embedding and backwards end with it, so it adds to every plan what it
    adds to one (`first`: this plan's costs on the first rank, `inner`: on an inner one)."""
    return combined(chunk, further(first, inner), add)


class Chunk:
    """The chunk of a rank of a probe's program."""

    def __init__(self, program: Program, rank: int, profiles: list[Profile]) -> None:
        self.program, self.rank = program, rank
        self.blocks: dict[str, list[tuple[Block, Profile]]] = defaultdict(list)  # by label
        for block, profile in zip(program.ranks[rank].blocks, profiles, strict=True):
            self.blocks[block.label].append((block, profile))

    @cached_property
    def nbytes(self) -> ChunkCost:
        """The chunk's costs without seconds."""

        def least(wanted: str, bytes_of: Callable[[Block, Profile], int]) -> int:
            return min((bytes_of(*each) for each in self.blocks[wanted]), default=0)

        def net(_: Block, profile: Profile) -> int:
            return profile.device_net

        def host(_: Block, profile: Profile) -> int:
            return profile.host_net

        def out(block: Block, _: Profile) -> int:
            return copied_bytes(block, Kind.D2H)

        def back(block: Block, _: Profile) -> int:
            return copied_bytes(block, Kind.H2D)

        inside_bytes = least("B", back)
        return ChunkCost(
            forward=_least(pass_bytes(profile) for _, profile in self.blocks["F"]),
            backward=_least(pass_bytes(profile) for _, profile in self.blocks["B"]),
            released_bytes=-least("free_d2h", net),
            out_s=0.0,
            back_s=0.0,
            out_bytes=sum(least(label, out) for label in ("F", "D2H")),
            back_bytes=inside_bytes + least("H2D", back),
            trailing_bytes=least("F", lambda block, _: trailing_bytes(block)),
            inside_bytes=inside_bytes,
            boundary_bytes=least("recv_f", net) + least("free_sent_f", net),
            host_bytes=sum(least(label, host) for label in ("F", "D2H")),
            pool_bytes=pool_bytes(self.program.ranks[self.rank]),
            crossing_bytes=0.0,
            recrossing_bytes=0.0,
        )

    def timed(self, costs: ActionCosts, *, crossing: bool) -> ChunkCost:
        """The chunk's costs with seconds.  `crossing`: whether collectives cross to other nodes as
        in the layouts that the probe stands for."""
        rank, nbytes = self.rank, self.nbytes
        crossing = crossing and bool(nbytes.out_bytes or nbytes.back_bytes)

        def crossing_bytes(wanted: str) -> float:
            cost = costs.problem.cost
            found = (collectives(block) for block, _ in self.blocks[wanted] if crossing)
            sent = (
                fsum(cost.network_bytes(comm, rank) * times for comm, times in one.items())
                for one in found
            )
            return min(sent, default=0.0)

        def passes(wanted: str) -> PassCost:
            return _least(pass_cost(b, rank, costs, profile) for b, profile in self.blocks[wanted])

        def copies_s(wanted: str) -> float:
            found = (
                fsum(costs(action, rank) for action in block.actions if action.kind in COPIES)
                for block, _ in self.blocks[wanted]
            )
            return min(found, default=0.0)

        def trailing_s(block: Block) -> float:
            """Seconds of the copies that the block issues after its last kernel."""
            after = takewhile(lambda action: action.kind not in KERNELS, reversed(block.written))
            return fsum(costs(action, rank) for action in after if action.kind is Kind.D2H)

        return nbytes._replace(
            forward=passes("F"),
            backward=passes("B"),
            out_s=copies_s("D2H") or min(trailing_s(block) for block, _ in self.blocks["F"]),
            back_s=copies_s("H2D"),
            crossing_bytes=crossing_bytes("F"),
            recrossing_bytes=crossing_bytes("B"),
        )


COPIES = (Kind.D2H, Kind.H2D)

ENTRIES = (COMPUTE, HOST, "h2d")
"""The paths of a PassCost begin when compute or the host is free, or when copies are back."""


def _least(costs: Iterator[PassCost]) -> PassCost:
    found = next(costs)
    for cost in costs:
        found = found.least(cost)
    return found


def _issued(
    parts: tuple[Part, ...], times: int, timed: Iterator[Timing], kernels: list[float]
) -> tuple[float, float]:
    """Seconds in which the host issues parts that come `times` times, and seconds until the last
    kernel in them ends if it begins as soon as the host has issued it (0: none).  `timed`: of each
    written action that takes time, in order.  Seconds of the kernels are added to `kernels`."""
    issued = end = 0.0
    for part in parts:
        if part.periods:
            one, last = _issued(part.inside, times * part.times, timed, kernels)
            end = issued + (part.times - 1) * one + last if last else end
            issued += part.times * one
            continue
        for action in part.written:
            if action.kind not in TIMELESS:
                seconds, issue, _ = next(timed)
                issued += issue
                if seconds and action.stream == COMPUTE_STREAM:
                    end = issued + seconds
                if action.kind in KERNELS:
                    kernels.append(times * seconds)
    return issued, end


def pass_bytes(profile: Profile) -> PassCost:
    """The cost of a block without its seconds."""
    none = (0.0,) * 6
    return PassCost(*none, net_bytes=profile.device_net, high_bytes=profile.device_high)


def pass_cost(block: Block, rank: int, costs: ActionCosts, profile: Profile) -> PassCost:
    """The cost of a block: its longest paths from compute, host and copies; kernels; and bytes."""
    timed: list[Timing] = []
    macro = macro_of(rows_with(block, rank, costs.timing, timed), inputs=ENTRIES)
    kernels: list[float] = []
    _, called_s = _issued(block.parts, 1, iter(timed), kernels)
    ends = {target: dict(terms) for target, terms in macro.streams}
    compute = ends.get(COMPUTE, {})
    landed = HOST + 1 + macro.waits.index("h2d") if "h2d" in macro.waits else HOST
    return pass_bytes(profile)._replace(
        compute_s=compute.get(COMPUTE, 0.0),
        issued_s=compute.get(HOST, 0.0),
        called_s=called_s,
        landed_s=compute.get(landed, 0.0),
        host_s=ends.get(HOST, {}).get(HOST, 0.0),
        kernel_s=fsum(kernels),
    )
