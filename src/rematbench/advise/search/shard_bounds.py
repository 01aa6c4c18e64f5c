"""Lower bounds of the layouts of a shard under the candidates of a search."""

from functools import cached_property, partial
from math import inf
from typing import NamedTuple
from weakref import proxy

import numpy as np

from rematbench.advise.search.candidates import KEEP, Candidate
from rematbench.advise.search.closed_bounds import (
    AS_PROBED,
    Bounds,
    Total,
    Waiting,
    peak_bound,
    step_bound,
)
from rematbench.advise.search.pass_costs import (
    Facts,
    Line,
    More,
    chord,
    height,
    in_pieces,
    lengthened,
    no_cost,
    only_kept,
    with_head,
)
from rematbench.advise.search.probes import Probe, Refused
from rematbench.advise.search.schedule_bound import hidden, lowest_traffic, schedule_bound_s, stages
from rematbench.advise.search.shards import Shard
from rematbench.advise.search.space import Array
from rematbench.costs.copies import NO_TRAFFIC

LINEAR = 0.9999
"""Factor on a bound by the schedule: seconds of a chunk are not exactly linear in its layers, since
the first kernel of a kind may wait for its launch."""


SHARED = 0.998
"""The factor for a candidate with a share or pieces: tensors are split at whole rows."""


class Short(NamedTuple):
    """Lower bounds of the bytes that each layout lacks (negative: none), on a device and in a
    node's host memory, at each step of a candidate's share: arrays [steps, layouts]. `falls`: by
    layout, the fewest bytes that it lacks if no step fits, and whether they are host bytes; None if
    a step may fit."""

    device: Array
    host: Array
    falls: list[tuple[float, bool] | None]


def _falls(device: Array, host: Array) -> list[tuple[float, bool] | None]:
    """See `Short`.  Host memory is short where no step has room there; else what the steps with
    room there lack on the device counts."""
    lacked = np.where(host > 0, inf, device).min(axis=0)
    found: list[tuple[float, bool] | None] = []
    for nbytes, host_bytes in zip(lacked.tolist(), host.min(axis=0).tolist(), strict=True):
        if nbytes <= 0:
            found.append(None)
        else:
            found.append((host_bytes, True) if nbytes == inf else (nbytes, False))
    return found


class MinimumBytes:
    """Lower bounds of the bytes of plans of `shard`."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._shorts: dict[Candidate, Short | None] = {}
        self._leasts: dict[Candidate | None, Array] = {}

    @cached_property
    def shares(self) -> Array:
        """Estimate, before any probe, the share of its device that each layout's leanest plan
        fills.  This plan keeps the input of each layer, and has one layer whole."""
        tables = self.shard.problem.layer_kinds
        whole = max(sum(each.nbytes for each in one.activations.values()) for one in tables)
        kept = no_cost()
        entering = tables[0].activations["layer_input"].nbytes
        kept = kept._replace(forward=kept.forward._replace(net_bytes=entering))
        line = Line(0, only_kept(no_cost(), whole), kept)
        found = peak_bound(self.shard.columns, Facts(line, line, line)) / self.shard.usable_bytes
        return np.asarray(found)

    def short(self, candidate: Candidate) -> Short | None:
        """Return the bytes that a candidate lacks along its share, in any number of pieces.  They
        follow from the bytes that it keeps on the device and copies to the host, and from the bytes
        that the candidate that keeps everything needs above them.  None for a candidate without a
        plan."""
        if candidate not in self._shorts:
            self._shorts[candidate] = self._short(candidate)
        return self._shorts[candidate]

    def _short(self, candidate: Candidate) -> Short | None:
        shard, floors = self.shard, self.shard.floors(self._stored_like(candidate))
        if isinstance(floors, Refused):
            return None
        lean, host_bytes = shard.stored(candidate, floors)
        cut = candidate.whole != candidate  # pieces have other transients
        peak_bytes = peak_bound(shard.columns, lean) if cut else self._above(lean, None)
        device = shard.wide(
            candidate, peak_bytes - shard.rounding_bytes(candidate) - shard.usable_bytes
        )
        host = host_bytes - shard.problem.cost.host_room_bytes
        return Short(device, host, _falls(device, host))

    def _stored_like(self, candidate: Candidate) -> Candidate:
        """The candidate whose floors are those of a candidate: the candidate without its pieces,
        where these alone change nothing of what is stored."""
        return (
            candidate.whole
            if candidate.whole != candidate and self._only_cuts(candidate.cutting)
            else candidate
        )

    def _only_cuts(self, pieces: Candidate) -> bool:
        """Whether methods that compute in pieces leave what layers store as it is."""
        return self.shard.floors(pieces) == self.shard.floors(KEEP)

    def of_all(self, pieces: Candidate | None) -> Array:
        """Device bytes that even a plan that keeps no activation needs: in no pieces, or in those
        of the candidate `pieces`."""
        if pieces not in self._leasts:
            keep = self.shard.probe(KEEP)
            assert isinstance(keep, Probe)
            lines = (line._replace(base=no_cost(), slope=no_cost()) for line in keep.nbytes)
            self._leasts[pieces] = self._above(Facts._make(lines), pieces)
        return self._leasts[pieces]

    def _above(self, facts: Facts, pieces: Candidate | None) -> Array:
        """Device bytes of plans that keep what `facts` say, and above it what passes of the
        candidate that keeps everything need."""
        lines = (
            line._replace(base=only_kept(line.base, high), slope=only_kept(line.slope, 0.0))
            for line, high in zip(facts, self._highs(pieces), strict=True)
        )
        return peak_bound(self.shard.columns, Facts._make(lines))

    def _highs(self, pieces: Candidate | None) -> list[float]:
        """Bytes that passes of the candidate that keeps everything need above the kept bytes, on
        the first, a middle and the last rank; with `pieces`: in these, or extrapolated to endlessly
        many where their number is open."""
        probe, candidate = self.shard.probe, pieces or KEEP
        probes = [probe(candidate, at) for at in ((1, 2) if candidate.pieces else (1,))]
        facts = [one.nbytes for one in probes if isinstance(one, Probe)]
        if len(facts) < len(probes):
            return [0.0] * 3
        ends = zip(facts[0], facts[-1], strict=True)
        return [max(0.0, 2 * height(b.base) - height(a.base)) for a, b in ends]


class ShardBounds:
    """Lower bounds of the layouts of a shard under every candidate of its registry.  `minimum`: the
    bytes that plans need at least, available before probes of these plans."""

    def __init__(self, shard: Shard) -> None:
        self.shard, self.minimum = shard, MinimumBytes(shard)
        self._bounds: dict[tuple[Candidate, int], Bounds | Refused] = {}

    def of(self, candidate: Candidate, pieces: int = 1) -> Bounds | Refused:
        """Return the bounds under a candidate at a step of its pieces, as arrays [steps of its
        share, layouts]; or why the candidate has no plan."""
        key = (candidate, pieces)
        if key not in self._bounds:
            self._bounds[key] = self._bound(candidate, pieces)
        return self._bounds[key]

    def _bound(self, candidate: Candidate, pieces: int) -> Bounds | Refused:
        ends = self.shard.ends(candidate, pieces)
        if isinstance(ends, Refused):
            return ends
        nbytes = (ends[0].nbytes, ends[1].nbytes)
        lean, host_bytes = self.shard.stored(candidate, nbytes)
        peak_bytes = self._peak_bytes(candidate, nbytes, lean)
        step_s = partial(
            ShardBounds._step_s, proxy(self), candidate, pieces
        )  # no cycle of references
        return Bounds(peak_bytes, host_bytes, step_s)

    def _step_s(self, candidate: Candidate, pieces: int) -> Array:
        """Least seconds of a step along a candidate's share, [steps of the share, layouts]."""
        shard, columns, send_s = self.shard, self.shard.columns, self.shard.send_s
        timed = shard.at_share(
            candidate, self._timed(candidate, pieces), shard.shares(candidate)[0]
        )
        one = shard.probe(candidate, pieces)
        assert isinstance(one, Probe)
        layerwise = one.copies and one.transfers.granularity == "layer"
        more = AS_PROBED if layerwise else shard.wider  # compute may wait for copies meanwhile
        found = step_bound(columns, timed, send_s, more)
        return shard.wide(candidate, found + shard.end_s)

    def _peak_bytes(self, candidate: Candidate, ends: tuple[Facts, Facts], lean: Facts) -> Array:
        """Least device bytes along a candidate's share, [steps of the share, layouts].  `ends`:
        facts at both ends of the share, `lean`: along it, at the shares of the shortest chunks."""
        shard, columns = self.shard, self.shard.columns
        found = shard.probe(candidate)
        if isinstance(found, Refused):
            return shard.wide(
                candidate, peak_bound(columns, lean) - shard.rounding_bytes(candidate)
            )
        waiting = self._waiting(candidate, found, ends, lean) if columns.waits.any() else None
        peak_bytes = peak_bound(columns, lean, found.transfers, waiting)
        return shard.wide(candidate, peak_bytes - shard.rounding_bytes(candidate))

    def _waiting(
        self, candidate: Candidate, one: Probe, ends: tuple[Facts, Facts], lean: Facts
    ) -> Waiting:
        """The model's last chunk where its backward does not follow its forward at once, as in
        probes, which then copy nothing of it.  `one`: the probe at the end of the candidate's
        share; `ends`: at both ends, `lean`: along it."""
        shard, ending = self.shard, self.shard.columns.ending
        if not one.copies:
            return Waiting(Total(lean.last, ending).kept_bytes, 0.0)
        kept_bytes = Total(ends[0].last, ending).kept_bytes
        before = shard.probe(candidate.without(candidate.share)) if candidate.share else one
        if isinstance(before, Refused) or before.copies:
            layers = np.minimum(ending, len(one.end_bytes) - 1)
            return Waiting(np.take(one.end_bytes, layers), 0.0)
        share = shard.shares(candidate)[1]
        whole, moved = ends[0].middle.base.kept_bytes, ends[1].middle.base.released_bytes
        leaving = min(1.0, moved / whole) if whole > 0 else 0.0  # small tensors may all stay
        return Waiting((1.0 - share) * kept_bytes, leaving * share * kept_bytes)

    def _timed(self, candidate: Candidate, pieces: int) -> tuple[Facts, Facts]:
        """The facts for seconds at both ends of a candidate's share.  Which operators of layers are
        cut in pieces may depend on the share, so a candidate with a share counts no seconds for
        these; the pieces of the head do not."""
        ends = self.shard.ends(candidate, pieces)
        assert not isinstance(ends, Refused)
        facts = ends[0].facts, ends[1].facts
        if candidate.share is None or candidate.whole == candidate:
            return facts
        whole = self.shard.ends(candidate.whole, 1)
        if isinstance(whole, Refused):
            return facts
        zero, one = (probe.facts for probe in whole)
        both = in_pieces(facts[0].last, zero.last), in_pieces(facts[1].last, one.last)
        least, single = More._make(map(min, *both)), self.shard.prober.single
        return with_head(zero, least, single=single), with_head(one, least, single=single)

    def tight_s(self, candidate: Candidate, step: int, pieces: int, index: int) -> float:
        """Lower bound, in seconds, of the step of the layout at `index`, from its whole
        schedule."""
        known, text = self.shard.site(index).tight_s, candidate.text(step, pieces)
        if text not in known:
            known[text] = self._tight_s(candidate, step, pieces, index)
        return known[text]

    def _tight_s(self, candidate: Candidate, step: int, pieces: int, index: int) -> float:
        shard, choice, frame = self.shard, self.shard.choices[index], self.shard.frame(index)
        probe, cost, shares = (
            shard.probe(candidate, pieces),
            shard.problem.cost,
            shard.shares(candidate)[0],
        )
        assert isinstance(probe, Probe)
        share = np.broadcast_to(shares, (len(shares), len(shard.choices)))[step - 1, index]
        facts = shard.at_share(candidate, self._timed(candidate, pieces), share)
        waits = bool(shard.columns.waits[index])
        chunks = stages(facts, choice.sizes, waits=waits)
        layerwise = probe.copies and probe.transfers.granularity == "layer"
        if more := [] if layerwise else shard.wider_at(index):
            chunks = chunks._replace(lines=list(map(lengthened, chunks.lines, more)))
        traffic = NO_TRAFFIC
        if chunks.moves:
            sent_bytes = float(shard.sent_bytes[index])
            traffic = lowest_traffic(cost, frame.turns, chunks, probe.transfers, sent_bytes)
        if probe.transfers.granularity == "layer":
            if candidate.share is None and not hidden(cost, facts.middle.base, traffic):
                chunks = stages(probe.with_traffic(traffic), choice.sizes, waits=waits)
            traffic = NO_TRAFFIC
        step_s = float(schedule_bound_s(frame, chunks, probe.transfers, traffic, cost))
        return step_s * (SHARED if candidate.share or candidate.pieces else LINEAR)

    def short(self, candidate: Candidate) -> Short | None:
        """Return the bytes that a candidate lacks (`MinimumBytes.short`), before its tighter bounds
        are computed."""
        return None if (candidate, 1) in self._bounds else self.minimum.short(candidate)

    def in_more_pieces(self, candidate: Candidate, fewer: int, pieces: int, more: int) -> Array:
        """Least device bytes at step `more` of a candidate's pieces, from the bytes at steps
        `fewer` and `pieces`.  Each step has twice the pieces of the step before.  A peak is a
        maximum of lines in 1 / pieces, so it is convex and lies above its chord beyond the chord's
        ends."""
        few, many = (self.shard.ends(candidate, at) for at in (fewer, pieces))
        if isinstance(few, Refused) or isinstance(many, Refused):
            return np.zeros((self.shard.steps(candidate), len(self.shard.choices)))
        beyond = (2.0**-pieces - 2.0**-more) / (2.0**-fewer - 2.0**-pieces)
        zero, one = (
            Facts._make(chord(*lines, beyond) for lines in zip(a.nbytes, b.nbytes, strict=True))
            for a, b in zip(few, many, strict=True)
        )
        lean = self.shard.at_share(candidate, (zero, one), self.shard.shares(candidate)[1])
        return self._peak_bytes(candidate, (zero, one), lean)
