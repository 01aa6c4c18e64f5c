"""Which tensors of a layer to rebuild, and beside which collective: a front and a MILP.

The formulation is ours (the equations of Lynx, arXiv 2406.08756, could not be read).  A layer is a
set of jobs (rebuild the saved outputs of one operator) and of windows (idle compute beside a
tensor-parallel collective of its own backward or of the layer above).  A job is left out (its
tensors are kept), put into a window, or left in the critical path; what a window cannot hold, and
what has no window (the top layer of a chunk has no layer above), is exposed, and so is what a job
and the collective beside it lose to each other, as Megatron's own overlaps do.  Exposed seconds are
minimised under a budget of kept bytes.
"""

from collections.abc import Sequence
from itertools import combinations
from math import fsum

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.solve.solver import Row, minimum
from rematbench.solve.windows import Job, LayerWindows, Slot

MAX_NODES = 500
CRITICAL: Slot | None = None
TIE = 1e-4
"""Weight of hidden work: between equals, the plan that rebuilds less wins."""


class Placed(Struct, frozen=True, kw_only=True):
    """One job that runs again, in a window or (None) in the critical path."""

    job: Job
    slot: Slot | None


class Policy(Struct, frozen=True, kw_only=True):
    """One layer's decision: the jobs that run again, the bytes still kept for a micro-batch, the
    seconds exposed and hidden in each backward of an average layer of its chunk."""

    placed: tuple[Placed, ...]
    kept_bytes: int
    exposed_s: float
    hidden_s: float

    @property
    def cost_s(self) -> float:
        """What is minimised."""
        return self.exposed_s + TIE * self.hidden_s


class Group(Struct, frozen=True, kw_only=True):
    """Layers of one stage that share a policy: how many, and how many (layer, micro-batch) pairs
    of them are in flight at once."""

    layers: int
    in_flight: int


def policy_front(layer: LayerWindows, layers_per_chunk: int) -> tuple[Policy, ...]:
    """One policy for each set of dropped jobs that no other beats in bytes and seconds, from
    keep-all down: the heuristic's answer for every budget, solved once for all equal layers."""
    found = [
        greedy_policy(layer, dropped, layers_per_chunk)
        for size in range(len(layer.jobs) + 1)
        for dropped in combinations(layer.jobs, size)
    ]
    front: list[Policy] = []
    for policy in sorted(found, key=lambda p: (p.cost_s, p.kept_bytes)):
        if not front or policy.kept_bytes < front[-1].kept_bytes:
            front.append(policy)
    return tuple(front)


def greedy_policy(layer: LayerWindows, dropped: Sequence[Job], layers_per_chunk: int) -> Policy:
    """Put dropped jobs into windows in dataflow order, each where it adds least exposed time (the
    latest such window)."""
    room = dict(layer.idle_s)
    placed: dict[str, Placed] = {}
    for job in dropped:
        earliest = _earliest(job, placed)
        choices: list[tuple[float, int, Slot | None]] = [(job.seconds, 1, CRITICAL)]
        for slot in layer.allowed(job) if earliest is not None else ():
            if earliest is not None and slot.at >= earliest:
                exposed = max(0.0, job.seconds - max(0.0, room[slot.op]))
                exposed += (layer.stall + slot.layer_offset / layers_per_chunk) * job.seconds
                choices.append((exposed, -slot.at, slot))
        _, _, chosen = min(choices, key=lambda c: (c[0], c[1]))
        placed[job.op] = Placed(job=job, slot=chosen)
        if chosen is not None:
            room[chosen.op] -= job.seconds
    return settled(layer, tuple(placed.values()), layers_per_chunk)


def _earliest(job: Job, placed: dict[str, Placed]) -> int | None:
    """Time from which what a job reads is there; None: not before the critical path."""
    at = -(10**6)
    for name in job.needs:
        if name in placed:
            slot = placed[name].slot
            if slot is None:
                return None
            at = max(at, slot.at)
    return at


def settled(layer: LayerWindows, placed: tuple[Placed, ...], layers_per_chunk: int) -> Policy:
    """A policy with its bytes and seconds worked out."""
    load = dict.fromkeys(layer.idle_s, 0.0)
    exposed = hidden = 0.0
    for item in placed:
        seconds = item.job.seconds
        if item.slot is None:
            exposed += seconds
            continue
        load[item.slot.op] += seconds
        exposed += (layer.stall + item.slot.layer_offset / layers_per_chunk) * seconds
        hidden += seconds
    exposed += fsum(max(0.0, load[op] - layer.idle_s[op]) for op in load)
    kept = sum(job.nbytes for job in layer.jobs) - sum(item.job.nbytes for item in placed)
    return Policy(placed=placed, kept_bytes=kept, exposed_s=exposed, hidden_s=hidden)


def heuristic(front: Sequence[Policy], groups: Sequence[Group], budget_bytes: float) -> Policy:
    """The cheapest policy of the front that all layers of a stage can share within a budget; the
    leanest if none fits."""
    in_flight = max(1, sum(group.in_flight for group in groups))
    fitting = [policy for policy in front if policy.kept_bytes * in_flight <= budget_bytes]
    return min(fitting, key=lambda p: (p.cost_s, p.kept_bytes)) if fitting else front[-1]


def optimum(
    layer: LayerWindows,
    groups: Sequence[Group],
    budget_bytes: float,
    layers_per_chunk: int,
    max_nodes: int = MAX_NODES,
) -> tuple[Policy, ...] | None:
    """One policy per group from HiGHS; None if the node limit passes without a solution."""
    if not layer.jobs:  # nothing to choose, and HiGHS refuses a problem without variables
        return (settled(layer, (), layers_per_chunk),) * len(groups)
    model = _Model(layer, groups, layers_per_chunk)
    found = minimum(
        costs=model.costs(),
        integrality=np.array(model.integer),
        rows=model.rows(budget_bytes),
        lower=np.zeros(model.size),
        upper=np.array(model.upper),
        max_nodes=max_nodes,
        gap=1e-3,
    )
    if found is None:
        return None
    return tuple(model.policy(number, found) for number in range(len(groups)))


class _Model:
    """Variables per group: x[job, window], critical[job] (binary), overflow[window] (seconds)."""

    def __init__(self, layer: LayerWindows, groups: Sequence[Group], layers_per_chunk: int) -> None:
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
        """Exposed seconds of all layers, and a little for what is hidden."""
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
        """Once at most, after what it reads, within the windows, within the budget."""
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

    def _precedence(self, number: int, job: Job) -> list[Row]:
        """A job in a window, and one it reads not done by then: not both."""
        rows = []
        dropped = {other.op for other in self.layer.jobs}
        for slot in self.layer.allowed(job):
            for need in sorted(set(job.needs) & dropped):
                late = [
                    column
                    for (n, op, other), column in self.x.items()
                    if (n, op) == (number, need) and (other is None or other.at > slot.at)
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
        """All kept bytes less those of dropped jobs are at most the budget, in thousandths of all
        (HiGHS stumbles where this row is small beside the others)."""
        nbytes = {job.op: job.nbytes for job in self.layer.jobs}
        total = sum(nbytes.values()) * sum(group.in_flight for group in self.groups) or 1
        row = {
            column: -nbytes[job] * self.groups[number].in_flight * 1000 / total
            for (number, job, _), column in self.x.items()
        }
        return row, 1000 * (max(budget_bytes, 0.0) / total - 1.0)

    def policy(self, number: int, x: NDArray[np.float64]) -> Policy:
        """A group's policy from the solver's values."""
        jobs = {job.op: job for job in self.layer.jobs}
        placed = tuple(
            Placed(job=jobs[op], slot=slot)
            for (n, op, slot), column in self.x.items()
            if n == number and x[column] > 0.5
        )
        return settled(self.layer, placed, self.per_chunk)
