"""The bound of one layout from its whole schedule: passes that wait for messages, and the step end.

A rank has two clocks, compute and host, which each pass advances by its PassCost.  A message
arrives one transfer after its pass.  The blocks after the last pass are lowered in full.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

from rematbench.advise.search.contention import Stages, at
from rematbench.advise.search.events import Copies, Turns
from rematbench.advise.search.passes import ChunkCost, PassCost
from rematbench.advise.search.probe import Line
from rematbench.advise.search.walk import Beside, Pieces, Rules, walked, walked_beside
from rematbench.costs.bind import CopyDirection, CostModel
from rematbench.costs.copies import CopyTraffic
from rematbench.costs.operators.ops import Comm, CommKind
from rematbench.engine.lowering.chunk_ops import ChunkOps
from rematbench.engine.lowering.schedule import passes
from rematbench.engine.lowering.step_end import emit_step_end
from rematbench.engine.program.program import Block
from rematbench.engine.simulate.block_rows import rows_with
from rematbench.engine.simulate.macro import COMPUTE, macro_of
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.plan import Pass, Plan, Transfers
from rematbench.problem import Problem


class Links(NamedTuple):
    """Seconds of each rank's message to the next stage (`down_s`) and to the stage before (`up_s`);
    whether compute waits for its own sends, and whether the host is held until messages arrive."""

    down_s: tuple[float, ...]
    up_s: tuple[float, ...]
    waits: bool
    held: bool


class Frame(NamedTuple):
    """The part of a layout's step that does not depend on the fates of activations: the order of
    passes, messages, seconds of each rank's step end, and seconds that compute loses to
    collectives beside it."""

    turns: Turns
    links: Links
    end_s: tuple[float, ...]
    stall_s: tuple[float, ...]


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
        self.known: dict[tuple[object, ...], Block] = {}
        self.blocks: list[Block] = []

    def add(self, key: tuple[object, ...], build: Callable[[], Block], item: Pass) -> None:
        """Collect the block that `build` returns, which is one for all steps with its key."""
        if key not in self.known:
            self.known[key] = build()
        self.blocks.append(self.known[key])


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
    known: dict[Hashable, tuple[float, float]] = {}  # seconds of a rank's step end and of its stall

    def ends(rank: int) -> tuple[float, float]:
        layers = tuple(tuple(map(problem.variant, chunk)) for chunk in plan.partition[rank])
        key = (rank if rank in (0, lay.pp - 1) else None, layers, costs.alike(rank))
        if key not in known:
            end = _End(
                problem, plan, rank, passes(plan.schedule, rank, lay.pp, lay.vpp, micro_batches)
            )
            emit_step_end(end, plan, problem)
            known[key] = _through(end.blocks, rank, costs), _stall_s(problem, plan, rank)
        return known[key]

    end_s, stall_s = zip(*map(ends, ranks), strict=True)
    return Frame(
        turns=Turns(plan.schedule, lay.pp, lay.vpp, micro_batches),
        links=Links(
            tuple(send_s(rank, 1) for rank in ranks),
            tuple(send_s(rank, -1) for rank in ranks),
            waits=not beside,
            held=system.p2p_synchronous and not beside,
        ),
        end_s=end_s,
        stall_s=stall_s,
    )


def _through(blocks: list[Block], rank: int, costs: ActionCosts) -> float:
    """Seconds by which some blocks move the compute clock of a rank."""
    once = {id(block): block for block in blocks}
    rows = {which: rows_with(block, rank, costs.timing) for which, block in once.items()}
    macro = macro_of(*(rows[id(block)] for block in blocks))
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
    back to the end of the backward; `out_s`, `back_s`: seconds of copies beside other passes."""

    forward: tuple[float, float, float]
    backward: tuple[float, float, float]
    landed_s: float
    out_s: float
    back_s: float


def stages_of(made: Stages, crowd: CopyTraffic, cost: CostModel) -> list[Stage]:
    """The virtual stages of chunks, whose copies and kernels `crowd` slows."""

    def copied(which: Callable[[ChunkCost], float], direction: CopyDirection) -> list[float]:
        """Seconds of each stage's copies beside other passes."""
        sizes = made.out_bytes if direction == "d2h" else made.back_bytes
        return [
            share * alone_s
            + cost.copy_s(share * nbytes, direction, crowd)
            - cost.copy_s(share * nbytes, direction)
            for share, alone_s, nbytes in zip(made.surely, made.all(which), sizes, strict=True)
        ]

    def passed(role: Line, which: str, layers: int) -> tuple[float, float, float]:
        def of(field: str) -> float:
            return float(at(role, lambda c: getattr(getattr(c, which), field), layers))

        slower = crowd.kernel_delay_share * of("kernel_s")
        # The longest path from the host's start runs through the layers on the host or on the
        # device.  A middle rank's layers do not tell which, so the bound takes the lower one.
        own: PassCost = getattr(role.slope, which)
        edge = min if layers >= role.layers else max
        layer_s = edge(own.issued_s, own.compute_s, own.host_s)
        base: PassCost = getattr(role.base, which)
        issued_s = base.issued_s + (layers - role.layers) * layer_s
        issued_s = max(issued_s, of("compute_s"), of("called_s"))
        return (of("compute_s") + slower, issued_s, of("host_s"))

    known: dict[tuple[int, int], Stage] = {}  # without copies, by the role and layers of a stage
    kinds = [(id(role), n) for role, n in zip(made.lines, made.sizes, strict=True)]
    for kind, role in zip(kinds, made.lines, strict=True):
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


def tightened(
    frame: Frame, made: Stages, moves: Transfers, crowd: CopyTraffic, cost: CostModel
) -> float:
    """Least seconds of the step.  Passes with copies by layer wait for them, and these waits may
    hide the seconds that compute loses to collectives, so the bound then leaves those out."""
    whole = moves.granularity == "chunk"
    if not whole and made.moves:
        frame = frame._replace(stall_s=(0.0,) * len(frame.stall_s))
    stages = stages_of(made, crowd, cost)
    pieces, links = _pieces(frame, stages), frame.links
    rules = Rules(links.waits, links.held)
    if any(stage.out_s for stage in stages):
        beside = Beside(
            [stage.out_s for stage in stages],
            [stage.back_s for stage in stages],
            [stage.landed_s for stage in stages],
            held="warmup" in moves.before_send_phases,
        )
        copies = Copies(whole, moves.release_lag)
        ends = walked_beside(frame.turns, copies, pieces, beside, rules, frame.stall_s)
    else:
        ends = walked(frame.turns, pieces, rules, frame.stall_s)
    return max(at + end for at, end in zip(ends, frame.end_s, strict=True))


def _pieces(frame: Frame, stages: list[Stage]) -> Pieces:
    """The seconds of each stage's backward and forward, with those of their messages."""
    down, up, pp, last = frame.links.down_s, frame.links.up_s, frame.turns.pp, len(stages) - 1
    found: list[tuple[float, float, float, float]] = []
    for number, stage in enumerate(stages):
        found.append((*stage.backward, up[number % pp] if number else 0.0))
        found.append((*stage.forward, down[number % pp] if number < last else 0.0))
    return Pieces(*zip(*found, strict=True))
