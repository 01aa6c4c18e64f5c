"""Lower bounds of seconds and bytes for the layouts of a group, under any candidate of a search."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import inf
from typing import Any, TypeVar
from weakref import proxy

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.bounds.closed_bounds import (
    ROUNDING_BYTES,
    Total,
    Waiting,
    host_bound,
    peak_bound,
    step_bound,
)
from rematbench.advise.bounds.columns import AS_PROBED, Array, Bounds, Short
from rematbench.advise.bounds.layout_group import EXCHANGING, LayoutGroup, layer_cost
from rematbench.advise.bounds.lines import (
    Facts,
    Line,
    More,
    Probe,
    Refused,
    Reply,
    chord,
    height,
    in_pieces,
    lengthened,
    lesser,
    mixed,
    no_cost,
    only_kept,
    with_head,
)
from rematbench.advise.bounds.probes import ProbePrograms, Prober
from rematbench.advise.bounds.schedule_bound import (
    Frame,
    frame,
    hidden,
    lowest_traffic,
    schedule_bound_s,
    stages,
)
from rematbench.advise.candidates.candidate import KEEP, Candidate
from rematbench.advise.candidates.layouts import LayoutChoice
from rematbench.advise.candidates.trials import LayoutTrials
from rematbench.costs.copies import NO_TRAFFIC
from rematbench.evaluate.evaluator import Evaluator
from rematbench.evaluate.result import PlannedJob
from rematbench.plan import Plan
from rematbench.plugins.registry import Composition, MethodError, Registry
from rematbench.problem import Problem

LINEAR = 0.9999
"""The factor on bounds by the schedule, because seconds of a chunk are not exactly linear in its
layers: the first kernel of a kind may wait for its launch."""
SHARED = 0.998
"""The factor for candidates with a share or pieces, because tensors are split at whole rows."""


def _falls(device: Array, host: Array) -> list[tuple[float, bool] | None]:
    """The `falls` of a Short.  A layout lacks host bytes if no step has room in host memory;
    otherwise it lacks the fewest device bytes of the steps with such room."""
    lacked = np.where(host > 0, inf, device).min(axis=0)
    found: list[tuple[float, bool] | None] = []
    for nbytes, host_bytes in zip(lacked.tolist(), host.min(axis=0).tolist(), strict=True):
        if nbytes <= 0:
            found.append(None)
        else:
            found.append((host_bytes, True) if nbytes == inf else (nbytes, False))
    return found


Number = TypeVar("Number", np.float64, np.bool_)


class GroupBounds(LayoutGroup):
    """Lower bounds for each layout of a group and each candidate of its registry, from probes, and
    the trials of its layouts. `evaluator`: keeps lowered plans for searches on other clusters
    (None: no such search follows). `programs`: programs of probes, which groups share."""

    def __init__(
        self,
        choices: Sequence[LayoutChoice],
        problem: Problem,
        registry: Registry,
        reserving: Callable[[Problem], Problem] | None = None,
        *,
        evaluator: Evaluator | None = None,
        programs: ProbePrograms | None = None,
    ) -> None:
        super().__init__(choices, problem, registry, reserving)
        self._evaluator = evaluator
        self.prober = Prober(problem, {} if programs is None else programs)
        self._trials: dict[int, LayoutTrials] = {}
        self._frames: dict[int, Frame] = {}
        self._probes: dict[str, Probe | Refused] = {}
        self._floors: dict[str, Facts | Refused] = {}
        self._shorts: dict[Candidate, Short | None] = {}
        self._leasts: dict[Candidate | None, Array] = {}
        self._bounds: dict[tuple[Candidate, int], Bounds | Refused] = {}
        self._tight_s: dict[tuple[int, str], float] = {}

    @property
    def probed_layers(self) -> int:
        """The number of layers that probes have lowered so far."""
        return self.prober.layers

    def trials_at(self, index: int) -> LayoutTrials:
        """The trials of the layout at `index`, which all searches share."""
        if index not in self._trials:
            choice = self.choices[index]
            problem = self.reserving(self.at(choice.layout))
            job = PlannedJob(problem=problem, base=choice.base(problem.base_plan))
            self._trials[index] = LayoutTrials(job, choice.states, self._evaluator)
        return self._trials[index]

    def frame(self, index: int) -> Frame:
        """The part of the step of the layout at `index` that no activation method changes."""
        if index not in self._frames:
            there = self.trials_at(index)
            base = self.choices[index].keeping(there.problem, self.registry)
            plan = base if isinstance(base, Plan) else there.job.base
            self._frames[index] = frame(there.problem, plan)
        return self._frames[index]

    def probe(self, candidate: Candidate, pieces: int = 1) -> Probe | Refused:
        """A candidate's Probe; for a candidate with a share, at the last step of the share."""
        return self._asked(self._probes, _at_end(candidate, pieces), self.prober)

    def floors(self, candidate: Candidate) -> tuple[Facts, Facts] | Refused:
        """The lines of stored bytes (`Prober.floor`) at both ends of a candidate's share; two equal
        ones for a candidate without a share."""
        return _both_ends(candidate, self._floor)

    def _floor(self, candidate: Candidate) -> Facts | Refused:
        return self._asked(self._floors, _at_end(candidate, 1), self.prober.floor)

    def _asked(
        self,
        known: dict[str, Reply | Refused],
        text: str,
        ask: Callable[[Composition], Reply | Refused],
    ) -> Reply | Refused:
        """The reply of `ask` for the method `text`, which is computed once."""
        if text not in known:
            try:
                known[text] = ask(self.registry.resolve(text, None, self.problem))
            except MethodError as error:
                known[text] = Refused(str(error))
        return known[text]

    def steps(self, candidate: Candidate) -> int:
        """The number of steps of a candidate's share; 1 for a candidate without a share."""
        if candidate.share is None or candidate.share.scalar is None:
            return 1
        return candidate.share.scalar.steps or int(self.columns.most.max())

    def stored(
        self, candidate: Candidate, ends: tuple[Facts, Facts]
    ) -> tuple[Facts, NDArray[np.float64]]:
        """A candidate's facts at the shares of the shortest chunks, and the fewest host bytes of a
        node, [steps of the share, layouts]. `ends`: the facts at both ends of the share."""
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
        """Bytes by which a plan may lie below the candidate's lines, because shares and pieces are
        rounded to whole rows."""
        cut = candidate.share or candidate.pieces
        return 2 * ROUNDING_BYTES * self.columns.in_flight[0] if cut else 0

    def at_share(self, candidate: Candidate, ends: tuple[Facts, Facts], share: Any) -> Facts:
        """Return the facts of a candidate at one value (`share`) of its share."""
        if candidate.share is None:
            return ends[1]
        found = mixed(*ends, share)
        scalar = candidate.share.scalar
        if self.problem.workload.model.first_dense and scalar and scalar.scale == "layers":
            # The first chunk's layers differ, so its numbers do not lie on the line between both
            # ends.  It is no shorter than its probe, because such a share composes with nothing.
            return found._replace(first=lesser(ends[0].first, ends[1].first))
        return found

    def shares(self, candidate: Candidate) -> tuple[Array, Array]:
        """The shares of the longest and of the shortest chunk at each step of a candidate's share,
        [steps, layouts]; one column if all layouts have equal shares."""
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

    def kernels_s(self, *, any_order: bool = False, alike: bool = False) -> Array:
        """A first lower bound of each layout's step in seconds, for the candidate that keeps every
        activation, from operator tables alone.  `any_order`: for any order of a rank's passes;
        `alike`: for any exchange between experts and any place of optimizer states, too."""
        without = EXCHANGING if alike else frozenset[str]()
        kinds = [layer_cost(self.problem, table, without) for table in self.problem.layer_kinds]
        layer = min(kinds, key=lambda cost: cost.forward.compute_s + cost.backward.compute_s)
        line = Line(0, no_cost(), layer)
        facts = Facts(line, line, line)
        sent_s = 0 * self.send_s
        return step_bound(self.columns, facts, sent_s, more=self.wider, any_order=any_order)

    @cached_property
    def lean_shares(self) -> Array:
        """Estimate, before any probe, the share of its device that each layout's leanest plan
        fills.  This plan keeps the input of each layer, and has one layer whole."""
        tables = self.problem.layer_kinds
        whole = max(sum(each.nbytes for each in one.activations.values()) for one in tables)
        kept = no_cost()
        entering = tables[0].activations["layer_input"].nbytes
        kept = kept._replace(forward=kept.forward._replace(net_bytes=entering))
        line = Line(0, only_kept(no_cost(), whole), kept)
        found = peak_bound(self.columns, Facts(line, line, line)) / self.usable_bytes
        return np.asarray(found)

    def short(self, candidate: Candidate) -> Short | None:
        """Lower bounds of the bytes that a candidate lacks along its share, in any number of
        pieces. They follow from the bytes that it keeps on the device and copies to the host, and
        from the transient bytes of the candidate that keeps everything. None for a candidate
        without a plan, or if tighter bounds are known."""
        if (candidate, 1) in self._bounds:
            return None
        if candidate not in self._shorts:
            self._shorts[candidate] = self._short(candidate)
        return self._shorts[candidate]

    def _short(self, candidate: Candidate) -> Short | None:
        floors = self.floors(self._stored_like(candidate))
        if isinstance(floors, Refused):
            return None
        lean, host_bytes = self.stored(candidate, floors)
        cut = candidate.whole != candidate  # transient bytes differ in pieces
        peak_bytes = peak_bound(self.columns, lean) if cut else self._above(lean, None)
        device = self.wide(
            candidate, peak_bytes - self.rounding_bytes(candidate) - self.usable_bytes
        )
        host = host_bytes - self.problem.cost.host_room_bytes
        return Short(device, host, _falls(device, host))

    def _stored_like(self, candidate: Candidate) -> Candidate:
        """The candidate without its pieces if pieces alone do not change what is stored, otherwise
        the candidate itself."""
        return (
            candidate.whole
            if candidate.whole != candidate and self.floors(candidate.cutting) == self.floors(KEEP)
            else candidate
        )

    def least_bytes(self, pieces: Candidate | None) -> Array:
        """Device bytes that even a plan that keeps no activation needs, whole or in the pieces of
        the candidate `pieces`."""
        if pieces not in self._leasts:
            keep = self.probe(KEEP)
            assert isinstance(keep, Probe)
            lines = (line._replace(base=no_cost(), slope=no_cost()) for line in keep.nbytes)
            self._leasts[pieces] = self._above(Facts._make(lines), pieces)
        return self._leasts[pieces]

    def _above(self, facts: Facts, pieces: Candidate | None) -> Array:
        """Device bytes of plans that keep what `facts` say and have the transient bytes of the
        candidate that keeps everything."""
        lines = (
            line._replace(base=only_kept(line.base, high), slope=only_kept(line.slope, 0.0))
            for line, high in zip(facts, self._highs(pieces), strict=True)
        )
        return peak_bound(self.columns, Facts._make(lines))

    def _highs(self, pieces: Candidate | None) -> list[float]:
        """Transient bytes of the candidate that keeps everything, on the first, a middle and the
        last rank.  With `pieces` they are those in these pieces, extrapolated to infinitely many if
        the number is open."""
        probe, candidate = self.probe, pieces or KEEP
        probes = [probe(candidate, at) for at in ((1, 2) if candidate.pieces else (1,))]
        facts = [one.nbytes for one in probes if isinstance(one, Probe)]
        if len(facts) < len(probes):
            return [0.0] * 3
        ends = zip(facts[0], facts[-1], strict=True)
        return [max(0.0, 2 * height(b.base) - height(a.base)) for a, b in ends]

    def of(self, candidate: Candidate, pieces: int = 1) -> Bounds | Refused:
        """Return the bounds of all layouts for a candidate at a step of its pieces, as arrays
        [steps of its share, layouts]; or why the candidate has no plan."""
        key = (candidate, pieces)
        if key not in self._bounds:
            self._bounds[key] = self._bound(candidate, pieces)
        return self._bounds[key]

    def _bound(self, candidate: Candidate, pieces: int) -> Bounds | Refused:
        ends = self.ends(candidate, pieces)
        if isinstance(ends, Refused):
            return ends
        nbytes = (ends[0].nbytes, ends[1].nbytes)
        lean, host_bytes = self.stored(candidate, nbytes)
        peak_bytes = self._peak_bytes(candidate, nbytes, lean)
        step_s = partial(
            GroupBounds._step_s, proxy(self), candidate, pieces
        )  # a proxy avoids a cycle of references
        return Bounds(peak_bytes, host_bytes, step_s)

    def _step_s(self, candidate: Candidate, pieces: int) -> Array:
        """Least seconds of a step along a candidate's share, [steps of the share, layouts]."""
        columns = self.columns
        timed = self.at_share(candidate, self._timed(candidate, pieces), self.shares(candidate)[0])
        one = self.probe(candidate, pieces)
        assert isinstance(one, Probe)
        layerwise = one.copies and one.transfers.granularity == "layer"
        more = AS_PROBED if layerwise else self.wider  # copies may hide the excess
        found = step_bound(columns, timed, self.send_s, more, any_order=one.reordered)
        return self.wide(candidate, found + self.end_s)

    def _peak_bytes(self, candidate: Candidate, ends: tuple[Facts, Facts], lean: Facts) -> Array:
        """Least device bytes along a candidate's share, [steps of the share, layouts].  `ends`:
        facts at both ends of the share, `lean`: along it, at the shares of the shortest chunks."""
        columns = self.columns
        found = self.probe(candidate)
        if isinstance(found, Refused):
            return self.wide(candidate, peak_bound(columns, lean) - self.rounding_bytes(candidate))
        waiting = self._waiting(candidate, found, ends, lean) if columns.waits.any() else None
        peak_bytes = peak_bound(columns, lean, found.transfers, waiting)
        return self.wide(candidate, peak_bytes - self.rounding_bytes(candidate))

    def _waiting(
        self, candidate: Candidate, one: Probe, ends: tuple[Facts, Facts], lean: Facts
    ) -> Waiting:
        """The bytes of the model's last chunk if its backward does not follow its forward at once.
        In probes it does, so they copy nothing of this chunk. `one`: the probe at the end of the
        candidate's share; `ends`: facts at both ends of the share, `lean`: along it."""
        ending = self.columns.ending
        if not one.copies:
            return Waiting(Total(lean.last, ending).kept_bytes, 0.0)
        kept_bytes = Total(ends[0].last, ending).kept_bytes
        before = self.probe(candidate.without(candidate.share)) if candidate.share else one
        if isinstance(before, Refused) or before.copies:
            layers = np.minimum(ending, len(one.end_bytes) - 1)
            return Waiting(np.take(one.end_bytes, layers), 0.0)
        share = self.shares(candidate)[1]
        whole, moved = ends[0].middle.base.kept_bytes, ends[1].middle.base.released_bytes
        leaving = min(1.0, moved / whole) if whole > 0 else 0.0  # small tensors may all stay
        return Waiting((1.0 - share) * kept_bytes, leaving * share * kept_bytes)

    def _timed(self, candidate: Candidate, pieces: int) -> tuple[Facts, Facts]:
        """The facts for seconds at both ends of a candidate's share.  Which operators of layers are
        cut in pieces may depend on the share, so a candidate with a share counts no seconds for
        these; the pieces of the head do not."""
        ends = self.ends(candidate, pieces)
        assert not isinstance(ends, Refused)
        facts = ends[0].facts, ends[1].facts
        if candidate.share is None or candidate.whole == candidate:
            return facts
        whole = self.ends(candidate.whole, 1)
        if isinstance(whole, Refused):
            return facts
        zero, one = (probe.facts for probe in whole)
        both = in_pieces(facts[0].last, zero.last), in_pieces(facts[1].last, one.last)
        least, single = More._make(map(min, *both)), self.prober.single
        return with_head(zero, least, single=single), with_head(one, least, single=single)

    def tight_s(self, candidate: Candidate, step: int, pieces: int, index: int) -> float:
        """Lower bound, in seconds, of the step of the layout at `index`, from its whole
        schedule."""
        key = (index, candidate.text(step, pieces))
        if key not in self._tight_s:
            self._tight_s[key] = self._by_schedule_s(candidate, step, pieces, index)
        return self._tight_s[key]

    def _by_schedule_s(self, candidate: Candidate, step: int, pieces: int, index: int) -> float:
        choice, frame = self.choices[index], self.frame(index)
        probe, cost = self.probe(candidate, pieces), self.problem.cost
        shares = self.shares(candidate)[0]
        assert isinstance(probe, Probe)
        if probe.reordered:  # the walk knows only whole passes
            return float(self._step_s(candidate, pieces)[step - 1, index]) * SHARED
        share = np.broadcast_to(shares, (len(shares), len(self.choices)))[step - 1, index]
        facts = self.at_share(candidate, self._timed(candidate, pieces), share)
        waits = bool(self.columns.waits[index])
        chunks = stages(facts, choice.sizes, waits=waits)
        layerwise = probe.copies and probe.transfers.granularity == "layer"
        if more := [] if layerwise else self.wider_at(index):
            chunks = chunks._replace(lines=list(map(lengthened, chunks.lines, more)))
        traffic = NO_TRAFFIC
        if chunks.moves:
            sent_bytes = float(self.sent_bytes[index])
            traffic = lowest_traffic(cost, frame.turns, chunks, probe.transfers, sent_bytes)
        if probe.transfers.granularity == "layer":
            if candidate.share is None and not hidden(cost, facts.middle.base, traffic):
                chunks = stages(probe.with_traffic(traffic), choice.sizes, waits=waits)
            traffic = NO_TRAFFIC
        step_s = float(schedule_bound_s(frame, chunks, probe.transfers, traffic, cost))
        return step_s * (SHARED if candidate.share or candidate.pieces else LINEAR)

    def in_more_pieces(self, candidate: Candidate, fewer: int, pieces: int, more: int) -> Array:
        """Least device bytes at step `more` of a candidate's pieces, from the bytes at steps
        `fewer` and `pieces`.  Each step has twice the pieces of the step before.  A peak is a
        maximum of lines in 1 / pieces, so it is convex and lies above its chord beyond the chord's
        ends."""
        few, many = (self.ends(candidate, at) for at in (fewer, pieces))
        if isinstance(few, Refused) or isinstance(many, Refused):
            return np.zeros((self.steps(candidate), len(self.choices)))
        beyond = (2.0**-pieces - 2.0**-more) / (2.0**-fewer - 2.0**-pieces)
        zero, one = (
            Facts._make(chord(*lines, beyond) for lines in zip(a.nbytes, b.nbytes, strict=True))
            for a, b in zip(few, many, strict=True)
        )
        lean = self.at_share(candidate, (zero, one), self.shares(candidate)[1])
        return self._peak_bytes(candidate, (zero, one), lean)


def _both_ends(
    candidate: Candidate, ask: Callable[[Candidate], Reply | Refused]
) -> tuple[Reply, Reply] | Refused:
    """The replies of `ask` at both ends of a candidate's share; two equal ones for a candidate
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
