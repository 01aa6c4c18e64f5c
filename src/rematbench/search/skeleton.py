"""The bound of one layout from its whole schedule: passes that wait for messages, and the end.

A rank has two clocks, compute's and the host's, which a pass moves as its blocks do (PassCost); a
message arrives one transfer after its pass.  What follows the last pass is lowered as it is.
"""

from functools import lru_cache
from typing import NamedTuple

from rematbench.lowering.chunk_ops import ChunkOps
from rematbench.lowering.schedule import ScheduleName, passes
from rematbench.lowering.step_end import emit_step_end
from rematbench.operators.ops import Comm
from rematbench.plan import Pass, Plan
from rematbench.problem import Problem
from rematbench.program.program import Block
from rematbench.search.probe import Facts, Line, PassCost
from rematbench.simulate.max_plus import COMPUTE, macro_of
from rematbench.simulate.seconds import ActionCosts, action_seconds
from rematbench.simulate.step import compile_block

Node = tuple[int, bool, int, int]
"""(rank, forward, micro-batch, chunk)."""


class Links(NamedTuple):
    """Seconds of a rank's message to the next stage and to the one before; whether compute waits
    for its own sends, and the host for what arrives."""

    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    waits: bool
    held: bool


class Frame(NamedTuple):
    """What of a layout's step does not depend on the fates of activations: the order of passes,
    messages, the end of every rank."""

    order: tuple[Node, ...]
    links: Links
    end_s: tuple[float, ...]
    stall_s: tuple[float, ...]


@lru_cache(maxsize=64)
def in_order(schedule: ScheduleName, pp: int, vpp: int, micro_batches: int) -> tuple[Node, ...]:
    """All passes so that each comes after those it waits for."""
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
    """What the end of a step needs of a rank's lowering: its blocks are only collected."""

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
        """Keep a step's block."""
        assert callable(build)
        self.blocks.append(build())


def frame(problem: Problem, plan: Plan) -> Frame:
    """The frame of a problem's layout under the plan that methods begin with."""
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
    for rank in ranks:
        order = passes(plan.schedule, rank, lay.pp, lay.vpp, micro_batches)
        end = _End(problem, plan, rank, order)
        emit_step_end(end, plan, problem)
        ends.append(sum(_through(block, rank, costs) for block in end.blocks))
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
    )


def _through(block: Block, rank: int, costs: ActionCosts) -> float:
    """Seconds from compute before a block to compute after it."""
    ends = dict(macro_of(compile_block(block, rank, costs)).streams)
    return max((at for key, at in ends.get(COMPUTE, ()) if key == COMPUTE), default=0.0)


def _stall_s(problem: Problem, plan: Plan, rank: int) -> float:
    """What compute loses to gradient reductions and parameter gathers that run beside it: once for
    each chunk, as one collective."""
    lay, system = problem.layout, problem.system
    if lay.state_shards == 1:
        return 0.0
    scatter = plan.state("optimizer").shards > 1
    total = 0.0
    for layers in plan.partition[rank]:
        count = sum(problem.layer(layer).parameters for layer in layers)
        if system.reduce_overlap:
            kind = "reduce_scatter" if scatter else "all_reduce"
            total += problem.cost.stall_s(Comm(kind, "dp", system.reduce_bytes * count), rank)
        if system.gather_overlap and plan.state("parameter").gather == "step":
            total += problem.cost.stall_s(Comm("all_gather", "dp", system.gather_bytes * count), rank)
    return total


Costs = tuple[tuple[tuple[float, float, float], tuple[float, float, float]], ...]
"""By virtual stage: (compute, from the host's start, of the host) of forward and backward."""


def stage_costs(facts: Facts, sizes: tuple[int, ...], stages: range) -> Costs:
    """The passes of every virtual stage that has so many layers."""
    roles = [facts.middle] * len(stages)
    roles[0], roles[-1] = facts.first, facts.last
    return tuple(
        (_pass(role, "forward", sizes[i]), _pass(role, "backward", sizes[i]))
        for i, role in zip(stages, roles, strict=True)
    )


def _pass(line: Line, which: str, layers: int) -> tuple[float, float, float]:
    base: PassCost = getattr(line.base, which)
    slope: PassCost = getattr(line.slope, which)
    more = layers - line.layers
    return (
        base.compute_s + more * slope.compute_s,
        base.issued_s + more * slope.issued_s,
        base.host_s + more * slope.host_s,
    )


def tightened(frame: Frame, facts: Facts, sizes: tuple[int, ...], pp: int) -> float:
    """Seconds that the step takes at least."""
    costs = stage_costs(facts, sizes, range(len(sizes)))
    down, up, waits, held = frame.links
    stages, last = len(sizes), len(sizes) - 1
    compute, host = list(frame.stall_s), [0.0] * pp
    arrived: dict[tuple[bool, int, int], float] = {}
    for rank, forward, micro_batch, chunk in frame.order:
        stage = chunk * pp + rank
        at, issued = compute[rank], host[rank]
        if stage > 0 if forward else stage < last:
            at = max(at, arrived[forward, micro_batch, stage])
            if held:
                issued = max(issued, at)
        taken, from_host, of_host = costs[stage][0 if forward else 1]
        at = max(at + taken, issued + from_host)
        host[rank] = issued + of_host
        peer = stage + 1 if forward else stage - 1
        if 0 <= peer < stages:
            message = down[rank] if forward else up[rank]
            arrived[forward, micro_batch, peer] = at + message
            if waits:
                at += message
        compute[rank] = at
    return max(at + end for at, end in zip(compute, frame.end_s, strict=True))


__all__ = ["Frame", "action_seconds", "frame", "in_order", "tightened"]
