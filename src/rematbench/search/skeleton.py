"""The bound of one layout from its whole schedule: passes that wait for messages, and the step end.

A rank has two clocks, compute and host, which each pass advances by its PassCost.  A message
arrives one transfer after its pass.  The blocks after the last pass are lowered in full.
"""

from collections import deque
from collections.abc import Callable
from functools import lru_cache
from math import fsum
from typing import NamedTuple

from rematbench.lowering.chunk_ops import ChunkOps
from rematbench.lowering.schedule import ScheduleName, passes
from rematbench.lowering.step_end import emit_step_end
from rematbench.operators.ops import Comm, CommKind
from rematbench.plan import MIB, Pass, Plan, Transfers
from rematbench.problem import Problem
from rematbench.program.program import Block
from rematbench.search.probe import ChunkCost, Facts, Line, PassCost
from rematbench.simulate.macro import COMPUTE, macro_of
from rematbench.simulate.rows import rows_of
from rematbench.simulate.seconds import ActionCosts

Node = tuple[int, bool, int, int]
"""(rank, forward, micro-batch, chunk)."""


class Links(NamedTuple):
    """Seconds of each rank's message to the next stage (`down_s`) and to the stage before (`up_s`);
    whether compute waits for its own sends, and whether the host is held until messages arrive."""

    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    waits: bool
    held: bool


class Frame(NamedTuple):
    """The part of a layout's step that does not depend on the fates of activations: the order of
    passes, messages, seconds of each rank's step end, seconds that compute loses to collectives
    beside it, passes of each rank's warm-up, and the positions where copies back begin."""

    order: tuple[Node, ...]
    links: Links
    end_s: tuple[float, ...]
    stall_s: tuple[float, ...]
    warm: tuple[int, ...]
    fetches: tuple[dict[int, list[tuple[int, int]]], ...]


@lru_cache(maxsize=64)
def in_order(schedule: ScheduleName, pp: int, vpp: int, micro_batches: int) -> tuple[Node, ...]:
    """All passes of all ranks, each after the passes that it waits for."""
    queues = [passes(schedule, rank, pp, vpp, micro_batches) for rank in range(pp)]
    at = [0] * pp
    done: set[tuple[bool, int, int]] = set()
    found: list[Node] = []
    while len(found) < sum(map(len, queues)):
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                item = queue[at[rank]]
                stage = item.chunk * pp + rank
                before = stage - 1 if item.forward else stage + 1
                if 0 <= before < pp * vpp and (item.forward, item.micro_batch, before) not in done:
                    break
                done.add((item.forward, item.micro_batch, stage))
                found.append((rank, *item))
                at[rank] += 1
    return tuple(found)


class _End:
    """A stand-in for a rank's lowering that `emit_step_end` can use: it only collects blocks."""

    def __init__(self, problem: Problem, plan: Plan, rank: int, order: tuple[Pass, ...]) -> None:
        self.rank, self.order = rank, order
        self.chunks = [
            ChunkOps(problem, rank, chunk, layers)
            for chunk, layers in enumerate(plan.partition[rank])
        ]
        peers = problem.layout.state_shards > 1
        self.overlap_reduce = problem.system.reduce_overlap and peers
        self.blocks: list[Block] = []

    def add(self, key: tuple[object, ...], build: object, item: Pass) -> None:
        """Collect the block that `build` returns."""
        assert callable(build)
        self.blocks.append(build())


def frame(problem: Problem, plan: Plan) -> Frame:
    """The Frame of a problem's layout under `plan`, the plan that methods begin with."""
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
    ends = []
    orders = [passes(plan.schedule, rank, lay.pp, lay.vpp, micro_batches) for rank in ranks]
    for rank, order in enumerate(orders):
        end = _End(problem, plan, rank, order)
        emit_step_end(end, plan, problem)
        ends.append(_through(end.blocks, rank, costs))
    return Frame(
        order=in_order(plan.schedule, lay.pp, lay.vpp, micro_batches),
        links=Links(
            tuple(send_s(rank, 1) for rank in ranks),
            tuple(send_s(rank, -1) for rank in ranks),
            waits=not beside,
            held=system.p2p_synchronous and not beside,
        ),
        end_s=tuple(ends),
        stall_s=tuple(_stall_s(problem, plan, rank) for rank in ranks),
        warm=tuple(max(0, _first_backward(order) - 1) for order in orders),
        fetches=tuple(_fetches(order, lay.pp, rank) for rank, order in enumerate(orders)),
    )


def _first_backward(order: tuple[Pass, ...]) -> int:
    return next(index for index, item in enumerate(order) if not item.forward)


def _through(blocks: list[Block], rank: int, costs: ActionCosts) -> float:
    """Seconds by which some blocks move the compute clock of a rank."""
    macro = macro_of(*(rows_of(block, rank, costs) for block in blocks))
    ends = dict(macro.streams)
    return max((at for key, at in ends.get(COMPUTE, ()) if key == COMPUTE), default=0.0)


def _stall_s(problem: Problem, plan: Plan, rank: int) -> float:
    """Seconds that compute loses to gradient reductions and parameter gathers beside it, counted as
    one collective of each kind per chunk."""
    lay, system = problem.layout, problem.system
    if lay.state_shards == 1 or lay.zero_stage > 1:  # with ZeRO 2 and 3 each pass has its own
        return 0.0
    scatter = plan.state("optimizer").shards > 1
    total = 0.0
    for layers in plan.partition[rank]:
        count = sum(problem.layer(layer).parameters for layer in layers)
        if system.reduce_overlap:
            kind: CommKind = "reduce_scatter" if scatter else "all_reduce"
            total += problem.cost.stall_s(Comm(kind, "dp", system.reduce_bytes * count), rank)
        if system.gather_overlap and plan.state("parameter").gather == "step":
            total += problem.cost.stall_s(
                Comm("all_gather", "dp", system.gather_bytes * count), rank
            )
    return total


class Stage(NamedTuple):
    """A virtual stage.  Forward and backward: seconds (of compute from when it is free, until
    compute ends from the host's start, of the host).  `landed_s`: from the arrival of the copies
    back to the end of the backward; `out_s`, `back_s`: seconds of whole-chunk copies."""

    forward: tuple[float, float, float]
    backward: tuple[float, float, float]
    landed_s: float
    out_s: float
    back_s: float


def stages_of(facts: Facts, sizes: tuple[int, ...], hbm_bytes_per_s: float) -> list[Stage]:
    """The virtual stages of chunks with `sizes` layers.  Beside whole-chunk copies, kernels are
    slower by the copies' share of the HBM rate (simulate/contention.py).  For each layer a MiB of
    the copies in each direction is left out, because shares of bytes are rounded to a MiB."""
    roles = [facts.middle] * len(sizes)
    roles[0], roles[-1] = facts.first, facts.last

    def at(line: Line, which: Callable[[ChunkCost], float], layers: int) -> float:
        return which(line.base) + (layers - line.layers) * which(line.slope)

    pairs = list(zip(roles, sizes, strict=True))
    moved = [max(0.0, at(role, lambda c: c.moved_bytes, n)) for role, n in pairs]
    surely = [
        1.0 - min(1.0, 2 * n * MIB / b) if b else 0.0
        for (_, n), b in zip(pairs, moved, strict=True)
    ]
    busy = fsum(
        at(role, lambda c: c.forward.kernel_s + c.backward.kernel_s, n) for role, n in pairs
    )
    whole = any(at(role, lambda c: c.out_s, n) > 0.0 for role, n in pairs)
    copied = sum(b * share for b, share in zip(moved, surely, strict=True))
    drawn = copied / hbm_bytes_per_s / busy if whole else 0.0

    def passed(role: Line, which: str, layers: int) -> tuple[float, float, float]:
        def of(field: str) -> float:
            return at(role, lambda c: getattr(getattr(c, which), field), layers)

        slower = drawn * of("kernel_s")
        # The longest path from the host's start runs through the layers on the host or on the
        # device.  A middle rank's layers do not tell which, so the bound takes the lower one.
        own: PassCost = getattr(role.slope, which)
        edge = min if layers >= role.layers else max
        layer_s = edge(own.issued_s, own.compute_s, own.host_s)
        base: PassCost = getattr(role.base, which)
        issued_s = base.issued_s + (layers - role.layers) * layer_s
        issued_s = max(issued_s, of("compute_s"), of("called_s"))
        return (of("compute_s") + slower, issued_s, of("host_s"))

    return [
        Stage(
            passed(role, "forward", n),
            passed(role, "backward", n),
            at(role, lambda c: c.backward.landed_s, n),
            share * max(0.0, at(role, lambda c: c.out_s, n)),
            share * max(0.0, at(role, lambda c: c.back_s, n)),
        )
        for (role, n), share in zip(pairs, surely, strict=True)
    ]


def tightened(
    frame: Frame, facts: Facts, moves: Transfers, sizes: tuple[int, ...], hbm_bytes_per_s: float
) -> float:
    """Least seconds of the step.  Passes with copies by layer wait for them, and these waits may
    hide the seconds that compute loses to collectives, so the bound then leaves those out."""
    if moves.granularity == "layer" and facts.middle.base.moved_bytes > 0:
        frame = frame._replace(stall_s=(0.0,) * len(frame.stall_s))
    stages = stages_of(facts, sizes, hbm_bytes_per_s)
    return _Walk(frame, stages, moves).run()


class _Walk:
    """Walks all passes of all ranks.  Whole-chunk copies have their own clocks: a copy to the host
    begins when its forward has ended, a copy back when the backward before its own begins, and
    compute waits for both (lowering/rank_steps.py)."""

    def __init__(self, frame: Frame, stages: list[Stage], moves: Transfers) -> None:
        pp = len(frame.end_s)
        self.frame, self.stages, self.moves, self.pp = frame, stages, moves, pp
        self.compute, self.host = list(frame.stall_s), [0.0] * pp
        self.out, self.back = [0.0] * pp, [0.0] * pp
        micro_batches = len(frame.order) // (2 * len(stages))
        self.arrived = [[[0.0] * micro_batches for _ in stages] for _ in "BF"]
        self.copies = any(stage.out_s for stage in stages)
        self.gone: dict[tuple[int, int], float] = {}  # (micro-batch, stage): its copy's end
        self.here: dict[tuple[int, int], float] = {}
        self.position = [0] * pp
        self.due: list[deque[tuple[int, float]]] = [deque() for _ in range(pp)]
        self.copying = [0.0] * pp  # when the rank's last copy to the host ends

    def run(self) -> float:
        down, up, waits, held = self.frame.links
        last, pp, copies = len(self.stages) - 1, self.pp, self.copies
        compute, host, arrived = self.compute, self.host, self.arrived
        for rank, forward, micro_batch, chunk in self.frame.order:
            number = chunk * pp + rank
            stage = self.stages[number]
            if copies:
                self._fetch(rank)
            at, issued = compute[rank], host[rank]
            if number > 0 if forward else number < last:
                came = arrived[forward][number][micro_batch]
                at = came if came > at else at
                if held and at > issued:
                    issued = at
            taken, from_host, of_host = stage.forward if forward else stage.backward
            at, host[rank] = at + taken, issued + of_host
            at = max(at, issued + from_host)
            if copies and not forward and stage.back_s:
                at = max(at, self.here[micro_batch, number] + stage.landed_s)
            ended = at
            if 0 <= (peer := number + 1 if forward else number - 1) <= last:
                message = at + (down[rank] if forward else up[rank])
                if copies and forward and self._warming(rank) and self.copying[rank] > at:
                    message = self.copying[rank] + down[rank]
                arrived[forward][peer][micro_batch] = message
                at = message if waits else at
            compute[rank] = at
            if copies:
                self._after(rank, (micro_batch, number), ended, stage.out_s if forward else 0.0)
        return max(at + end for at, end in zip(compute, self.frame.end_s, strict=True))

    def _warming(self, rank: int) -> bool:
        warm = self.frame.warm[rank]
        return "warmup" in self.moves.before_send_phases and self.position[rank] < warm

    def _after(self, rank: int, where: tuple[int, int], at: float, seconds: float) -> None:
        """Begin a copy to the host; compute waits for earlier copies whose device memory must be
        free by now."""
        position, due = self.position[rank], self.due[rank]
        if seconds:
            end = max(self.out[rank], at) + seconds
            self.out[rank] = self.gone[where] = self.copying[rank] = end
            due.append((position + self.moves.release_lag, end))
        self.position[rank] += 1
        while due and due[0][0] <= position:
            self.compute[rank] = max(self.compute[rank], due.popleft()[1])

    def _fetch(self, rank: int) -> None:
        """Begin the copies back that are due before the rank's next pass."""
        for micro_batch, number in self.frame.fetches[rank].get(self.position[rank], ()):
            seconds = self.stages[number].back_s
            if seconds:
                ready = max(self.compute[rank], self.gone[micro_batch, number])
                self.compute[rank] = ready
                self.back[rank] = max(self.back[rank], ready) + seconds
                self.here[micro_batch, number] = self.back[rank]


def _fetches(order: tuple[Pass, ...], pp: int, rank: int) -> dict[int, list[tuple[int, int]]]:
    """Position in a rank's order -> the (micro-batch, stage) whose copies back begin there.  A copy
    back begins with the backward before its own backward, but after its own forward."""
    found: dict[int, list[tuple[int, int]]] = {}
    forward_at: dict[tuple[int, int], int] = {}
    previous = -1
    for index, item in enumerate(order):
        where = (item.micro_batch, item.chunk * pp + rank)
        if item.forward:
            forward_at[where] = index
            continue
        beside = previous if previous >= 0 else index - 1
        found.setdefault(max(beside, forward_at[where] + 1), []).append(where)
        previous = index
    return found
