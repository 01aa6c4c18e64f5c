"""Policies of a layer: which tensors to rebuild in which windows, by a Pareto front or a MILP.

The formulation is ours (the equations of Lynx, arXiv 2406.08756, could not be read).  A layer has
jobs and windows.  A job rebuilds the saved outputs of one operator.  A window is idle compute
during a tensor-parallel collective in the backward of the layer or of the layer above.  A job is
omitted (its tensors are kept), placed in a window, or placed in the critical path.  Exposed seconds
are work that exceeds a window, work without a window (the top layer of a chunk has no layer above),
and the seconds by which a job and a concurrent collective slow each other.  The policies minimise
exposed seconds under a budget of kept bytes.
"""

from collections.abc import Sequence
from itertools import combinations
from math import fsum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.solve.solver import Row, minimum
from rematbench.solve.windows import LayerWindows, Slot, WindowJob

MAX_NODES = 500
CRITICAL: Slot | None = None
TIE = 1e-4
"""The weight of hidden seconds: of two policies with equal exposed seconds, the one that rebuilds
less is cheaper."""


class Placement(Struct, frozen=True, kw_only=True):
    job: WindowJob
    slot: Slot | None


class StagePolicy(Struct, frozen=True, kw_only=True):
    """The decision for one layer: the recomputed jobs, the kept bytes of one micro-batch, and the
    exposed and hidden seconds in the backward of an average layer of its chunk."""

    placements: tuple[Placement, ...]
    kept_bytes: int
    exposed_s: float
    hidden_s: float

    @property
    def cost_s(self) -> float:
        return self.exposed_s + TIE * self.hidden_s


class LayerGroup(Struct, frozen=True, kw_only=True):
    """The layers of one stage that share a policy.  `in_flight`: the maximum number of (layer,
    micro-batch) pairs of these layers in flight."""

    layers: int
    in_flight: int


def policy_front(layer: LayerWindows, layers_per_chunk: int) -> tuple[StagePolicy, ...]:
    """The policies that no other policy beats in both bytes and seconds, from keep-all down.  The
    candidates are one greedy policy for each set of dropped jobs."""
    found = [
        greedy_policy(layer, dropped, layers_per_chunk)
        for size in range(len(layer.jobs) + 1)
        for dropped in combinations(layer.jobs, size)
    ]
    front: list[StagePolicy] = []
    for policy in sorted(found, key=lambda p: (p.cost_s, p.kept_bytes)):
        if not front or policy.kept_bytes < front[-1].kept_bytes:
            front.append(policy)
    return tuple(front)


def greedy_policy(
    layer: LayerWindows, dropped: Sequence[WindowJob], layers_per_chunk: int
) -> StagePolicy:
    """The policy that places dropped jobs in dataflow order.  Each job goes where it adds the
    fewest exposed seconds; among equal windows, the latest is chosen."""
    room = dict(layer.idle_s)
    placements: dict[str, Placement] = {}
    for job in dropped:
        earliest = _earliest(job, placements)
        choices: list[tuple[float, int, Slot | None]] = [(job.seconds, 1, CRITICAL)]
        for slot in layer.allowed(job) if earliest is not None else ():
            if earliest is not None and slot.order >= earliest:
                exposed = max(0.0, job.seconds - max(0.0, room[slot.op]))
                exposed += (layer.stall + slot.layer_offset / layers_per_chunk) * job.seconds
                choices.append((exposed, -slot.order, slot))
        _, _, chosen = min(choices, key=lambda c: (c[0], c[1]))
        placements[job.op] = Placement(job=job, slot=chosen)
        if chosen is not None:
            room[chosen.op] -= job.seconds
    return policy_of(layer, tuple(placements.values()), layers_per_chunk)


def _earliest(job: WindowJob, placements: dict[str, Placement]) -> int | None:
    """The `order` of the earliest window at which all inputs of a job exist; None if an input is
    rebuilt in the critical path."""
    at = -(10**6)
    for name in job.needs:
        if name in placements:
            slot = placements[name].slot
            if slot is None:
                return None
            at = max(at, slot.order)
    return at


def policy_of(
    layer: LayerWindows, placements: tuple[Placement, ...], layers_per_chunk: int
) -> StagePolicy:
    load = dict.fromkeys(layer.idle_s, 0.0)
    exposed = hidden = 0.0
    for item in placements:
        seconds = item.job.seconds
        if item.slot is None:
            exposed += seconds
            continue
        load[item.slot.op] += seconds
        exposed += (layer.stall + item.slot.layer_offset / layers_per_chunk) * seconds
        hidden += seconds
    exposed += fsum(max(0.0, load[op] - layer.idle_s[op]) for op in load)
    kept = sum(job.nbytes for job in layer.jobs) - sum(item.job.nbytes for item in placements)
    return StagePolicy(placements=placements, kept_bytes=kept, exposed_s=exposed, hidden_s=hidden)


def heuristic(
    front: Sequence[StagePolicy], groups: Sequence[LayerGroup], budget_bytes: float
) -> StagePolicy:
    """The cheapest policy of the front that all layers of a stage can share within a budget; if no
    policy is within the budget, the policy with the fewest kept bytes."""
    in_flight = max(1, sum(group.in_flight for group in groups))
    fitting = [policy for policy in front if policy.kept_bytes * in_flight <= budget_bytes]
    return min(fitting, key=lambda p: (p.cost_s, p.kept_bytes)) if fitting else front[-1]


def optimum(
    layer: LayerWindows, groups: Sequence[LayerGroup], budget_bytes: float, layers_per_chunk: int
) -> tuple[StagePolicy, ...] | None:
    """One policy per group from HiGHS; None if HiGHS reaches the node limit without a solution."""
    if not layer.jobs:  # HiGHS refuses a problem without variables.
        return (policy_of(layer, (), layers_per_chunk),) * len(groups)
    model = _Model(layer, groups, layers_per_chunk)
    found = minimum(
        costs=model.costs(),
        integrality=np.array(model.integer),
        rows=model.rows(budget_bytes),
        lower=np.zeros(model.size),
        upper=np.array(model.upper),
        max_nodes=MAX_NODES,
        gap=1e-3,
    )
    if found is None:
        return None
    return tuple(model.policy(number, found) for number in range(len(groups)))


class _Model:
    """Variables of each group: x[job, window], x[job, critical] (binary), overflow[window] (s)."""

    def __init__(
        self, layer: LayerWindows, groups: Sequence[LayerGroup], layers_per_chunk: int
    ) -> None:
        self.layer, self.groups, self.per_chunk = layer, groups, layers_per_chunk
        self.scale = max((job.seconds for job in layer.jobs), default=1.0) or 1.0
        self.integer: list[int] = []
        self.upper: list[float] = []
        self.x: dict[tuple[int, str, Slot | None], int] = {}
        self.overflow: dict[tuple[int, str], int] = {}
        for number in range(len(groups)):
            for job in layer.jobs:
                for slot in (CRITICAL, *layer.allowed(job)):
                    self.x[number, job.op, slot] = self._add(1, 1.0)
            for op in sorted({slot.op for slot in layer.slots}):
                self.overflow[number, op] = self._add(0, np.inf)
        self.size = len(self.integer)

    def _add(self, integer: int, upper: float) -> int:
        self.integer.append(integer)
        self.upper.append(upper)
        return len(self.integer) - 1

    def costs(self) -> NDArray[np.float64]:
        cost = np.zeros(self.size)
        seconds = {job.op: job.seconds / self.scale for job in self.layer.jobs}
        for (number, job, slot), column in self.x.items():
            hidden = TIE + self.layer.stall
            weight = 1.0 if slot is None else hidden + slot.layer_offset / self.per_chunk
            cost[column] = weight * seconds[job] * self.groups[number].layers
        for (number, _), column in self.overflow.items():
            cost[column] = self.groups[number].layers
        return cost

    def rows(self, budget_bytes: float) -> list[Row]:
        rows: list[Row] = []
        for number in range(len(self.groups)):
            for job in self.layer.jobs:
                rows.append((dict.fromkeys(self._columns(number, job.op), 1.0), 1.0))
                rows += self._precedence(number, job)
            rows += self._capacity(number)
        rows.append(self._budget(budget_bytes))
        return rows

    def _columns(self, number: int, op: str) -> list[int]:
        return [c for (n, job, _), c in self.x.items() if (n, job) == (number, op)]

    def _precedence(self, number: int, job: WindowJob) -> list[Row]:
        """Rows that forbid a job in a window if one of its inputs is recomputed after it."""
        rows = []
        dropped = {other.op for other in self.layer.jobs}
        for slot in self.layer.allowed(job):
            for need in sorted(set(job.needs) & dropped):
                late = [
                    column
                    for (n, op, other), column in self.x.items()
                    if (n, op) == (number, need) and (other is None or other.order > slot.order)
                ]
                rows.append((dict.fromkeys([self.x[number, job.op, slot], *late], 1.0), 1.0))
        return rows

    def _capacity(self, number: int) -> list[Row]:
        rows = []
        seconds = {job.op: job.seconds / self.scale for job in self.layer.jobs}
        for (n, op), column in self.overflow.items():
            if n == number:
                row = {column: -1.0}
                for (m, job, slot), inside in self.x.items():
                    if m == number and slot is not None and slot.op == op:
                        row[inside] = seconds[job]
                rows.append((row, self.layer.idle_s[op] / self.scale))
        return rows

    def _budget(self, budget_bytes: float) -> Row:
        """The budget of kept bytes, in thousandths of all bytes: HiGHS is unreliable if this row is
        small compared with the other rows."""
        nbytes = {job.op: job.nbytes for job in self.layer.jobs}
        total = sum(nbytes.values()) * sum(group.in_flight for group in self.groups) or 1
        row = {
            column: -nbytes[job] * self.groups[number].in_flight * 1000 / total
            for (number, job, _), column in self.x.items()
        }
        return row, 1000 * (max(budget_bytes, 0.0) / total - 1.0)

    def policy(self, number: int, x: NDArray[np.float64]) -> StagePolicy:
        jobs = {job.op: job for job in self.layer.jobs}
        placements = tuple(
            Placement(job=jobs[op], slot=slot)
            for (n, op, slot), column in self.x.items()
            if n == number and x[column] > 0.5
        )
        return policy_of(self.layer, placements, self.per_chunk)
