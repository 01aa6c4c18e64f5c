"""Groups of layouts that split a layer's tensors in the same way, and their costs that do not
depend on the plan: messages, the end of a step, states, free bytes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import fsum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.bounds.columns import AS_PROBED, Array, Columns, Wider, least_parameters
from rematbench.advise.bounds.lines import ChunkCost, More, compute_cost
from rematbench.advise.bounds.small_problems import placed_alike
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.costs.bind import CostModel
from rematbench.costs.operators.launches import COUNTS
from rematbench.costs.operators.ops import Comm, OpTable
from rematbench.costs.states import non_torch_bytes
from rematbench.engine.lowering.states.emit_states import gradient_reductions, parameter_gathers
from rematbench.engine.lowering.states.state_shards import has_whole_gradients, rank_sharded
from rematbench.engine.simulate.beside import Exposed, exposed_shares, op_seconds
from rematbench.inputs.layout import Layout
from rematbench.plan import Place, Plan, state_fates
from rematbench.plugins.registry import Registry
from rematbench.problem import Problem


class GroupKey(NamedTuple):
    """The facts that the layouts of one group share.  `zero`: (stage, dp) of ZeRO 2 and 3 without a
    pipeline, whose passes gather or reduce among data-parallel ranks; (0, 0) of other layouts."""

    tp: int
    sp: bool
    cp: int
    ulysses: int
    micro_batch: int
    ep: int
    etp: int
    single: bool
    hosted: bool
    states: str
    exchange: tuple[str | None, bool]
    zero: tuple[int, int]

    @property
    def plain(self) -> "GroupKey":
        """The key of the group with the stack's exchange and places of states."""
        return self._replace(exchange=(None, False), hosted=False, states="")


def group_key(choice: LayoutChoice) -> GroupKey:
    lay = choice.layout
    zero = (lay.zero_stage, lay.dp) if lay.zero_stage > 1 and lay.pp == 1 else (0, 0)
    alike = (lay.tp, lay.sp, lay.cp, lay.ulysses, lay.micro_batch, lay.ep, lay.expert_tp)
    exchange = (choice.dispatcher, choice.overlaps)
    return GroupKey(*alike, lay.pp == 1, choice.hosted, choice.states, exchange, zero)


NO_PLAN_COUNT = 1 << 40
"""A number of parameters whose states fit on no device."""


class LayoutGroup:
    """Layouts that split a layer's tensors and micro-batches in the same way.  `problem` has one of
    these layouts.  `reserving` sets the reserve of a problem for its layout (None: keep that of
    `problem`)."""

    def __init__(
        self,
        choices: Sequence[LayoutChoice],
        problem: Problem,
        registry: Registry,
        reserving: Callable[[Problem], Problem] | None = None,
    ) -> None:
        self.choices, self.problem, self.registry = choices, problem, registry
        self.reserving = reserving or (lambda problem: problem)
        self._ends_s: dict[tuple[int, int, int, int], float] = {}

    def at(self, layout: Layout) -> Problem:
        """The problem at one of the layouts, without its reserve."""
        return self.problem.remade(layout=layout)

    @cached_property
    def columns(self) -> Columns:
        layouts = [choice.layout for choice in self.choices]
        sizes = [choice.sizes for choice in self.choices]
        if not self.choices[0].states:
            return Columns(layouts, sizes, self.problem)
        ranks = [(own[0], own[min(1, len(own) - 1)], own[-1]) for own in self.placed]
        resident = [[rank.get("device", 0) for rank in own] for own in ranks]
        return Columns(layouts, sizes, self.problem, np.array(resident, dtype=float).T)

    @cached_property
    def placed(self) -> list[list[dict[Place, int]]]:
        """For each layout and rank, the numbers of updated parameters by the place of their states.
        Without a plan of the method, a number that is too large to fit."""
        found = []
        for choice in self.choices:
            problem = self.at(choice.layout)
            plan, ranks = choice.keeping(problem, self.registry), range(choice.layout.pp)
            if isinstance(plan, Plan):
                fate = plan.state("optimizer")
                own = [fate.counts(rank_sharded(problem, plan, rank, fate)) for rank in ranks]
            else:
                own = [{"device": NO_PLAN_COUNT} for _ in ranks]
            found.append(own)
        return found

    @cached_property
    def send_s(self) -> Array:
        """Seconds of a message between neighbouring stages, on the fastest link of any layout."""
        cost, lay = self.problem.cost, self.problem.layout
        nbytes = self.problem.layer_kinds[0].activations["layer_input"].nbytes
        nbytes = nbytes if lay.sp or lay.tp == 1 else nbytes // lay.tp
        rate = max(cost.nvlink_bytes_per_s, cost.nic_bytes_per_s)
        seconds = nbytes / rate * self.problem.system.scales.communication
        return np.full(len(self.choices), seconds)

    @cached_property
    def end_s(self) -> Array:
        """Lower bound of the seconds after a rank's last pass: one gradient reduction and one
        parameter gather, if nothing hides them, and the update of states in host memory."""
        _, layer, own = least_parameters(self.problem, trained=True)
        begun = self.columns.first - self.problem.workload.model.first_dense
        layers = np.minimum(begun, self.columns.last)
        found = [
            self._end_s(c.layout, int(n * (layer + own)), int(n * own))
            for c, n in zip(self.choices, layers, strict=True)
        ]
        if self.choices[0].states:
            cost = self.problem.cost
            placed_s = [min(placed_update_s(cost, rank) for rank in own) for own in self.placed]
            return np.array(found) + placed_s
        return np.array(found)

    def _end_s(self, layout: Layout, count: int, experts: int) -> float:
        key = (layout.dp, layout.pp, layout.zero_stage, count)
        if key not in self._ends_s:
            problem = self.at(layout)
            comms = after_passes(problem, count, experts)
            comms_s = (problem.cost.comm_s(comm, 0) for comm in comms)
            self._ends_s[key] = fsum((*comms_s, host_update_s(problem, count)))
        return self._ends_s[key]

    @cached_property
    def sent_bytes(self) -> Array:
        """Bytes of each layout's messages to other nodes in a micro-batch."""
        known: dict[tuple[int, int, int], float] = {}
        for lay in (choice.layout for choice in self.choices):
            if (lay.pp, lay.dp, lay.vpp) not in known:
                known[lay.pp, lay.dp, lay.vpp] = sent_bytes(self.at(lay))
        return np.array([known[c.layout.pp, c.layout.dp, c.layout.vpp] for c in self.choices])

    @cached_property
    def usable_bytes(self) -> NDArray[np.int64]:
        """Device bytes that torch may reserve, [layouts]: the device's, without the bytes of the
        driver, the communicators and the reserve."""
        known: dict[tuple[int, int], int] = {}
        at, reserve_bytes = self.problem, self.reserving(self.problem).reserve_bytes
        for lay in (choice.layout for choice in self.choices):
            if (lay.pp, lay.dp) not in known:
                beside = non_torch_bytes(at.cluster, lay, at.system, at.calibration)
                known[lay.pp, lay.dp] = at.cluster.hbm_bytes - beside - reserve_bytes
        return np.array([known[choice.layout.pp, choice.layout.dp] for choice in self.choices])

    @cached_property
    def _wider(self) -> tuple[More, ...]:
        """The seconds by which each layer's passes are longer than those of a probe's layers."""
        return wider(self.problem)

    def wider_at(self, index: int) -> list[More]:
        """The seconds by which the passes of each virtual stage of the layout at `index` exceed the
        lines of probes; empty if they do not, or if gathers of parameters may hide the excess."""
        choice, own = self.choices[index], self._wider
        if not own or choice.layout.zero_stage > 1:
            return []
        ends = [0, *accumulate(choice.sizes)]
        return [
            More._make(map(fsum, zip(*own[begin:end], strict=True)))
            for begin, end in pairwise(ends)
        ]

    @cached_property
    def wider(self) -> Wider:
        """The seconds of `wider_at`, summed over the chunks of each layout's first, busiest inner
        and last rank."""
        if not self._wider:
            return AS_PROBED
        found = []
        for index, choice in enumerate(self.choices):
            pp, stages = choice.layout.pp, self.wider_at(index)
            each = [fsum(map(fsum, stages[rank::pp])) for rank in range(pp)]
            found.append((each[0], each[int(self.columns.inner_rank[index])], each[-1]))
        return Wider._make(np.array(column) for column in zip(*found, strict=True))

    @cached_property
    def states_over_bytes(self) -> Array:
        """Bytes by which the states of the fullest device exceed what the device may hold."""
        return np.asarray(np.maximum.reduce(self.columns.state_bytes) - self.usable_bytes)

    @property
    def has_room(self) -> bool:
        return bool((self.states_over_bytes <= 0).any())


def after_passes(problem: Problem, count: int, experts: int = 0) -> list[Comm]:
    """The collectives of `count` parameters, `experts` of which belong to experts, that run after
    the last pass and are not hidden."""
    lay, system = problem.layout, problem.system
    fates = {fate.kind: fate for fate in state_fates(lay, system)}
    if not lay.has_peers:
        return []
    found: list[Comm] = []
    sums = fates["gradient"].release == "step"
    whole = has_whole_gradients(fates["gradient"], lay)
    if sums or (not system.zero.reduce_overlap and not whole):
        width, shards = system.states.reduce_bytes, fates["optimizer"].shards
        found += gradient_reductions(lay, shards, 1, width * count, width * experts)
    if not system.zero.gather_overlap and fates["parameter"].gather == "step":
        found += parameter_gathers(lay, system, count, experts)
    return found


def host_update_s(problem: Problem, count: int) -> float:
    """Seconds of a rank's share of the optimizer update on the host; 0 for states on the device."""
    fate = problem.base_plan.state("optimizer")
    return problem.cost.host_update_s(count // fate.shards) if fate.home == "host" else 0.0


def placed_update_s(cost: CostModel, counts: Mapping[Place, int]) -> float:
    """Lower bound, in seconds, of the update of states in pieces with `counts` parameters of a rank
    at each place: of the host's updates, or of the copies of visits."""
    hosted, visiting = counts.get("host", 0), counts.get("visit", 0)
    alone_s, beside_s = cost.host_update_s(hosted), cost.host_update_beside_s(hosted, 0.0)
    nbytes = cost.system.states.optimizer_bytes * visiting
    return max(min(alone_s, beside_s), cost.copy_s(nbytes, "h2d") if nbytes else 0.0)


def sent_bytes(problem: Problem) -> float:
    """Bytes of a micro-batch's messages to other nodes, counted for one GPU of each rank: forwards
    send to the next rank, backwards to the previous one."""
    lay, crosses = problem.layout, problem.cost.crosses
    nbytes = problem.layer_kinds[0].activations["layer_input"].nbytes
    inner = sum(crosses(rank, rank + 1) for rank in range(lay.pp - 1))
    around = crosses(lay.pp - 1, 0) * (lay.vpp - 1)
    return 2 * (lay.vpp * inner + around) * (nbytes if lay.sp else nbytes / lay.tp)


EXCHANGING = frozenset(("permute", "dispatch", "sort", "unsort", "combine", "unpermute", COUNTS))
"""The operators of experts of which a dispatcher decides the bytes or the launches."""


def layer_cost(
    problem: Problem, table: OpTable, without: Collection[str] = frozenset()
) -> ChunkCost:
    """Seconds of a layer's kernels and of the collectives for which compute waits, `without` some
    operators."""
    comm_s = problem.cost.comm_s if placed_alike(problem) else lambda comm, stage: 0.0
    shares = exposed_shares(problem, table, 0, comm_s) if problem.ep_overlaps else {}
    forward, backward = [], []
    for op in table.ops:
        if op.name in without:
            continue
        found, left = op_seconds(problem, op, 0, comm_s), shares.get(op.name, WHOLE)
        forward.append(found.forward_s * left.forward)
        backward.append((found.inputs_s + found.weights_s) * left.backward)
    return compute_cost(fsum(forward), fsum(backward))


def wider(problem: Problem) -> tuple[More, ...]:
    """The seconds by which each layer's passes exceed those of probes, whose layers have the
    narrowest attention window.  They hold for all plans whose compute waits for nothing else in
    that time, because every pass runs attention whole."""
    model = problem.workload.model
    windows = [window or problem.workload.seq_len for window in model.attention_window]
    if len(set(windows)) < 2 or 0 < model.expert_layers < model.num_layers:
        return ()
    kinds = [layer_cost(problem, table) for table in problem.layer_kinds]
    least = kinds[problem.variant(windows.index(min(windows)))]
    own = [kinds[problem.variant(layer)] for layer in range(model.num_layers)]
    return tuple(
        More(
            max(0.0, one.forward.compute_s - least.forward.compute_s),
            max(0.0, one.backward.compute_s - least.backward.compute_s),
        )
        for one in own
    )


WHOLE = Exposed(1.0, 1.0)
"""The exposed shares of operators that do not overlap with another micro-batch."""
