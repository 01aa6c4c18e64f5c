"""The bound of one layout by its whole schedule: passes that wait for messages, and the step's end.

A rank has two clocks, compute and host, and each pass advances them by its PassCost.  A message
arrives one transfer after its pass.  The blocks after the last pass are lowered in full.

How much other traffic slows copies depends on two ratios: messages per copied byte, and the share
of bytes copied during a copy in the other direction.  Each is bounded by its smallest numerator and
largest denominator."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from math import fsum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.bounds.lines import ChunkCost, Facts, Line, PassCost
from rematbench.advise.bounds.schedule_walk import (
    FETCH,
    PASS,
    Copies,
    CopyTimes,
    Events,
    Pieces,
    Rules,
    Turns,
    events,
    shortened,
    walk,
)
from rematbench.costs.bind import CopyDirection, CostModel
from rematbench.costs.copies import CopyTraffic
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.schedule import passes
from rematbench.engine.lowering.step_end import emit_step_end
from rematbench.engine.program.program import Block
from rematbench.engine.simulate.block_rows import rows_with
from rematbench.engine.simulate.copy_contention import piece_traffic
from rematbench.engine.simulate.macro import COMPUTE, macro_of
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.plan import MIB, Pass, Plan, Transfers
from rematbench.problem import Problem


class Stages(NamedTuple):
    """The costs of a layout's virtual stages, as lines, and the layers of each stage.  `out_bytes`,
    `back_bytes`: the most bytes that each stage copies; `surely`: the smallest share of these bytes
    that it copies for certain."""

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
        """The number `which` of every stage, at least 0."""
        return _all(self.lines, self.sizes, which)


def _all(
    lines: Sequence[Line], sizes: Sequence[int], which: Callable[[ChunkCost], float]
) -> list[float]:
    known: dict[tuple[int, int], float] = {}  # most stages share line and layers
    found = []
    for line, layers in zip(lines, sizes, strict=True):
        key = (id(line), layers)
        if key not in known:
            known[key] = max(0.0, at(line, which, layers))
        found.append(known[key])
    return found


def at(line: Line, which: Callable[[ChunkCost], float], layers: Any) -> Any:
    """The number `which` of a chunk of `layers` layers (or the numbers, for an array)."""
    return which(line.base) + (layers - line.layers) * which(line.slope)


def stages(facts: Facts, sizes: Sequence[int], *, waits: bool) -> Stages:
    """The virtual stages whose chunks have `sizes` layers, each with the share of its copied bytes
    that is certain.  One MiB per layer and direction is uncertain, because shares are rounded to a
    MiB.  A method may leave the model's last layers uncopied, so nothing is certain for an earlier
    stage with layers of the probe's last chunk.  `waits`: other passes run between the last chunk's
    forwards and backwards (in a probe none do), so a method may copy this chunk too."""
    lines = [facts.middle] * len(sizes)
    lines[0], lines[-1] = facts.first, facts.last
    copied = [*lines[:-1], facts.middle] if waits else lines
    out, back = (
        _all(copied, sizes, which) for which in (lambda c: c.out_bytes, lambda c: c.back_bytes)
    )
    behind = 0  # counts the layers after a stage, from the end
    surely = []
    for layers, outwards, inwards in zip(sizes[::-1], out[::-1], back[::-1], strict=True):
        nbytes = outwards + inwards
        spared = 0 < behind < facts.last.layers or (waits and not behind)
        sure = 1.0 - min(1.0, 2 * layers * MIB / nbytes) if nbytes else 0.0
        surely.append(0.0 if spared else sure)
        behind += layers
    return Stages(lines, sizes, out, back, surely[::-1])


def lowest_traffic(
    cost: CostModel, turns: Turns, chunks: Stages, moves: Transfers, sent_bytes: float
) -> CopyTraffic:
    """Lower bound of the traffic with which the copies of a step share links.  `sent_bytes`: bytes
    of a micro-batch's messages to other nodes, as one GPU of each rank sends them."""
    out, back = chunks.out_bytes, chunks.back_bytes
    total = fsum(out) + fsum(back)
    rounding = MIB * sum(chunks.sizes)
    sure = [share * (a + b) for share, a, b in zip(chunks.surely, out, back, strict=True)]
    busy_s = fsum(chunks.all(lambda cost: cost.forward.kernel_s + cost.backward.kernel_s))
    by_layer = moves.granularity == "layer"
    both_ways = _by_layer if by_layer else _by_chunk
    crossing = fsum(chunks.all(lambda cost: cost.crossing_bytes))
    recrossing = fsum(chunks.all(lambda cost: cost.recrossing_bytes))
    if not by_layer:  # copies of chunks run during forwards and backwards
        crossing = recrossing = crossing + recrossing
    hbm_bytes_per_s = cost.cluster.hbm_bytes_per_s * cost.gpu.hbm_efficiency
    return CopyTraffic(
        two_way_share=both_ways(turns, chunks, moves)
        / turns.micro_batches
        / (total + 2 * rounding),
        sent_per_d2h=(sent_bytes + crossing) / (fsum(out) + rounding),
        received_per_h2d=(sent_bytes + recrossing) / (fsum(back) + rounding),
        kernel_delay_share=fsum(sure) / hbm_bytes_per_s / busy_s,
    )


def _by_layer(turns: Turns, chunks: Stages, _: Transfers) -> float:
    """Bytes of a step's layer-by-layer copies that run during a copy in the other direction: a
    forward's last copy that extends into another pass's backward, and as many bytes of that
    backward's copies."""
    sure = [share > 0.0 for share in chunks.surely]
    trailing = np.where(sure, chunks.all(lambda cost: cost.trailing_bytes), 0.0)
    inside = np.where(sure, chunks.all(lambda cost: cost.inside_bytes), 0.0)
    one, other, times = _turnings(turns)
    both = trailing[one] + np.minimum(trailing[one], inside[other])
    return float(np.sum(times * np.where(inside[other] > 0.0, both, 0.0)))


HIDDEN = 0.5
"""Copies that take less than this share of the forward that they overlap are not timed again,
because compute is far from waiting for them."""


def hidden(cost: CostModel, chunk: ChunkCost, traffic: CopyTraffic) -> bool:
    """Whether a chunk's layer-by-layer copies stay well hidden behind its forward, even alongside
    `traffic`."""
    return cost.copy_s(chunk.out_bytes, "d2h", traffic) < HIDDEN * chunk.forward.compute_s


@lru_cache(maxsize=128)
def _turnings(turns: Turns) -> tuple[NDArray[np.int64], ...]:
    """The stages of forwards, and of the backwards of other passes that follow directly on the same
    rank, with the number of times that each pair occurs."""

    def counted(short: Turns, listed: Issued) -> NDArray[np.int64]:
        _, rank, pass_id, stage = listed
        forward = pass_id >= short.half
        next_to = (rank[1:] == rank[:-1]) & forward[:-1] & ~forward[1:]
        where = np.flatnonzero(next_to & (pass_id[:-1] - short.half != pass_id[1:]))
        pairs = stage[where] * short.stages + stage[where + 1]
        return np.bincount(pairs, minlength=short.stages**2)

    times = _times(turns, None, counted)
    pairs = np.flatnonzero(times)
    return pairs // turns.stages, pairs % turns.stages, times[pairs]


class Issued(NamedTuple):
    """Columns of events, sorted by rank: kind, rank, number of the pass (of the forward, for
    copies), and stage."""

    kind: NDArray[np.int64]
    rank: NDArray[np.int64]
    pass_id: NDArray[np.int64]
    stage: NDArray[np.int64]


def _times(
    turns: Turns, copies: Copies | None, counted: Callable[[Turns, Issued], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """The numbers that `counted` returns for the events of the whole schedule. Equal periods are
    counted once, as the difference between schedules with and without a period."""
    short, left_out = shortened(turns)
    parts = events(short, copies, cut=left_out > 0)

    def count(parts: Sequence[Events]) -> NDArray[np.int64]:
        columns = [(part.kind, part.rank, part.pass_id) for part in parts]
        kind, rank, pass_id = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.argsort(rank, kind="stable")
        stage = pass_id // short.micro_batches % short.stages
        return counted(short, Issued(*(column[order] for column in (kind, rank, pass_id, stage))))

    found = count(parts)
    return found + left_out * (found - count(parts[::2])) if left_out else found


def _by_chunk(turns: Turns, chunks: Stages, moves: Transfers) -> float:
    """Bytes of a step's copies of whole chunks that are issued next to another pass's copy in the
    other direction.  Copies of a rank count only if it is certain for each of its stages whether it
    copies."""
    out, back = chunks.out_bytes, chunks.back_bytes
    copies = tuple(a > 0.0 for a in out)
    doubtful = {
        stage % turns.pp
        for stage, (copied, share) in enumerate(zip(copies, chunks.surely, strict=True))
        if copied and not share
    }
    outs, backs = _meeting(turns, Copies(True, moves.release_lag), copies)
    return fsum(
        share * (a * met_out + b * met_back)
        for stage, (share, a, b, met_out, met_back) in enumerate(
            zip(chunks.surely, out, back, outs, backs, strict=True)
        )
        if stage % turns.pp not in doubtful
    )


@lru_cache(maxsize=128)
def _meeting(
    turns: Turns, copies: Copies, copying: tuple[bool, ...]
) -> tuple[Sequence[int], Sequence[int]]:
    """How often copies of each stage to the host, and back, are issued next to a copy in the other
    direction of another pass; `copying`: the stages that copy."""

    def counted(short: Turns, listed: Issued) -> NDArray[np.int64]:
        passes = (listed.kind == PASS) & (listed.pass_id >= short.half)
        issued = (passes | (listed.kind == FETCH)) & np.array(copying)[listed.stage]
        kind, rank, pass_id, stage = (column[issued] for column in listed)
        next_to = (rank[1:] == rank[:-1]) & (kind[1:] != kind[:-1]) & (pass_id[1:] != pass_id[:-1])
        met = np.append(next_to, False) | np.append(False, next_to)
        return np.bincount(2 * stage[met] + kind[met], minlength=2 * short.stages)

    outs, backs = _times(turns, copies, counted).reshape(-1, 2).T.tolist()
    return outs, backs


class Links(NamedTuple):
    """Seconds of each rank's message to the next stage (`down_s`) and to the stage before (`up_s`),
    whether compute `waits` for its own sends, and whether the host is `held` until messages
    arrive."""

    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    waits: bool
    held: bool


class Frame(NamedTuple):
    """The part of a layout's step that does not depend on the fates of activations: the order of
    passes, messages, and seconds of each rank's step end."""

    turns: Turns
    links: Links
    end_s: tuple[float, ...]


class _End:
    """A stand-in for a rank's lowering, for `emit_step_end`; it only collects blocks."""

    def __init__(self, problem: Problem, plan: Plan, rank: int, order: tuple[Pass, ...]) -> None:
        self.rank, self.order = rank, order
        self.chunks = [
            ChunkOps(problem, rank, chunk, layers)
            for chunk, layers in enumerate(plan.partition[rank])
        ]
        peers = problem.layout.has_peers
        self.overlap_reduce = problem.system.zero.reduce_overlap and peers
        self.cache: dict[tuple[object, ...], Block] = {}
        self.blocks: list[Block] = []

    def add(self, key: tuple[object, ...], build: Callable[[], Block], item: Pass) -> None:
        """Collect the block that `build` returns; steps with equal keys share a block."""
        if key not in self.cache:
            self.cache[key] = build()
        self.blocks.append(self.cache[key])


def frame(problem: Problem, plan: Plan) -> Frame:
    """The Frame of a problem's layout under `plan`, the plan that methods start from."""
    lay, system, cost = problem.layout, problem.system, problem.cost
    micro_batches = lay.num_micro_batches
    nbytes = problem.layer_kinds[0].activations["layer_input"].nbytes
    beside = system.sends_beside(lay.vpp)
    ranks = range(lay.pp)

    def send_s(rank: int, step: int) -> float:
        if lay.pp == 1:
            return 0.0
        return cost.p2p_s(nbytes, rank, (rank + step) % lay.pp, replicated=not lay.sp)

    costs = ActionCosts(problem)
    keys: list[Hashable] = []
    known: dict[Hashable, list[Block]] = {}
    for rank in ranks:
        layers = tuple(tuple(map(problem.variant, chunk)) for chunk in plan.partition[rank])
        keys.append((rank if rank in (0, lay.pp - 1) else None, layers, costs.alike(rank)))
        if keys[-1] not in known:
            end = _End(
                problem, plan, rank, passes(plan.schedule, rank, lay.pp, lay.vpp, micro_batches)
            )
            emit_step_end(end, plan, problem)
            known[keys[-1]] = end.blocks
    if not system.host.launch_blocking:
        costs.pieces = piece_traffic((known[key] for key in keys), system.states.param_bytes)
    first = {key: rank for rank, key in reversed([*enumerate(keys)])}  # keeps a key's first rank
    seconds = {key: _through(known[key], rank, costs) for key, rank in first.items()}
    return Frame(
        turns=Turns(plan.schedule, lay.pp, lay.vpp, micro_batches),
        links=Links(
            tuple(send_s(rank, 1) for rank in ranks),
            tuple(send_s(rank, -1) for rank in ranks),
            waits=not beside,
            held=system.holds_host(lay.vpp),
        ),
        end_s=tuple(seconds[key] for key in keys),
    )


def _through(blocks: list[Block], rank: int, costs: ActionCosts) -> float:
    """Seconds by which blocks advance a rank's compute clock."""
    once = {id(block): block for block in blocks}
    rows = {which: rows_with(block, rank, costs.timing) for which, block in once.items()}
    macro = macro_of(*(rows[id(block)] for block in blocks))
    ends = dict(macro.streams)
    return max((at for key, at in ends.get(COMPUTE, ()) if key == COMPUTE), default=0.0)


class Stage(NamedTuple):
    """A virtual stage. `forward` and `backward` have three durations in seconds: of compute once it
    is free, from the host's start until compute ends, and of the host alone. `landed_s`: from the
    end of the copies back to the end of the backward; `out_s`, `back_s`: of the copies that run
    during other passes."""

    forward: tuple[float, float, float]
    backward: tuple[float, float, float]
    landed_s: float
    out_s: float
    back_s: float


def stages_of(chunks: Stages, traffic: CopyTraffic, cost: CostModel) -> list[Stage]:
    """The virtual stages of chunks, with copies and kernels slowed by `traffic`."""

    def copied(which: Callable[[ChunkCost], float], direction: CopyDirection) -> list[float]:
        """Seconds of each stage's copies during other passes."""
        sizes = chunks.out_bytes if direction == "d2h" else chunks.back_bytes
        return [
            share * alone_s
            + cost.copy_s(share * nbytes, direction, traffic)
            - cost.copy_s(share * nbytes, direction)
            for share, alone_s, nbytes in zip(chunks.surely, chunks.all(which), sizes, strict=True)
        ]

    def passed(role: Line, which: str, layers: int) -> tuple[float, float, float]:
        def of(field: str) -> float:
            return float(at(role, lambda c: getattr(getattr(c, which), field), layers))

        slower = traffic.kernel_delay_share * of("kernel_s")
        # The longest path from the host's start runs through the layers on the host or on the
        # device.  A middle rank's layers do not tell which, so the bound takes the lower one.
        layer: PassCost = getattr(role.slope, which)
        edge = min if layers >= role.layers else max
        layer_s = edge(layer.issued_s, layer.compute_s, layer.host_s)
        base: PassCost = getattr(role.base, which)
        issued_s = base.issued_s + (layers - role.layers) * layer_s
        issued_s = max(issued_s, of("compute_s"), of("called_s"))
        return (of("compute_s") + slower, issued_s, of("host_s"))

    known: dict[tuple[int, int], Stage] = {}  # keyed by role and layers; copies come later
    kinds = [(id(role), n) for role, n in zip(chunks.lines, chunks.sizes, strict=True)]
    for kind, role in zip(kinds, chunks.lines, strict=True):
        if kind not in known:
            n = kind[1]
            landed_s = at(role, lambda c: c.backward.landed_s, n)
            forward, backward = passed(role, "forward", n), passed(role, "backward", n)
            known[kind] = Stage(forward, backward, landed_s, 0.0, 0.0)
    outs, backs = copied(lambda c: c.out_s, "d2h"), copied(lambda c: c.back_s, "h2d")
    return [
        known[kind]._replace(out_s=out_s, back_s=back_s)
        for kind, out_s, back_s in zip(kinds, outs, backs, strict=True)
    ]


def schedule_bound_s(
    frame: Frame, chunks: Stages, moves: Transfers, traffic: CopyTraffic, cost: CostModel
) -> float:
    """Lower bound of the step in seconds.  The slowdown of compute by concurrent collectives of
    states is left out, because a rank that waits for a message loses nothing to them."""
    whole = moves.granularity == "chunk"
    stages = stages_of(chunks, traffic, cost)
    pieces, links = _pieces(frame, stages), frame.links
    rules = Rules(links.waits, links.held)
    if any(stage.out_s for stage in stages):
        copy_times = CopyTimes(
            [stage.out_s for stage in stages],
            [stage.back_s for stage in stages],
            [stage.landed_s for stage in stages],
            held="warmup" in moves.before_send_phases,
        )
        copies = Copies(whole, moves.release_lag)
        ends = walk(frame.turns, pieces, rules, copies, copy_times)
    else:
        ends = walk(frame.turns, pieces, rules)
    return max(at + end for at, end in zip(ends, frame.end_s, strict=True))


def _pieces(frame: Frame, stages: list[Stage]) -> Pieces:
    """The seconds of each stage's backward and forward, with those of their messages."""
    down, up, pp, last = frame.links.down_s, frame.links.up_s, frame.turns.pp, len(stages) - 1
    found: list[tuple[float, float, float, float]] = []
    for number, stage in enumerate(stages):
        found.append((*stage.backward, up[number % pp] if number else 0.0))
        found.append((*stage.forward, down[number % pp] if number < last else 0.0))
    return Pieces(*zip(*found, strict=True))
