"""Bytes that plans of a shard's layouts need at least, known before the plans are probed."""

from functools import cached_property
from math import inf
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rematbench.advise.search.arms import KEEP, Arm
from rematbench.advise.search.bounds import peak_bound
from rematbench.advise.search.columns import Array, Columns
from rematbench.advise.search.highs import height, no_cost, only_kept
from rematbench.advise.search.passes import ChunkCost
from rematbench.advise.search.pinned import Pinned
from rematbench.advise.search.probe import Facts, Floor, Line, Probe, Refused
from rematbench.problem import Problem


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

    def floors(self, arm: Arm) -> tuple[Floor, Floor] | Refused:
        """The floors at both ends of an arm's line."""
        ...

    def stored(
        self, arm: Arm, ends: tuple[Facts, Facts], pinned: Pinned
    ) -> tuple[Facts, NDArray[np.float64]]:
        """Along an arm's line: its facts, and the least host bytes of a node."""
        ...

    def wide(self, arm: Arm, found: NDArray[np.float64]) -> NDArray[np.float64]:
        """An array [steps of an arm's line, layouts]."""
        ...

    def bounded(self, arm: Arm) -> bool:
        """Whether bounds of an arm are known."""
        ...

    def rounding_bytes(self, arm: Arm) -> Any:
        """Bytes by which an arm's shares and pieces may be less than its lines say."""
        ...


class Short(NamedTuple):
    """Bytes that each layout lacks at least at each step of an arm's line, where positive, of a
    device and of a node's host memory: arrays [steps, layouts].  `falls`: by layout, what it lacks
    at least where no step fits, and whether that is host memory; None where a step may fit."""

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


def _less(cost: ChunkCost, nbytes: float) -> ChunkCost:
    """A chunk's costs where it keeps fewer bytes."""
    forward = cost.forward
    return cost._replace(forward=forward._replace(net_bytes=forward.net_bytes - nbytes))


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
        """What an arm lacks along its line, in any number of pieces, by what it keeps on the device
        and copies to the host, and by what the arm that keeps everything needs above that; None
        where its bounds are known, which say more, and for an arm without a plan."""
        if self.shard.bounded(arm):
            return None
        if arm not in self._shorts:
            self._shorts[arm] = self._short(arm)
        return self._shorts[arm]

    def _short(self, arm: Arm) -> Short | None:
        shard, floors = self.shard, self.shard.floors(self._stored_like(arm))
        if isinstance(floors, Refused):
            return None
        ends = (floors[0].nbytes, floors[1].nbytes)
        lean, host_bytes = shard.stored(arm, ends, floors[1].pinned)
        cut = arm.whole != arm  # pieces have other transients
        peak_bytes = peak_bound(shard.columns, lean) if cut else self._above(lean, None)
        device = shard.wide(arm, peak_bytes - shard.rounding_bytes(arm) - shard.usable_bytes)
        host = host_bytes - shard.problem.cost.host_room_bytes
        return Short(device, host, _falls(device, host))

    def _stored_like(self, arm: Arm) -> Arm:
        """The arm whose floors are those of an arm: the arm without its pieces, where these alone
        change nothing of what is stored."""
        return arm.whole if arm.whole != arm and self._only_cuts(arm.cutting) else arm

    def _only_cuts(self, pieces: Arm) -> bool:
        """Whether methods that compute in pieces leave what layers store as it is."""
        return self.shard.floors(pieces) == self.shard.floors(KEEP)

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
            gone = self._gone_bytes(pieces)
            both = (*lean.parts, *(pieces.parts if pieces else ()))
            found = self.shard.probe(lean if gone else Arm(both))
            if isinstance(found, Refused):
                return self.of_all(pieces)
            lines = (
                line._replace(base=_less(line.base, nbytes))
                for line, nbytes in zip(found.nbytes, gone or [0.0] * 3, strict=True)
            )
            return self._above(Facts._make(lines), pieces)
        keep = self.shard.probe(KEEP)
        assert isinstance(keep, Probe)
        lines = (line._replace(base=no_cost(), slope=no_cost()) for line in keep.nbytes)
        return self._above(Facts._make(lines), pieces)

    def _gone_bytes(self, pieces: Arm | None) -> list[float]:
        """Bytes that the chunk of the first, a middle and the last rank no longer keeps in pieces,
        under the plan that keeps everything: as the statistics of a loss that is rebuilt by piece.
        No plan keeps less than its own bytes without these.  Empty where that is not known."""
        if pieces is None:
            return [0.0] * 3
        keep, cut = self.shard.probe(KEEP), self.shard.probe(pieces)
        if isinstance(keep, Refused) or isinstance(cut, Refused) or not self._only_cuts(pieces):
            return []
        lines = zip(keep.nbytes, cut.nbytes, strict=True)
        return [whole.base.kept_bytes - own.base.kept_bytes for whole, own in lines]

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
