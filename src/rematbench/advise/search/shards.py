"""A shard: layouts that divide a layer's tensors alike, with the costs that no plan changes there
(messages, a step's end, states, room) and the probes of its candidates."""

from collections.abc import Callable, Sequence
from dataclasses import replace as replaced
from functools import cached_property, partial
from itertools import accumulate, pairwise
from math import fsum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.search.candidates import Candidate
from rematbench.advise.search.closed_bounds import (
    AS_PROBED,
    ROUNDING_BYTES,
    Wider,
    host_bound,
    step_bound,
)
from rematbench.advise.search.pass_costs import (
    Facts,
    Line,
    More,
    layer_cost,
    lesser,
    mixed,
    no_cost,
    wider,
)
from rematbench.advise.search.probe_problems import ProbePrograms
from rematbench.advise.search.probes import Probe, Prober, Refused, Reply
from rematbench.advise.search.schedule_bound import (
    Frame,
    after_passes,
    host_update_s,
    placed_update_s,
    sent_bytes,
)
from rematbench.advise.search.space import (
    Array,
    Choice,
    Columns,
    first_dense,
    least_parameters,
)
from rematbench.advise.search.trials import Site, states_at
from rematbench.engine.lowering.states.state_shards import rank_sharded
from rematbench.evaluate.evaluator import Evaluator
from rematbench.inputs.layout import Layout
from rematbench.plan import Place, Plan
from rematbench.plugins.registry import Composition, MethodError, Registry
from rematbench.problem import Problem


class Key(NamedTuple):
    """The facts that the layouts of one shard share.  `zero`: (stage, dp) of ZeRO 2 and 3 without a
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
    zero: tuple[int, int]


def key(choice: Choice) -> Key:
    """The key of a choice's shard."""
    lay = choice.layout
    zero = (lay.zero_stage, lay.dp) if lay.zero_stage > 1 and lay.pp == 1 else (0, 0)
    alike = (lay.tp, lay.sp, lay.cp, lay.ulysses, lay.micro_batch, lay.ep, lay.expert_tp)
    return Key(*alike, lay.pp == 1, choice.hosted, choice.states, zero)


NO_PLAN_COUNT = 1 << 40
"""Parameters whose states fit no device."""

Number = TypeVar("Number", np.float64, np.bool_)


class Shard:
    """All layouts that divide a layer's tensors and the micro-batches alike, with the probes of the
    candidates of a registry. `problem` has one of the layouts. `evaluator`: keeps lowered plans for
    searches on other clusters (None: there are none). `programs`: programs of probes, which shards
    share. `reserving`: gives a problem the reserve of its layout (None: the reserve of
    `problem`)."""

    def __init__(
        self,
        choices: Sequence[Choice],
        problem: Problem,
        registry: Registry,
        *,
        evaluator: Evaluator | None = None,
        programs: ProbePrograms | None = None,
        reserving: Callable[[Problem], Problem] | None = None,
    ) -> None:
        self.choices, self.problem, self.registry = choices, problem, registry
        self._evaluator, self._reserving = evaluator, reserving or _same
        self.prober = Prober(problem, {} if programs is None else programs)
        self._ends_s: dict[tuple[int, int, int, int], float] = {}
        self._sites: dict[int, Site] = {}
        self._probes: dict[str, Probe | Refused] = {}
        self._floors: dict[str, Facts | Refused] = {}

    def _at(self, layout: Layout) -> Problem:
        """The problem at one of the layouts, without its reserve."""
        return replaced(self.problem, layout=layout, _memo={}, _weights={})

    @cached_property
    def columns(self) -> Columns:
        """The numbers of the layouts that bounds need."""
        if not self.choices[0].states:
            return Columns(self.choices, self.problem)
        ranks = [(own[0], own[min(1, len(own) - 1)], own[-1]) for own in self.placed]
        resident = [[rank.get("device", 0) for rank in own] for own in ranks]
        return Columns(self.choices, self.problem, np.array(resident, dtype=float).T)

    @cached_property
    def placed(self) -> list[list[dict[Place, int]]]:
        """Of each layout, the parameters of each rank's optimizer by the place of their states.
        All are on the device where the method has no plan, and too many to fit."""
        found = []
        for choice in self.choices:
            problem = self._at(choice.layout)
            plan, ranks = states_at(choice, problem, self.registry), range(choice.layout.pp)
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
        begun = self.columns.first - first_dense(self.problem.workload.model)
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
            problem = self._at(layout)
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
                known[lay.pp, lay.dp, lay.vpp] = sent_bytes(self._at(lay))
        return np.array([known[c.layout.pp, c.layout.dp, c.layout.vpp] for c in self.choices])

    @cached_property
    def usable_bytes(self) -> NDArray[np.int64]:
        """Device bytes that each layout may reserve: without its communicators and the reserve."""
        known: dict[tuple[int, int], int] = {}
        for lay in (choice.layout for choice in self.choices):
            if (lay.pp, lay.dp) not in known:
                at = self._reserving(replaced(self.problem, layout=lay))
                known[lay.pp, lay.dp] = at.usable_bytes - at.reserve_bytes
        return np.array([known[choice.layout.pp, choice.layout.dp] for choice in self.choices])

    def site(self, index: int) -> Site:
        """Return the Site of the layout at `index`, which all searches share."""
        if index not in self._sites:
            choice = self.choices[index]
            problem = self._reserving(self._at(choice.layout))
            self._sites[index] = Site(choice, problem, self._evaluator)
        return self._sites[index]

    def frame(self, index: int) -> Frame:
        """The Frame of the layout at `index`."""
        return self.site(index).frame(self.registry)

    @cached_property
    def kernels_s(self) -> Array:
        """A first lower bound, in seconds, for the candidate that keeps everything, from operator
        tables."""
        kinds = [layer_cost(self.problem, table) for table in self.problem.layer_kinds]
        layer = min(kinds, key=lambda cost: cost.forward.compute_s + cost.backward.compute_s)
        line = Line(0, no_cost(), layer)
        facts = Facts(line, line, line)
        return step_bound(self.columns, facts, 0 * self.send_s, more=self.wider)

    @cached_property
    def _wider(self) -> tuple[More, ...]:
        """By which the passes of each of the model's layers are longer than a probe's."""
        return wider(self.problem)

    def wider_at(self, index: int) -> list[More]:
        """By which the passes of each virtual stage of the layout at `index` are longer than by the
        lines of probes; empty where they are not, or where gathers of parameters may hide it."""
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
        """`wider_at` of each layout, by rank."""
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
        """Whether the states of any layout fit."""
        return bool((self.states_over_bytes <= 0).any())

    def probe(self, candidate: Candidate, pieces: int = 1) -> Probe | Refused:
        """A candidate's Probe; for a candidate with a share, at the last step of the share."""
        text = _at_end(candidate, pieces)
        if text not in self._probes:
            self._probes[text] = self._resolved(text, self.prober)
        return self._probes[text]

    def floors(self, candidate: Candidate) -> tuple[Facts, Facts] | Refused:
        """The floors at both ends of a candidate's share; two equal ones for a candidate without a
        share."""
        return _both_ends(candidate, self._floor)

    def _floor(self, candidate: Candidate) -> Facts | Refused:
        text = _at_end(candidate, 1)
        if text not in self._floors:
            self._floors[text] = self._resolved(text, self.prober.floor)
        return self._floors[text]

    def _resolved(
        self, text: str, ask: Callable[[Composition], Reply | Refused]
    ) -> Reply | Refused:
        try:
            return ask(self.registry.resolve(text, None, self.problem))
        except MethodError as error:
            return Refused(str(error))

    def steps(self, candidate: Candidate) -> int:
        """The number of steps of a candidate's share; 1 for a candidate without a share."""
        if candidate.share is None or candidate.share.scalar is None:
            return 1
        return candidate.share.scalar.steps or int(self.columns.most.max())

    def stored(
        self, candidate: Candidate, ends: tuple[Facts, Facts]
    ) -> tuple[Facts, NDArray[np.float64]]:
        """Along a candidate's share: its facts, at the shares of the shortest chunks, and the
        fewest host bytes of a node, [steps of the share, layouts]. `ends`: the facts at both ends
        of the share."""
        longest, shortest = self.shares(candidate)
        quick = self.at_share(candidate, ends, longest)
        host_bytes = host_bound(self.columns, quick)
        lean = quick if shortest is longest else self.at_share(candidate, ends, shortest)
        rounding = self.rounding_bytes(candidate) * self.columns.gpus_per_node
        return lean, self.wide(candidate, host_bytes - rounding)

    def wide(self, candidate: Candidate, values: NDArray[Number]) -> NDArray[Number]:
        """Broadcast `values` to [steps of a candidate's share, layouts]."""
        return np.broadcast_to(values, (self.steps(candidate), len(self.choices)))

    def rounding_bytes(self, candidate: Candidate) -> Any:
        """Bytes by which shares and pieces may fall below their lines, because they are whole
        rows."""
        cut = candidate.share or candidate.pieces
        return 2 * ROUNDING_BYTES * self.columns.in_flight[0] if cut else 0

    def at_share(self, candidate: Candidate, ends: tuple[Facts, Facts], share: Any) -> Facts:
        """Return the facts of a candidate at one value (`share`) of its share."""
        if candidate.share is None:
            return ends[1]
        found = mixed(*ends, share)
        scalar = candidate.share.scalar
        if first_dense(self.problem.workload.model) and scalar and scalar.scale == "layers":
            # The first chunk's layers are not alike: neither end's numbers are the share's.  It is
            # no shorter than its probe, since such a share composes with nothing (`first_dense`).
            return found._replace(first=lesser(ends[0].first, ends[1].first))
        return found

    def shares(self, candidate: Candidate) -> tuple[Array, Array]:
        """Shares of the longest and of the shortest chunk, [steps of the candidate's share,
        layouts]; one column if all layouts have equal shares."""
        steps = np.arange(1.0, self.steps(candidate) + 1)[:, None]
        scalar = candidate.share.scalar if candidate.share else None
        if scalar is None or scalar.scale == "share":
            equal = steps / len(steps)
            return equal, equal
        columns = self.columns
        return np.minimum(1.0, steps / columns.most), np.minimum(1.0, steps / columns.fewest)

    def ends(self, candidate: Candidate, pieces: int) -> tuple[Probe, Probe] | Refused:
        """The probes at both ends of a candidate's share; two equal ones for a candidate without a
        share."""
        return _both_ends(candidate, partial(self.probe, pieces=pieces))


def _same(problem: Problem) -> Problem:
    return problem


def _both_ends(
    candidate: Candidate, ask: Callable[[Candidate], Reply | Refused]
) -> tuple[Reply, Reply] | Refused:
    """What `ask` returns at both ends of a candidate's share; two equal values for a candidate
    without a share."""
    one = ask(candidate)
    zero = one if candidate.share is None else ask(candidate.without(candidate.share))
    if isinstance(one, Refused):
        return one
    return zero if isinstance(zero, Refused) else (zero, one)


def _at_end(candidate: Candidate, pieces: int) -> str:
    """The text of a candidate in a number of pieces, at the last step of its share."""
    line = candidate.share.scalar if candidate.share else None
    return candidate.text(line.steps or 1 << 20 if line else 0, pieces)
