"""A lower bound of the contention of a plan's copies in the step of a layout.

Messages per copied byte, and the share of bytes beside a copy in the other direction, are ratios:
each is bounded by its least numerator and its largest denominator.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import fsum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.search.bounds import Total
from rematbench.advise.search.columns import Array, Columns
from rematbench.advise.search.events import FETCH, PASS, Copies, Events, Turns, events, shortened
from rematbench.advise.search.passes import ChunkCost
from rematbench.advise.search.probe import Facts, Line
from rematbench.costs.bind import CostModel
from rematbench.costs.copies import CopyTraffic, shared_link_bytes_per_s
from rematbench.plan import MIB, Transfers
from rematbench.problem import Problem


class Stages(NamedTuple):
    """The lines of a layout's virtual stages and the layers of each.  `out_bytes`, `back_bytes`:
    the most bytes that each stage copies; `surely`: the least share of them that it copies."""

    lines: Sequence[Line]
    sizes: Sequence[int]
    out_bytes: Sequence[float]
    back_bytes: Sequence[float]
    surely: Sequence[float]

    @property
    def moves(self) -> bool:
        """Whether any stage copies."""
        return any(self.out_bytes) or any(self.back_bytes)

    def all(self, which: Callable[[ChunkCost], float]) -> list[float]:
        """A number of every stage, at least 0."""
        return _all(self.lines, self.sizes, which)


def _all(
    lines: Sequence[Line], sizes: Sequence[int], which: Callable[[ChunkCost], float]
) -> list[float]:
    known: dict[tuple[int, int], float] = {}  # stages have few lines and numbers of layers
    found = []
    for line, layers in zip(lines, sizes, strict=True):
        key = (id(line), layers)
        if key not in known:
            known[key] = max(0.0, at(line, which, layers))
        found.append(known[key])
    return found


def at(line: Line, which: Callable[[ChunkCost], float], layers: Any) -> Any:
    """A number of a chunk of `layers` layers; arrays for arrays."""
    return which(line.base) + (layers - line.layers) * which(line.slope)


def stages(facts: Facts, sizes: Sequence[int], *, waits: bool) -> Stages:
    """The virtual stages of chunks with `sizes` layers.  For each layer a MiB of the copies in each
    direction is not sure, because shares of bytes are rounded to a MiB.  A method may spare the
    model's last layers: a stage near the end is sure to copy only where the probe's last chunk
    holds no layer of the stage.  `waits`: the last chunk's backwards do not follow their forwards
    at once, as in a probe, and a method may copy this chunk too."""
    lines = [facts.middle] * len(sizes)
    lines[0], lines[-1] = facts.first, facts.last
    copied = [*lines[:-1], facts.middle] if waits else lines
    out, back = (
        _all(copied, sizes, which) for which in (lambda c: c.out_bytes, lambda c: c.back_bytes)
    )
    behind = 0  # layers after a stage, from the last stage on
    surely = []
    for layers, outwards, inwards in zip(sizes[::-1], out[::-1], back[::-1], strict=True):
        nbytes = outwards + inwards
        spared = 0 < behind < facts.last.layers or (waits and not behind)
        sure = 1.0 - min(1.0, 2 * layers * MIB / nbytes) if nbytes else 0.0
        surely.append(0.0 if spared else sure)
        behind += layers
    return Stages(lines, sizes, out, back, surely[::-1])


def least_crowd(
    cost: CostModel, turns: Turns, made: Stages, moves: Transfers, sent_bytes: float
) -> CopyTraffic:
    """What the copies of a step are beside at least.  `sent_bytes`: bytes of a micro-batch's
    messages to other nodes, as one GPU of each rank sends them."""
    out, back = made.out_bytes, made.back_bytes
    total = fsum(out) + fsum(back)
    rounding = MIB * sum(made.sizes)
    sure = [share * (a + b) for share, a, b in zip(made.surely, out, back, strict=True)]
    busy_s = fsum(made.all(lambda cost: cost.forward.kernel_s + cost.backward.kernel_s))
    by_layer = moves.granularity == "layer"
    beside = _by_layer if by_layer else _by_chunk
    crossing = fsum(made.all(lambda cost: cost.crossing_bytes))
    recrossing = fsum(made.all(lambda cost: cost.recrossing_bytes))
    if not by_layer:  # copies of chunks run beside forwards and backwards
        crossing = recrossing = crossing + recrossing
    hbm_bytes_per_s = cost.cluster.hbm_bytes_per_s * cost.gpu.hbm_efficiency
    return CopyTraffic(
        two_way_share=beside(turns, made, moves) / turns.micro_batches / (total + 2 * rounding),
        sent_per_d2h=(sent_bytes + crossing) / (fsum(out) + rounding),
        received_per_h2d=(sent_bytes + recrossing) / (fsum(back) + rounding),
        kernel_delay_share=fsum(sure) / hbm_bytes_per_s / busy_s,
    )


def _by_layer(turns: Turns, made: Stages, _: Transfers) -> float:
    """Bytes of a step's copies by layer that run beside a copy in the other direction: a forward's
    last copy that runs into another pass' backward, and as many of that backward's own."""
    sure = [share > 0.0 for share in made.surely]
    trailing = np.where(sure, made.all(lambda cost: cost.trailing_bytes), 0.0)
    inside = np.where(sure, made.all(lambda cost: cost.inside_bytes), 0.0)
    one, other, times = _turnings(turns)
    both = trailing[one] + np.minimum(trailing[one], inside[other])
    return float(np.sum(times * np.where(inside[other] > 0.0, both, 0.0)))


HIDDEN = 0.5
"""Copies that take less than this share of the forward beside them are not timed again: no wait for
them is near."""


def hidden(cost: CostModel, chunk: ChunkCost, crowd: CopyTraffic) -> bool:
    """Whether a chunk's copies by layer hide well behind its forward, beside `crowd` too."""
    return cost.copy_s(chunk.out_bytes, "d2h", crowd) < HIDDEN * chunk.forward.compute_s


def sent_bytes(problem: Problem) -> float:
    """Bytes of a micro-batch's messages to other nodes, as one GPU of each rank sends them:
    forwards to the next rank, backwards to the one before; only the model's ends send none."""
    lay, crosses = problem.layout, problem.cost.crosses
    nbytes = problem.layer_kinds[0].activations["layer_input"].nbytes
    inner = sum(crosses(rank, rank + 1) for rank in range(lay.pp - 1))
    around = crosses(lay.pp - 1, 0) * (lay.vpp - 1)
    return 2 * (lay.vpp * inner + around) * (nbytes if lay.sp else nbytes / lay.tp)


class CopyBound:
    """Seconds that each layout's first rank needs at least for its copies, beside messages of
    `sent_bytes` in a micro-batch and collectives of the passes: those of the forwards and of the
    backwards, or `by_layer` the fewer of the two.  Nothing is known where the model's last layers,
    which a method may spare, begin on the first rank."""

    def __init__(
        self,
        columns: Columns,
        facts: Facts,
        cost: CostModel,
        sent_bytes: Array,
        *,
        by_layer: bool,
    ) -> None:
        self.columns, self.facts = columns, facts
        c, (first, middle, last) = columns, facts
        self.opening = Total(first, c.opening)
        self.rest = Total(middle, c.first - c.opening, c.vpp - 1)
        ending = Total(last, c.ending)
        ends = (ending.out_bytes, Total(middle, c.ending).out_bytes)
        between = c.layers - c.opening - c.ending
        inner = Total(middle, between, np.maximum(0, c.pp * c.vpp - 2))
        others = np.where(c.pp > 1, inner.out_bytes + np.maximum(*ends), 0.0)
        most = self.opening.out_bytes + others + MIB * c.layers

        def of_all(bytes_of: Callable[[Total], Array]) -> Array:
            behind = np.where(c.pp > 1, bytes_of(inner) + bytes_of(ending), 0.0)
            return np.asarray(bytes_of(self.opening) + behind)

        crossing = of_all(lambda chunk: chunk.crossing_bytes)
        recrossing = of_all(lambda chunk: chunk.recrossing_bytes)
        beside = np.minimum(crossing, recrossing) if by_layer else crossing + recrossing
        sent_bytes = sent_bytes + beside
        self.sure = (c.pp == 1) | (c.after_first >= last.layers)
        alone = cost.copy_bytes_per_s()
        rate = shared_link_bytes_per_s(alone, alone, cost.nic_bytes_per_s, 0.0, sent_bytes / most)
        efficiency = cost.common.pcie_efficiency
        self.byte_s = 1.0 / (rate * efficiency)
        self.more_s = self.byte_s - 1.0 / (alone * efficiency)  # than beside nothing

    def outwards(self) -> Array:
        """Seconds of all copies to the host, one after the other."""
        nbytes = self.opening.out_bytes + self.rest.out_bytes
        return np.where(self.sure, self.columns.count * nbytes * self.byte_s, 0.0)

    def outlast(self) -> NDArray[np.bool_]:
        """Whether a layer's copies to the host take longer than the kernels of its forward."""
        layer = self.facts.middle.slope
        return np.asarray(layer.out_bytes * self.byte_s > layer.forward.kernel_s)

    def reloads(self) -> Array:
        """Seconds by which compute waits for copies by layer that come back beside the pass before
        their backward: in the steady state a forward of another micro-batch or chunk."""
        c, (first, middle, _) = self.columns, self.facts
        ends = [(first, c.opening), (middle, c.fewest), (middle, c.most)]
        longest_s = np.max([at(line, lambda x: x.forward.compute_s, n) for line, n in ends[::2]], 0)

        def waits_s(line: Line, layers: NDArray[np.int64]) -> Array:
            back_bytes = at(line, lambda x: x.back_bytes - x.inside_bytes, layers)
            back_s = at(line, lambda x: x.back_s, layers) + self.more_s * back_bytes
            rest_s = at(line, lambda x: x.backward.landed_s - x.backward.compute_s, layers)
            return np.asarray(back_s + rest_s - longest_s)

        least_s = np.min([waits_s(*end) for end in ends], 0)
        steady = c.count * c.vpp - c.in_flight[0] + 1
        return np.where(self.sure & (c.pp > 1), steady * np.maximum(0.0, least_s), 0.0)


@lru_cache(maxsize=128)
def _turnings(turns: Turns) -> tuple[NDArray[np.int64], ...]:
    """The stages of forwards and of the backwards of other passes that directly follow on the same
    rank, and how often each pair does."""

    def counted(short: Turns, found: Issued) -> NDArray[np.int64]:
        _, rank, own, stage = found
        forward = own >= short.half
        next_to = (rank[1:] == rank[:-1]) & forward[:-1] & ~forward[1:]
        where = np.flatnonzero(next_to & (own[:-1] - short.half != own[1:]))
        pairs = stage[where] * short.stages + stage[where + 1]
        return np.bincount(pairs, minlength=short.stages**2)

    times = _times(turns, None, counted)
    pairs = np.flatnonzero(times)
    return pairs // turns.stages, pairs % turns.stages, times[pairs]


class Issued(NamedTuple):
    """Events of ranks one after the other: kind, rank, number of the pass (of copies: of their
    forward), and its stage."""

    kind: NDArray[np.int64]
    rank: NDArray[np.int64]
    own: NDArray[np.int64]
    stage: NDArray[np.int64]


def _times(
    turns: Turns, copies: Copies | None, counted: Callable[[Turns, Issued], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """How often something occurs in a schedule; `counted` counts in a schedule's events.  Of equal
    periods one is counted: the difference between a schedule with it and without it."""
    short, left_out = shortened(turns)
    parts = events(short, copies, cut=left_out > 0)

    def count(parts: Sequence[Events]) -> NDArray[np.int64]:
        columns = [(part.kind, part.rank, part.own) for part in parts]
        kind, rank, own = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(rank, kind="stable")
        stage = own // short.micro_batches % short.stages
        return counted(short, Issued(*(column[order] for column in (kind, rank, own, stage))))

    found = count(parts)
    return found + left_out * (found - count(parts[::2])) if left_out else found


def _by_chunk(turns: Turns, made: Stages, moves: Transfers) -> float:
    """Bytes of a step's copies of whole chunks that are issued next to a copy in the other
    direction, of another pass.  Copies of a rank count if all its stages are sure to copy, or are
    sure not to."""
    out, back = made.out_bytes, made.back_bytes
    copies = tuple(a > 0.0 for a in out)
    doubtful = {
        stage % turns.pp
        for stage, (copied, share) in enumerate(zip(copies, made.surely, strict=True))
        if copied and not share
    }
    outs, backs = _meeting(turns, Copies(True, moves.release_lag), copies)
    return fsum(
        share * (a * met_out + b * met_back)
        for stage, (share, a, b, met_out, met_back) in enumerate(
            zip(made.surely, out, back, outs, backs, strict=True)
        )
        if stage % turns.pp not in doubtful
    )


@lru_cache(maxsize=128)
def _meeting(
    turns: Turns, copies: Copies, copying: tuple[bool, ...]
) -> tuple[Sequence[int], Sequence[int]]:
    """How often copies of each stage to the host, and back, are issued next to a copy in the other
    direction of another pass; `copying`: the stages that copy."""

    def counted(short: Turns, found: Issued) -> NDArray[np.int64]:
        passes = (found.kind == PASS) & (found.own >= short.half)
        issued = (passes | (found.kind == FETCH)) & np.array(copying)[found.stage]
        kind, rank, own, stage = (column[issued] for column in found)
        next_to = (rank[1:] == rank[:-1]) & (kind[1:] != kind[:-1]) & (own[1:] != own[:-1])
        met = np.append(next_to, False) | np.append(False, next_to)
        return np.bincount(2 * stage[met] + kind[met], minlength=2 * short.stages)

    outs, backs = _times(turns, copies, counted).reshape(-1, 2).T.tolist()
    return outs, backs
