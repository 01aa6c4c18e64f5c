"""A shard: the layouts of a cut, and their bounds under the arms of a search."""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import proxy

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.search.arms import Arm
from rematbench.advise.search.bounds import (
    ROUNDING_BYTES,
    Bounds,
    Total,
    Waiting,
    host_bound,
    mixed,
    peak_bound,
    step_bound,
)
from rematbench.advise.search.columns import Array
from rematbench.advise.search.contention import CopyBound, hidden, least_crowd, stages
from rematbench.advise.search.cut import Cut
from rematbench.advise.search.head import More, in_pieces, with_head
from rematbench.advise.search.highs import chord
from rematbench.advise.search.least import LeastBytes
from rematbench.advise.search.pinned import NOTHING, Pinned
from rematbench.advise.search.probe import Facts, Floor, Found, Probe, Prober, Refused
from rematbench.advise.search.shared import Shared
from rematbench.advise.search.skeleton import tightened
from rematbench.advise.search.space import Choice
from rematbench.costs.copies import NO_TRAFFIC
from rematbench.plugins.registry import Composition, MethodError, Registry
from rematbench.problem import Problem

Number = TypeVar("Number", np.float64, np.bool_)

LINEAR = 0.9999
"""Factor on a bound by the schedule: seconds of a chunk are not exactly linear in its layers, since
the first kernel of a kind may wait for its launch."""

SHARED = 0.998
"""The factor for an arm with a line or pieces: tensors are split at whole rows."""


class Shard(Cut):
    """The layouts of a cut with their bounds under every arm of a registry."""

    def __init__(
        self,
        choices: Sequence[Choice],
        problem: Problem,
        registry: Registry,
        shared: Shared | None = None,
        reserving: Callable[[Problem], Problem] | None = None,
    ) -> None:
        super().__init__(choices, problem, shared, reserving)
        self.registry = registry
        self._prober = Prober(problem, self.shared.probes)
        self._probes: dict[str, Probe | Refused] = {}
        self._floors: dict[str, Floor | Refused] = {}
        self._bounds: dict[tuple[Arm, int], Bounds | Refused] = {}
        self._by_copies: dict[tuple[Arm, int], NDArray[np.bool_]] = {}

    @property
    def layers(self) -> int:
        """Layers that probes have lowered."""
        return self._prober.layers

    def probe(self, arm: Arm, pieces: int = 1) -> Probe | Refused:
        """An arm's Probe; for an arm with a line, at the last step of the line."""
        text = _at_end(arm, pieces)
        if text not in self._probes:
            self._probes[text] = self._asked(text, self._prober)
        return self._probes[text]

    def floors(self, arm: Arm) -> tuple[Floor, Floor] | Refused:
        """The floors at both ends of an arm's line; two equal ones for an arm without a line."""
        return _both_ends(arm, self._floor)

    def _floor(self, arm: Arm) -> Floor | Refused:
        text = _at_end(arm, 1)
        if text not in self._floors:
            self._floors[text] = self._asked(text, self._prober.floor)
        return self._floors[text]

    def _asked(self, text: str, asked: Callable[[Composition], Found | Refused]) -> Found | Refused:
        try:
            return asked(self.registry.resolve(text, None, self.problem))
        except MethodError as error:
            return Refused(str(error))

    def bounded(self, arm: Arm) -> bool:
        """Whether bounds of an arm are known."""
        return (arm, 1) in self._bounds

    def steps(self, arm: Arm) -> int:
        """The number of steps of an arm's line; 1 for an arm without a line."""
        if arm.line is None or arm.line.scalar is None:
            return 1
        return arm.line.scalar.steps or int(self.columns.most.max())

    def bounds(self, arm: Arm, pieces: int = 1) -> Bounds | Refused:
        """Bounds under an arm at a step of its pieces, as arrays [steps of its line, layouts]; or
        why the arm has no plan."""
        key = (arm, pieces)
        if key not in self._bounds:
            self._bounds[key] = self._bound(arm, pieces)
        return self._bounds[key]

    def _bound(self, arm: Arm, pieces: int) -> Bounds | Refused:
        ends = self._ends(arm, pieces)
        if isinstance(ends, Refused):
            return ends
        one = self.probe(arm)
        pinned = NOTHING if isinstance(one, Refused) else one.pinned
        nbytes = (ends[0].nbytes, ends[1].nbytes)
        lean, host_bytes = self.stored(arm, nbytes, pinned)
        peak_bytes = self._peak_bytes(arm, nbytes, lean)
        step_s = partial(Shard._step_s, proxy(self), arm, pieces)  # no cycle of references
        return Bounds(peak_bytes, host_bytes, step_s)

    def stored(
        self, arm: Arm, ends: tuple[Facts, Facts], pinned: Pinned
    ) -> tuple[Facts, NDArray[np.float64]]:
        """Along an arm's line: its facts, at the shares of the shortest chunks, and the least host
        bytes of a node, [steps of the line, layouts].  `ends`: the facts at both ends of the line,
        `pinned`: what is copied at its last step."""
        longest, shortest = self._shares(arm)
        quick = self._quick(arm, ends, longest)
        known = bool(pinned.budget) == (arm.line is not None)
        more = (pinned if known else NOTHING).more_bytes
        host_bytes = host_bound(self.columns, quick, partial(more, longest))
        lean = quick if shortest is longest else self._quick(arm, ends, shortest)
        rounding = self.rounding_bytes(arm) * self.columns.gpus_per_node
        return lean, self.wide(arm, host_bytes - rounding)

    def wide(self, arm: Arm, found: NDArray[Number]) -> NDArray[Number]:
        """An array [steps of an arm's line, layouts], also where all steps are equal."""
        return np.broadcast_to(found, (self.steps(arm), len(self.choices)))

    def _step_s(self, arm: Arm, pieces: int) -> Array:
        """Least seconds of a step along an arm's line, [steps of the line, layouts]."""
        one = self.probe(arm, pieces)
        assert isinstance(one, Probe)
        timed = self._quick(arm, self._timed(arm, pieces), self._shares(arm)[0])
        if not one.copies:
            return self.wide(arm, step_bound(self.columns, timed, self.send_s) + self.end_s)
        layerwise = one.transfers.granularity == "layer"
        copies = CopyBound(
            self.columns, timed, self.problem.cost, self.sent_bytes, by_layer=layerwise
        )
        kernels_s = found = step_bound(self.columns, timed, self.send_s)
        if layerwise and arm.line is None:
            found = step_bound(self.columns, timed, self.send_s, copies.reloads())
        found = np.maximum(found, copies.outwards())
        waits = found > kernels_s
        if layerwise:
            waits = waits | copies.outlast()
        self._by_copies[arm, pieces] = self.wide(arm, waits)
        return self.wide(arm, found + self.end_s)

    def by_copies(self, arm: Arm, step: int, pieces: int, index: int) -> bool:
        """Whether copies over the host link make the bound of a step's seconds."""
        known = self._by_copies.get((arm, pieces))
        return known is not None and bool(known[step - 1, index])

    def _peak_bytes(self, arm: Arm, ends: tuple[Facts, Facts], lean: Facts) -> Array:
        """Least device bytes along an arm's line, [steps of the line, layouts].  `ends`: facts at
        both ends of the line, `lean`: along it, at the shares of the shortest chunks."""
        found = self.probe(arm)
        if isinstance(found, Refused):
            return self.wide(arm, peak_bound(self.columns, lean) - self.rounding_bytes(arm))
        waits = self.columns.waits.any()
        waiting = self._waiting(arm, found, ends, lean) if waits else None
        peak_bytes = peak_bound(self.columns, lean, found.transfers, waiting)
        return self.wide(arm, peak_bytes - self.rounding_bytes(arm))

    def _waiting(self, arm: Arm, one: Probe, ends: tuple[Facts, Facts], lean: Facts) -> Waiting:
        """The model's last chunk where its backward does not follow its forward at once, as in
        probes, which then copy nothing of it.  `one`: the probe at the end of the arm's line;
        `ends`: at both ends, `lean`: along it."""
        if not one.copies:
            return Waiting(Total(lean.last, self.columns.ending).kept_bytes, 0.0)
        kept_bytes = Total(ends[0].last, self.columns.ending).kept_bytes
        before = self.probe(arm.without(arm.line)) if arm.line else one
        if isinstance(before, Refused) or before.copies:
            layers = np.minimum(self.columns.ending, len(one.end_bytes) - 1)
            return Waiting(np.take(one.end_bytes, layers), 0.0)
        share = self._shares(arm)[1]
        whole, moved = ends[0].middle.base.kept_bytes, ends[1].middle.base.released_bytes
        leaving = min(1.0, moved / whole) if whole > 0 else 0.0  # small tensors may all stay
        return Waiting((1.0 - share) * kept_bytes, leaving * share * kept_bytes)

    def rounding_bytes(self, arm: Arm) -> Any:
        """Bytes by which shares and pieces that are whole rows may be less than their lines say."""
        cut = arm.line or arm.pieces
        return 2 * ROUNDING_BYTES * self.columns.in_flight[0] if cut else 0

    def _quick(self, arm: Arm, ends: tuple[Facts, Facts], share: Any) -> Facts:
        """The facts of an arm at a share of its line."""
        if arm.line is None:
            return ends[1]
        return mixed(*ends, share)

    def _timed(self, arm: Arm, pieces: int) -> tuple[Facts, Facts]:
        """The facts for seconds at both ends of an arm's line.  Which operators of layers are cut
        in pieces may depend on the share, so an arm with a line counts no seconds for these; the
        pieces of the head do not."""
        ends = self._ends(arm, pieces)
        assert not isinstance(ends, Refused)
        facts = ends[0].facts, ends[1].facts
        if arm.line is None or arm.whole == arm:
            return facts
        whole = self._ends(arm.whole, 1)
        if isinstance(whole, Refused):
            return facts
        zero, one = (probe.facts for probe in whole)
        both = in_pieces(facts[0].last, zero.last), in_pieces(facts[1].last, one.last)
        least, single = More._make(map(min, *both)), self._prober.single
        return with_head(zero, least, single=single), with_head(one, least, single=single)

    def _ends(self, arm: Arm, pieces: int) -> tuple[Probe, Probe] | Refused:
        """The probes at both ends of an arm's line; two equal ones for an arm without a line."""
        return _both_ends(arm, partial(self.probe, pieces=pieces))

    def _shares(self, arm: Arm) -> tuple[Array, Array]:
        """Shares of the longest and of the shortest chunk, [steps of the arm's line, layouts]; one
        column where all layouts have equal shares."""
        steps = np.arange(1.0, self.steps(arm) + 1)[:, None]
        scalar = arm.line.scalar if arm.line else None
        if scalar is None or scalar.scale == "share":
            equal = steps / len(steps)
            return equal, equal
        columns = self.columns
        return np.minimum(1.0, steps / columns.most), np.minimum(1.0, steps / columns.fewest)

    def tight_s(self, arm: Arm, step: int, pieces: int, index: int) -> float:
        """Least seconds of a layout's step (the layout at `index`), by its whole schedule."""
        known, text = self.site(index).tight_s, arm.text(step, pieces)
        if text not in known:
            known[text] = self._tight_s(arm, step, pieces, index)
        return known[text]

    def _tight_s(self, arm: Arm, step: int, pieces: int, index: int) -> float:
        moves = self.probe(arm, pieces)
        assert isinstance(moves, Probe)
        shares = self._shares(arm)[0]
        share = np.broadcast_to(shares, (len(shares), len(self.choices)))[step - 1, index]
        facts = self._quick(arm, self._timed(arm, pieces), share)
        cost, sizes, frame = self.problem.cost, self.choices[index].sizes, self.site(index).frame
        waits = bool(self.columns.waits[index])
        made = stages(facts, sizes, waits=waits)
        crowd = NO_TRAFFIC
        if made.moves:
            sent_bytes = float(self.sent_bytes[index])
            crowd = least_crowd(cost, frame.turns, made, moves.transfers, sent_bytes)
        if moves.transfers.granularity == "layer":
            if arm.line is None and not hidden(cost, facts.middle.base, crowd):
                made = stages(moves.beside(crowd), sizes, waits=waits)
            crowd = NO_TRAFFIC
        found = tightened(frame, made, moves.transfers, crowd, cost)
        return float(found) * (SHARED if arm.line or arm.pieces else LINEAR)

    @cached_property
    def least(self) -> LeastBytes:
        """The bytes that plans need at least, known before probes of these plans."""
        return LeastBytes(proxy(self))

    def in_more_pieces(self, arm: Arm, fewer: int, pieces: int, more: int) -> Array:
        """Least device bytes at step `more` of an arm's pieces, from the bytes at steps `fewer` and
        `pieces`.  Each step has twice the pieces of the step before.  A peak is a maximum of lines
        in 1 / pieces, so it is convex and lies above its chord beyond the chord's ends."""
        few, many = (self._ends(arm, at) for at in (fewer, pieces))
        if isinstance(few, Refused) or isinstance(many, Refused):
            return np.zeros((self.steps(arm), len(self.choices)))
        beyond = (2.0**-pieces - 2.0**-more) / (2.0**-fewer - 2.0**-pieces)
        zero, one = (
            Facts._make(chord(*lines, beyond) for lines in zip(a.nbytes, b.nbytes, strict=True))
            for a, b in zip(few, many, strict=True)
        )
        lean = self._quick(arm, (zero, one), self._shares(arm)[1])
        return self._peak_bytes(arm, (zero, one), lean)


def _both_ends(arm: Arm, found: Callable[[Arm], Found | Refused]) -> tuple[Found, Found] | Refused:
    """What is found at both ends of an arm's line; two equal ones for an arm without a line."""
    one = found(arm)
    zero = one if arm.line is None else found(arm.without(arm.line))
    if isinstance(one, Refused):
        return one
    return zero if isinstance(zero, Refused) else (zero, one)


def _at_end(arm: Arm, pieces: int) -> str:
    """The text of an arm in a number of pieces, at the last step of its line."""
    line = arm.line.scalar if arm.line else None
    return arm.text(line.steps or 1 << 20 if line else 0, pieces)
