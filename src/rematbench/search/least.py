"""Bytes that plans of a shard's layouts need at least, known before the plans are probed."""

from functools import cached_property
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rematbench.problem import Problem
from rematbench.search.arms import KEEP, Arm
from rematbench.search.bounds import host_bound, peak_bound
from rematbench.search.columns import Array, Columns
from rematbench.search.highs import height, no_cost, only_kept
from rematbench.search.probe import Facts, Floor, Line, Probe, Refused


class Probed(Protocol):
    """What is asked of a shard."""

    problem: Problem
    columns: Columns

    @property
    def usable_bytes(self) -> NDArray[np.int64]:
        """Device bytes that each layout may reserve."""
        ...

    def probe(self, arm: Arm, pieces: int = 1) -> Probe | Refused:
        """An arm's Probe."""
        ...

    def floor(self, arm: Arm) -> Floor | Refused:
        """An arm's Floor."""
        ...

    def bounded(self, arm: Arm) -> bool:
        """Whether bounds of an arm are known."""
        ...

    def rounding_bytes(self, arm: Arm) -> Any:
        """Bytes by which an arm's shares and pieces may be less than its lines say."""
        ...


class Short(NamedTuple):
    """Bytes that each layout lacks at least, where positive: of a device, and of a node's host
    memory."""

    device: Array
    host: Array


class LeastBytes:
    """The bytes that plans of `shard` need at least."""

    def __init__(self, shard: Probed) -> None:
        self.shard = shard
        self._known_highs: dict[Arm | None, list[float]] = {}
        self._shorts: dict[Arm, Short | None] = {}
        self._leasts: dict[tuple[Arm | None, Arm | None], Array] = {}

    @cached_property
    def shares(self) -> Array:
        """About the share of its device that each layout's leanest plan fills, before any probe: it
        keeps what enters a layer, and has one layer whole."""
        tables = self.shard.problem.layer_kinds
        whole = max(sum(each.nbytes for each in one.activations.values()) for one in tables)
        kept = no_cost()
        entering = tables[0].activations["layer_input"].nbytes
        kept = kept._replace(forward=kept.forward._replace(net_bytes=entering))
        line = Line(0, only_kept(no_cost(), whole), kept)
        found = peak_bound(self.shard.columns, Facts(line, line, line)) / self.shard.usable_bytes
        return np.asarray(found)

    def short(self, arm: Arm) -> Short | None:
        """What an arm lacks at the last step of its line, in any number of pieces, by what it keeps
        on the device and copies to the host alone; None where its bounds are known, which say
        more, and for an arm without a plan."""
        if self.shard.bounded(arm):
            return None
        if arm not in self._shorts:
            self._shorts[arm] = self._short(arm)
        return self._shorts[arm]

    def _short(self, arm: Arm) -> Short | None:
        found, shard = self.shard.floor(arm), self.shard
        if isinstance(found, Refused):
            return None
        rounding = shard.rounding_bytes(arm)
        peak_bytes = peak_bound(shard.columns, found.nbytes) - rounding
        if arm.line:  # a smaller share copies less
            host_bytes = np.full_like(peak_bytes, -inf)
        else:
            more = found.pinned if not found.pinned.budget else found.pinned._replace(sizes=())
            host_bytes = host_bound(shard.columns, found.nbytes, lambda n: more.more_bytes(1.0, n))
            host_bytes = host_bytes - rounding * shard.columns.gpus_per_node
        room = shard.problem.cost.host_room_bytes
        return Short(peak_bytes - shard.usable_bytes, host_bytes - room)

    def of_all(self, pieces: Arm | None) -> Array:
        """Device bytes that even a plan that keeps no activation needs, as in `of_family`."""
        return self.of_family(None, pieces)

    def of_family(self, lean: Arm | None, pieces: Arm | None) -> Array:
        """Device bytes that every arm of a family needs: the bytes that its lean arm keeps (None:
        no bytes), and above them the bytes that passes of the arm that keeps everything need (see
        `_highs`)."""
        if (lean, pieces) not in self._leasts:
            self._leasts[lean, pieces] = self._of_family(lean, pieces)
        return self._leasts[lean, pieces]

    def _of_family(self, lean: Arm | None, pieces: Arm | None) -> Array:
        if lean is not None:
            found = self.shard.probe(Arm((*lean.parts, *(pieces.parts if pieces else ()))), 1)
            if isinstance(found, Refused):
                return self.of_all(pieces)
            return self._above(found.nbytes, pieces)
        keep = self.shard.probe(KEEP)
        assert isinstance(keep, Probe)
        lines = (line._replace(base=no_cost(), slope=no_cost()) for line in keep.nbytes)
        return self._above(Facts._make(lines), pieces)

    def _above(self, facts: Facts, pieces: Arm | None) -> Array:
        lines = (
            line._replace(base=only_kept(line.base, high), slope=only_kept(line.slope, 0.0))
            for line, high in zip(facts, self._highs(pieces), strict=True)
        )
        return peak_bound(self.shard.columns, Facts._make(lines))

    def _highs(self, pieces: Arm | None) -> list[float]:
        """Bytes that passes of the arm that keeps everything need above the kept bytes, on the
        first, a middle and the last rank; with `pieces`: in these, or extrapolated to endlessly
        many where their number is open."""
        if pieces not in self._known_highs:
            self._known_highs[pieces] = self._made_highs(pieces)
        return self._known_highs[pieces]

    def _made_highs(self, pieces: Arm | None) -> list[float]:
        probe, arm = self.shard.probe, pieces or KEEP
        probes = [probe(arm, at) for at in ((1, 2) if arm.pieces else (1,))]
        facts = [one.nbytes for one in probes if isinstance(one, Probe)]
        if len(facts) < len(probes):
            return [0.0] * 3
        ends = zip(facts[0], facts[-1], strict=True)
        return [max(0.0, 2 * height(b.base) - height(a.base)) for a, b in ends]
