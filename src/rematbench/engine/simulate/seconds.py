"""Seconds of actions. Only this module applies cost formulas to actions."""

from collections.abc import Hashable, Mapping
from math import fsum
from typing import get_args

from rematbench.costs.bind import CopyDirection
from rematbench.costs.bind_kernels import Direction
from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic
from rematbench.costs.operators.experts import ROUTED
from rematbench.costs.operators.launches import COUNTS, uncaptured
from rematbench.costs.operators.ops import Comm, Group, Op, OpTable
from rematbench.costs.states import PARAMETER_STAGE
from rematbench.engine.lowering.slices import slice_problems
from rematbench.engine.lowering.states.state_shards import quantised_weights
from rematbench.engine.program.action import (
    HOST_UPDATE,
    STALL,
    STATE_COPIES,
    STATES_DOWN,
    STATES_UP,
    WEIGHTS_UP,
    Action,
    Kind,
)
from rematbench.engine.program.program import Program
from rematbench.engine.program.storage import OF_VOCABULARY, STEP
from rematbench.engine.simulate.beside import Exposed, exposed_shares
from rematbench.engine.simulate.copy_contention import PieceTraffic, copy_traffic, piece_traffic
from rematbench.engine.simulate.op_level import NO_TIME, ORDERING, RankedSeconds, Timing
from rematbench.problem import Problem

DIRECTION: dict[Kind, Direction] = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward",
    Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight",
}


DENSE_GROUPS: tuple[Group, ...] = ("tp", "cp", "ulysses", "dp", "pp", "replica")


class ActionCosts:
    """The costs of a problem's actions: (action, rank) -> seconds, and the host's seconds. `crowd`:
    the traffic that slows copies and kernels; the copies and messages of a `program` replace it."""

    def __init__(
        self, problem: Problem, program: Program | None = None, crowd: CopyTraffic = NO_TRAFFIC
    ) -> None:
        self.problem, self.cost, self.crowd = problem, problem.cost, crowd
        self.pieces = PieceTraffic()
        self._ops: dict[tuple[str, int, str], Op] = {}
        self._kernels: dict[tuple[object, ...], float] = {}
        self._timings: dict[tuple[object, ...], Timing] = {}
        self._shares: dict[tuple[int, int], Mapping[str, Exposed]] = {}  # the key is (layer, rank)
        system, vpp = problem.system, problem.layout.vpp
        kernels, work = system.kernels, problem.workload
        self._iterates, self._graphs = kernels.captures_iteration, kernels.captures
        kinds = problem.layer_kinds if kernels.captures or kernels.compiled else ()
        self._eager = [frozenset[str]() for _ in kinds]
        """For each kind of layer, the operators that are in no graph."""
        if kernels.captures:
            self._eager = [uncaptured(kernels, work, table) for table in kinds]
            self._begins = [*map(_graph_begins, kinds, self._eager)]
        else:
            self._begins = [_region_begins(table) for table in kinds]
        self._hook_s = system.zero.hook_s * (problem.layout.zero_stage == PARAMETER_STAGE)
        self._waits_for_messages = system.holds_host(vpp)
        self._blocks = system.host.launch_blocking
        layout, experts = problem.layout, problem.workload.model.experts
        alone = layout.ep * layout.expert_tp == 1
        padded = problem.workload.expert_padding == "capacity"
        self._counts_alone = not padded and (alone or system.experts.dispatcher == "allgather")
        self._groups = get_args(Group) if experts else DENSE_GROUPS
        self._holds = self._waits_for_messages or self._blocks or system.host.blocking_copies
        self._holds = self._holds or experts is not None
        self._slices = program.slices if program is not None else ()
        if program is not None and not self._blocks:
            self.crowd = copy_traffic(problem, program, self._kernels_s)
            blocks = (one.blocks for one in program.ranks)
            self.pieces = piece_traffic(blocks, problem.system.states.param_bytes)
            if self.crowd.kernel_delay_share:
                self._kernels.clear()

    def __call__(self, action: Action, rank: int) -> float:
        if action.kind in DIRECTION:
            return self._kernels_s(action, rank)
        if action.kind is Kind.STALL:
            return self._stall_s(action, rank)
        comm = action.exchange.comm
        if comm is not None:
            seconds = self.cost.comm_s(comm, rank)
            return seconds * self._exposed(action, rank) if action.exchange.beside else seconds
        return _OTHERS[action.kind](self, action, rank)

    def timing(self, action: Action, rank: int) -> Timing:
        """Return the timing of an action.  A kernel's timing is cached for all layers and
        micro-batches, and for all ranks unless a collective overlaps the kernel.  The timing of a
        copy or a collective is cached for its rank."""
        kind = action.kind
        if kind not in DIRECTION:
            held = self._holds and self.held(action)
            if kind in ORDERING:
                return Timing(0.0, 0.0, held) if held else NO_TIME
            # These timings depend on the action's place in its block, so they are not cached.
            if held or self._begins or kind is Kind.STALL:
                return Timing(self(action, rank), self.issue_s(action, rank), held)
            comm, beside = action.exchange.comm, action.exchange.beside
            where = (beside, action.variant) if beside else ()
            what = (kind, action.stream, action.op, action.nbytes, comm, rank, *where)
            if (found := self._timings.get(what)) is None:
                found = Timing(self(action, rank), self.issue_s(action, rank), held)
                self._timings[what] = found
            return found
        rows, overlaps = action.rows, action.exchange.overlaps
        shares = (rows.fraction, rows.columns, rows.offset > 0.0)
        ranked = (overlaps, rank) if overlaps else None
        key = (kind, action.part.letter, action.variant, action.op, ranked, shares)
        if (found := self._timings.get(key)) is None:
            issue = self.issue_s(action, rank)
            found = self._timings[key] = Timing(self(action, rank), issue, self.held(action))
        return found

    def issue_s(self, action: Action, rank: int) -> float:
        """Return the seconds that the host takes to issue an action: a launch for each kernel, or a
        single launch for a collective, a message or a copy. A STALL has no launch. A layer's CUDA
        graph has one launch, at its first action; so has a compiled region, which consists of the
        kernels between two collectives. An iteration's graph is launched together with the update,
        which is in no graph. Launches of experts outside graphs take another time
        (`expert_pace`)."""
        if action.kind is Kind.STALL or self._inside(action):
            return 0.0
        launch_s = self.cost.host_launch_s
        if self._iterates:
            return 2 * launch_s
        eager = True
        if self._begins and action.part.letter == "L":
            eager = action.op in self._eager[action.variant % len(self._eager)]
        if action.op in ROUTED and (eager or not self._graphs):
            launch_s *= self.cost.common.expert_pace
        if action.kind not in DIRECTION:
            gathers = action.kind is Kind.ALL_GATHER and action.stream == "dp"
            return launch_s + self._hook_s * gathers
        op, direction = self._op(action, rank), DIRECTION[action.kind]
        calls, loops_s = self.cost.calls(op, direction), self.cost.loops_s(op, direction)
        if not eager:
            calls, loops_s = min(1, calls), 0.0
        hook_s = self._hook_s if op.has_weight and direction != "backward_weight" else 0.0
        return calls * launch_s + loops_s + hook_s

    def _inside(self, action: Action) -> bool:
        """Whether an action needs no launch: it is in an iteration's graph, or in a layer's CUDA
        graph or compiled region but not first in it. A layer's graph has its kernels and the
        collectives between them, but no reduction or copy of gradients; a region has only
        kernels."""
        if self._iterates:
            return action.kind is not Kind.OPTIMIZER
        if not self._begins or action.part.letter != "L":
            return False
        eager = self._eager[action.variant % len(self._eager)]
        graphs = self._graphs and action.op not in eager
        comm = action.exchange.comm
        if comm is not None:
            return graphs and comm.stream in ("tp", "cp")
        if action.kind not in DIRECTION:
            return graphs and action.kind not in (Kind.D2H, Kind.H2D)
        first = self._begins[action.variant % len(self._begins)].get(action.kind, frozenset())
        return action.op not in first or (graphs and action.rows.offset > 0)

    def held(self, action: Action) -> bool:
        """Whether the host waits for the action: for a message to arrive, if the stack's messages
        are synchronous; for a copy of activations to end, if the stack's copies block; for the
        counts of experts' tokens; or for any action to end, if launches block."""
        if self._blocks and action.kind not in (Kind.EVENT, Kind.STALL):
            return True
        if self._iterates:
            return False
        if action.op == COUNTS:
            return action.exchange.comm is not None or self._counts_alone
        if action.kind in (Kind.D2H, Kind.H2D):
            return self.problem.system.host.blocking_copies and action.op not in STATE_COPIES
        return self._waits_for_messages and action.wait is not None and bool(action.wait.message)

    def alike(self, rank: int) -> Hashable:
        """Return a key that is equal for ranks with equal costs, which have the same kinds of links
        in their groups and to other stages."""
        cost, pp = self.cost, self.problem.layout.pp
        other = sum(self.problem.embedding_ranks or (0, pp - 1)) - rank
        peers = [peer % pp for peer in (rank + 1, rank - 1, other)]
        groups = tuple(cost.group(group, rank) for group in self._groups)
        sends = tuple((cost.crosses(rank, peer), cost.group("tp", peer)) for peer in peers)
        return (groups, sends)

    def _kernels_s(self, action: Action, rank: int) -> float:
        overlaps, rows = action.exchange.overlaps, action.rows
        where = (action.part.letter, action.variant, action.op, rank if overlaps else -1)
        key = (action.kind, *where, overlaps, rows.fraction * rows.columns, rows.fraction)
        if key not in self._kernels:
            self._kernels[key] = self._compute_s(action, rank)
        return self._kernels[key]

    def _compute_s(self, action: Action, rank: int) -> float:
        op, rows, overlaps = self._op(action, rank), action.rows, action.exchange.overlaps
        seconds = self.cost.op_s(op, DIRECTION[action.kind], rows.fraction * rows.columns)
        seconds *= 1.0 + self.crowd.kernel_delay_share
        if not overlaps:
            return seconds
        comms = _overlapping(op, action.kind)
        other_s = fsum(self.cost.comm_s(comm, rank) for comm in comms if comm is not None)
        return self.cost.overlapped_s(seconds, other_s * rows.fraction, overlaps)

    def _stall_s(self, action: Action, rank: int) -> float:
        """Seconds by which a collective slows compute: all kernels that run during it, or the
        kernel that was moved into its window."""
        comm, rows = action.exchange.comm, action.rows
        assert comm is not None
        if action.op == STALL:
            return self.cost.stall_s(comm, rank)
        share = rows.fraction * rows.columns
        kernel_s = self.cost.op_s(self._op(action, rank), "forward", share)
        return self.cost.stall_s(comm, rank, kernel_s)

    def _exposed(self, action: Action, rank: int) -> float:
        """The share of an exchange's seconds that the overlapping pass does not hide."""
        key = (action.variant, rank)
        if key not in self._shares:
            table = self.problem.layer_kinds[action.variant]
            self._shares[key] = exposed_shares(self.problem, table, rank, self.cost.comm_s)
        found = self._shares[key][action.op]
        return found.forward if action.exchange.beside == "backward" else found.backward

    def _op(self, action: Action, rank: int) -> Op:
        part = action.part.letter
        key = (part, action.variant, action.op)
        if key not in self._ops:
            self._ops[key] = table_of(self.problem, self._slices, action).op(action.op)
        return self._ops[key]

    def _send_s(self, action: Action, rank: int) -> float:
        pp, ends = self.problem.layout.pp, self.problem.embedding_ranks or (0, 0)
        if action.op != "tied" and action.op[0] in OF_VOCABULARY:
            other = int(action.op[1:])
            return self.cost.p2p_s(action.nbytes, rank, other) if action.nbytes else 0.0
        word = action.op.partition("%")[0]
        peer = sum(ends) - rank if word == "tied" else rank + STEP[word]
        if peer == rank:  # The rank's other chunk receives the message.
            return 0.0
        shared = action.op != "tied" and not self.problem.layout.sp
        return self.cost.p2p_s(action.nbytes, rank, peer % pp, replicated=shared)

    def _copy_s(self, action: Action, _: int) -> float:
        """Seconds of a copy. Before the host sends weights that it has updated, it casts them.
        States of a visit share the link with states on their way back, if visits overlap."""
        direction: CopyDirection = "d2h" if action.kind is Kind.D2H else "h2d"
        visits = action.op in (STATES_UP, STATES_DOWN)
        crowd = self.pieces.traffic if visits else self.crowd
        seconds = self.cost.copy_s(action.nbytes, direction, crowd)
        if action.op == WEIGHTS_UP:
            count = action.nbytes // self.problem.system.states.param_bytes
            seconds += self.cost.host_cast_s(count)
        return seconds

    def _device_copy_s(self, action: Action, _: int) -> float:
        return self.cost.device_copy_s(action.nbytes)

    def _optimizer_s(self, action: Action, rank: int) -> float:
        """Seconds of an update on the device or the host, and of quantising weights after it
        (deviation: these are the weights of the layers that the base plan gives to the rank). The
        action's `nbytes` are the bytes of the updated parameters in compute precision."""
        count = action.nbytes // self.problem.system.states.param_bytes
        if action.stream != HOST_UPDATE:
            held = quantised_weights(self.problem, self.problem.base_plan, rank)
            return self.cost.optimizer_s(count) + self.cost.quantise_s(0 if action.part else held)
        if not self.pieces.beside:
            return self.cost.host_update_s(count)
        return self.cost.host_update_beside_s(count, self.pieces.visiting_bytes)


_OTHERS = {
    Kind.D2H: ActionCosts._copy_s,
    Kind.H2D: ActionCosts._copy_s,
    Kind.SPLIT: ActionCosts._device_copy_s,
    Kind.JOIN: ActionCosts._device_copy_s,
    Kind.SEND: ActionCosts._send_s,
    Kind.OPTIMIZER: ActionCosts._optimizer_s,
}


Begins = dict[Kind, frozenset[str]]
"""For each kind of action, the operators of a layer whose action has a launch."""


def table_of(problem: Problem, slices: tuple[int, ...], action: Action) -> OpTable:
    number, variant = divmod(action.variant, len(problem.layer_kinds))
    if len(slices) > 1:
        problem = slice_problems(problem, slices)[number]
    match action.part.letter:
        case "E":
            return problem.embedding
        case "H":
            return problem.head
        case "V":
            return problem.shared.share
    return problem.layer_kinds[variant]


def _graph_begins(table: OpTable, eager: frozenset[str]) -> Begins:
    """The operators that have a launch in a layer with CUDA graphs: the first of each graph (the
    first operator with a forward, the last with an input gradient), and all outside graphs."""
    inside = [op for op in table.ops if op.name not in eager]
    forward = {op.name for op in [one for one in inside if one.forward][:1]}
    backward = {op.name for op in [one for one in inside if one.backward_input][-1:]}
    apart = dict.fromkeys((Kind.RECOMPUTE, Kind.BACKWARD_WEIGHT), eager) if eager else {}
    return {Kind.FORWARD: eager | forward, Kind.BACKWARD_INPUT: eager | backward, **apart}


def _region_begins(table: OpTable) -> Begins:
    """The first operator of each compiled region of a layer. A region ends at a collective or the
    layer's end."""
    forward, backward = set(), set()
    broken = True
    for op in table.ops:
        broken = broken or op.gather is not None
        if op.forward:
            forward |= {op.name} if broken else set()
            broken = op.reduce is not None
    broken = True
    for op in reversed(table.ops):
        broken = broken or op.grad_gather is not None or op.regather is not None
        if op.backward_input:
            backward |= {op.name} if broken else set()
            broken = op.grad_reduce is not None
    again = frozenset(forward)
    return {Kind.FORWARD: again, Kind.RECOMPUTE: again, Kind.BACKWARD_INPUT: frozenset(backward)}


def _overlapping(op: Op, kind: Kind) -> tuple[Comm | None, ...]:
    match kind:
        case Kind.BACKWARD_INPUT:
            return (op.grad_gather, op.regather)
        case Kind.BACKWARD_WEIGHT:
            return (op.grad_reduce,)
    return (op.gather, op.reduce)


def action_seconds(problem: Problem, program: Program | None = None) -> RankedSeconds:
    """Return the costs of a problem's actions, slowed by the copies and messages of a program."""
    return ActionCosts(problem, program)
