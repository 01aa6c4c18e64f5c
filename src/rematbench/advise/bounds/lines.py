"""The costs of a chunk's passes as linear functions of its number of layers."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property, reduce
from itertools import takewhile
from math import floor, fsum
from operator import add
from typing import Any, NamedTuple, TypeVar

from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic
from rematbench.engine.lowering.slices import slice_of
from rematbench.engine.program.action import COMPUTE as COMPUTE_STREAM
from rematbench.engine.program.action import Kind
from rematbench.engine.program.ledger import pool_bytes
from rematbench.engine.program.profile import Profile
from rematbench.engine.program.program import Block, Part, Program
from rematbench.engine.program.storage import COPIED_IN
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
from rematbench.plan import Plan
from rematbench.plugins.kinds import ChangeKind, copies


class PassCost(NamedTuple):
    """The cost of a pass of a chunk.  Seconds until compute ends: `compute_s` from when compute is
    free, `issued_s` from when the host begins to issue, `called_s` if each kernel starts when it is
    issued, `landed_s` from the end of the copies back.  `host_s`, `kernel_s`: seconds of the host
    and of kernels.  `net_bytes`: device bytes that the pass leaves; `high_bytes`: its peak above
    the bytes at entry."""

    compute_s: float
    issued_s: float
    called_s: float
    landed_s: float
    host_s: float
    kernel_s: float
    net_bytes: float
    high_bytes: float

    def minimum(self, cost: "PassCost") -> "PassCost":
        """The smaller of two passes' numbers, for each number."""
        return PassCost._make(min(a, b) for a, b in zip(self, cost, strict=True))


class ChunkCost(NamedTuple):
    """The costs of a chunk's two passes and of its copies.  `released_bytes`: device bytes freed
    after their copy to the host.  `out_s`, `back_s`: seconds of the copies to the host and back
    that run during other passes of the rank (of the whole chunk, or of its last layer).
    `out_bytes`, `back_bytes`: bytes of all copies of activations to the host and back.
    `trailing_bytes`: bytes of a forward's last copy, which continues during the next pass.
    `inside_bytes`: bytes that a backward copies back.  `boundary_bytes`: device bytes that
    messages hold between forward and backward.  `host_bytes`: bytes in host memory.  `pool_bytes`:
    bytes of the rank's staging pools.  `crossing_bytes`, `recrossing_bytes`: bytes that a GPU sends
    to other nodes in collectives of the forward and of the backward, if the chunk copies."""

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


def further(more: ChunkCost, less: ChunkCost, layers: int = 1) -> ChunkCost:
    """The costs that one layer adds to a chunk; `more` has `layers` more layers than `less`."""
    return combined(more, less, lambda a, b: (a - b) / layers)


def combined(first: ChunkCost, second: ChunkCost, numbers: Callable[[Any, Any], Any]) -> ChunkCost:
    """The costs of two chunks, combined by applying `numbers` to each pair of numbers."""
    forward, backward = (
        PassCost._make(map(numbers, a, b))
        for a, b in ((first.forward, second.forward), (first.backward, second.backward))
    )
    return ChunkCost(forward, backward, *map(numbers, first[2:], second[2:]))


def behind_embedding(chunk: ChunkCost, first: ChunkCost, inner: ChunkCost) -> ChunkCost:
    """The costs of a chunk after the embedding, from those of the same chunk on an inner rank.
    Forwards begin with the embedding and backwards end with it, so it adds the same costs to every
    plan: the difference between `first` and `inner`, one plan's costs on the first and on an inner
    rank."""
    return combined(chunk, further(first, inner), add)


class Chunk:
    """The chunk of one rank in a probe's program."""

    def __init__(self, program: Program, rank: int, profiles: list[Profile]) -> None:
        self.program, self.rank = program, rank
        self.blocks: dict[str, list[tuple[Block, Profile]]] = defaultdict(list)  # by label
        for block, profile in zip(program.ranks[rank].blocks, profiles, strict=True):
            self.blocks[block.label].append((block, profile))

    @cached_property
    def nbytes(self) -> ChunkCost:
        """The chunk's costs without seconds."""

        def fewest(wanted: str, bytes_of: Callable[[Block, Profile], int]) -> int:
            return min((bytes_of(*each) for each in self.blocks[wanted]), default=0)

        def net(_: Block, profile: Profile) -> int:
            return profile.device_net

        def host(_: Block, profile: Profile) -> int:
            return profile.host_net

        def out(block: Block, _: Profile) -> int:
            return copied_bytes(block, Kind.D2H)

        def back(block: Block, _: Profile) -> int:
            return copied_bytes(block, Kind.H2D)

        inside_bytes = fewest("B", back)
        return ChunkCost(
            forward=self._pass("F", lambda _, profile: pass_bytes(profile)),
            backward=self._backward(lambda _, profile: pass_bytes(profile)),
            released_bytes=-fewest("free_d2h", net),
            out_s=0.0,
            back_s=0.0,
            out_bytes=sum(fewest(label, out) for label in ("F", "D2H")),
            back_bytes=inside_bytes + fewest("H2D", back),
            trailing_bytes=fewest("F", lambda block, _: trailing_bytes(block)),
            inside_bytes=inside_bytes,
            boundary_bytes=fewest("recv_f", net) + fewest("free_sent_f", net),
            host_bytes=sum(fewest(label, host) for label in ("F", "D2H")),
            pool_bytes=pool_bytes(self.program.ranks[self.rank]),
            crossing_bytes=0.0,
            recrossing_bytes=0.0,
        )

    def _pass(self, label: str, cost: Callable[[Block, Profile], PassCost]) -> PassCost:
        """The least cost of the blocks with a label.  The seconds of all slices of a sequence are
        added; bytes are those of the smallest slice."""
        by_slice: dict[int, list[PassCost]] = defaultdict(list)
        for block, profile in self.blocks[label]:
            number = max(map(slice_of, block.written)) if self.program.slices else 0
            by_slice[number].append(cost(block, profile))
        found, *more = (reduce(PassCost.minimum, costs) for costs in by_slice.values())
        for each in more:
            least = found.minimum(each)
            total = PassCost._make(map(add, found, each))
            found = total._replace(net_bytes=least.net_bytes, high_bytes=least.high_bytes)
        return found

    def _backward(self, cost: Callable[[Block, Profile], PassCost]) -> PassCost:
        """The cost of a backward.  If weight gradients are separate passes, seconds and remaining
        bytes of both halves are added, and the peak is that of the first half."""
        found, *more = (self._pass(label, cost) for label in ("B", "W") if self.blocks[label])
        for half in more:
            found = PassCost._make(map(add, found, half))._replace(high_bytes=found.high_bytes)
        return found

    def timed(self, costs: ActionCosts, *, crossing: bool) -> ChunkCost:
        """The chunk's costs with seconds.  `crossing`: whether collectives cross to other nodes, as
        in the layouts that the probe represents."""
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

        def cost(block: Block, profile: Profile) -> PassCost:
            return pass_cost(block, rank, costs, profile)

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
            forward=self._pass("F", cost),
            backward=self._backward(cost),
            out_s=copies_s("D2H") or min(trailing_s(block) for block, _ in self.blocks["F"]),
            back_s=copies_s("H2D"),
            crossing_bytes=crossing_bytes("F"),
            recrossing_bytes=crossing_bytes("B"),
        )


COPIES = (Kind.D2H, Kind.H2D)


ENTRIES = (COMPUTE, HOST, COPIED_IN)
"""The starts of a PassCost's paths: compute is free, the host is free, or copies are back."""


def _issued(
    parts: tuple[Part, ...], times: int, timed: Iterator[Timing], kernels: list[float]
) -> tuple[float, float]:
    """Seconds in which the host issues parts that are repeated `times` times, and seconds until
    their last kernel ends if it starts when it is issued (0: no kernel).  `timed`: the timing of
    each written action that takes time, in order.  Appends the seconds of kernels to `kernels`."""
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
    """The cost of a block on a rank: the seconds of its longest paths from compute, host and
    copies, the seconds of its kernels, and its bytes."""
    timed: list[Timing] = []
    macro = macro_of(rows_with(block, rank, costs.timing, timed), inputs=ENTRIES)
    kernels: list[float] = []
    _, called_s = _issued(block.parts, 1, iter(timed), kernels)
    ends = {target: dict(terms) for target, terms in macro.streams}
    compute = ends.get(COMPUTE, {})
    copied = COPIED_IN in macro.waits
    landed = HOST + 1 + macro.waits.index(COPIED_IN) if copied else HOST
    return pass_bytes(profile)._replace(
        compute_s=compute.get(COMPUTE, 0.0),
        issued_s=compute.get(HOST, 0.0),
        called_s=called_s,
        landed_s=compute.get(landed, 0.0),
        host_s=ends.get(HOST, {}).get(HOST, 0.0),
        kernel_s=fsum(kernels),
    )


class Line(NamedTuple):
    """The costs of a chunk of `layers` layers (`base`), and those that each further layer adds
    (`slope`)."""

    layers: int
    base: ChunkCost
    slope: ChunkCost


class Facts(NamedTuple):
    """The lines of a chunk of the first, a middle and the last rank; with a single rank all three
    are equal."""

    first: Line
    middle: Line
    last: Line


def compute_cost(forward_s: float, backward_s: float) -> ChunkCost:
    """The costs of a chunk with its seconds of compute only."""
    none = (0.0,) * 5
    forward, backward = (PassCost(s, *none, 0, 0) for s in (forward_s, backward_s))
    return ChunkCost(forward, backward, *(0.0,) * (len(ChunkCost._fields) - 2))


class More(NamedTuple):
    """Seconds to add to a chunk's forward and to its backward."""

    forward_s: float
    backward_s: float


NEAR = 0.99
"""The factor on the seconds of a More, because seconds of a chunk are not exactly linear in its
layers: the first kernel of a kind may wait for its launch."""


def in_pieces(cut: Line, whole: Line) -> More:
    """The seconds that pieces of the head add to the last chunk: `cut` has a head in pieces,
    `whole` a whole head.  Layers may be in pieces in `cut`, so their costs are left out of both."""

    def head_s(line: Line) -> list[float]:
        passes = zip(line.base[:2], line.slope[:2], strict=True)
        return [base.compute_s - line.layers * slope.compute_s for base, slope in passes]

    both = zip(head_s(cut), head_s(whole), strict=True)
    return More._make(NEAR * max(0.0, one - other) for one, other in both)


def with_head(facts: Facts, more: More, *, single: bool) -> Facts:
    """The facts of a plan whose head is in pieces, from those of the plan with a whole head.
    `single`: there is one rank, whose chunk is first and last."""
    last = facts.last._replace(base=_longer(facts.last.base, more))
    return Facts(last, last, last) if single else facts._replace(last=last)


def lengthened(line: Line, more: More) -> Line:
    """The line with the seconds of `more` added to the passes."""
    return line._replace(base=_longer(line.base, more))


def _longer(chunk: ChunkCost, more: More) -> ChunkCost:
    def longer(cost: PassCost, seconds: float) -> PassCost:
        return cost._replace(compute_s=cost.compute_s + seconds, kernel_s=cost.kernel_s + seconds)

    return chunk._replace(
        forward=longer(chunk.forward, more.forward_s),
        backward=longer(chunk.backward, more.backward_s),
    )


def chord(two: Line, four: Line, beyond: float) -> Line:
    """The line `four`, with its peaks extrapolated to more pieces along the line through `two`,
    which has fewer pieces. `beyond`: how far, as a multiple of the distance between the two
    lines."""

    def chunk(a: ChunkCost, b: ChunkCost) -> ChunkCost:
        forward, backward = (
            y._replace(high_bytes=max(0.0, y.high_bytes - beyond * (x.high_bytes - y.high_bytes)))
            for x, y in ((a.forward, b.forward), (a.backward, b.backward))
        )
        return b._replace(forward=forward, backward=backward)

    return Line(four.layers, chunk(two.base, four.base), four.slope)


def height(cost: ChunkCost) -> float:
    """The transient bytes of a chunk's passes, above its kept bytes."""
    forward, backward = cost.forward, cost.backward
    return max(backward.high_bytes, forward.high_bytes - forward.net_bytes)


def only_kept(cost: ChunkCost, high: float) -> ChunkCost:
    """A cost with only the kept bytes of a chunk and `high` transient bytes.  Copies and staging
    pools are left out, because a plan that copies less needs less of both."""
    found = compute_cost(0.0, 0.0)
    forward = found.forward._replace(net_bytes=cost.kept_bytes)
    return found._replace(forward=forward, backward=found.backward._replace(high_bytes=high))


def no_cost() -> ChunkCost:
    return compute_cost(0.0, 0.0)


def mixed(at_zero: Facts, at_one: Facts, share: Any) -> Facts:
    """The facts at a share (or an array of shares), interpolated between both ends.  Numbers are
    linear in the share, except that a peak is the lower one of the two ends."""
    lines = (
        Line(a.layers, _mix(a.base, b.base, share), _mix(a.slope, b.slope, share))
        for a, b in zip(at_zero, at_one, strict=True)
    )
    return Facts._make(lines)


def lesser(a: Line, b: Line) -> Line:
    """The elementwise minimum of two lines with the same number of layers."""
    return Line(a.layers, combined(a.base, b.base, min), combined(a.slope, b.slope, min))


def _mix(a: ChunkCost, b: ChunkCost, share: Any) -> ChunkCost:
    found = combined(a, b, lambda x, y: x if x == y else x + (y - x) * share)
    forward = min(a.forward.high_bytes, b.forward.high_bytes)
    backward = min(a.backward.high_bytes, b.backward.high_bytes)
    return found._replace(
        forward=found.forward._replace(high_bytes=forward),
        backward=found.backward._replace(high_bytes=backward),
    )


STEPS = 1024
"""The numbers of a CopyTraffic are rounded down to multiples of 1 / STEPS."""


class Probe:
    """A method's costs, measured on small problems: the kinds of change of its plan, the plan's
    transfers, whether it `copies` activations to the host, and whether passes are halves or slices
    (`reordered`).  `end_bytes` returns the bytes that the model's end keeps, `lines` the method's
    lines with or without seconds."""

    def __init__(
        self,
        plan: Plan,
        kinds: frozenset[ChangeKind],
        end_bytes: Callable[[], tuple[int, ...]],
        lines: Callable[[CopyTraffic | None], Facts],
    ) -> None:
        self.kinds, self.transfers, self.copies = kinds, plan.transfers, copies(plan)
        self.reordered = plan.halves or bool(plan.slices)
        self._end_bytes, self._lines = end_bytes, lines

    @cached_property
    def end_bytes(self) -> tuple[int, ...]:
        """Bytes that the head, with the model's last 0, 1, 2, ... layers, keeps on the device under
        any schedule. (0,) if copies may reach the head, because a method may copy the last chunk
        under some schedules only."""
        return self._end_bytes()

    @cached_property
    def facts(self) -> Facts:
        """The method's lines without other traffic on the links of its copies."""
        return self._lines(NO_TRAFFIC)

    def with_traffic(self, traffic: CopyTraffic) -> Facts:
        """The method's lines if `traffic` shares the links with all its copies. `traffic` is
        rounded down, so that many layouts share the result."""
        return self._lines(CopyTraffic._make(floor(STEPS * number) / STEPS for number in traffic))

    @cached_property
    def nbytes(self) -> Facts:
        """The method's lines without seconds, which are enough for a plan that does not fit."""
        return self._lines(None)


class Refused(NamedTuple):
    """The reason why a method has no plan for a probe; `layers`: the number of layers to try next
    (0: unknown)."""

    reason: str
    layers: int = 0


Reply = TypeVar("Reply")
