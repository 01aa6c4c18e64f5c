"""Seconds of a pipeline stage with a given number of layers, with the recomputation that the stage
needs."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import fsum

from msgspec.structs import replace

from rematbench.costs.operators.ops import OpTable
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem, gathered_bytes
from rematbench.solve.layer_costs import backward_s, forward_s, layers_in_flight
from rematbench.solve.layer_policies import LayerGroup, heuristic
from rematbench.solve.relocate import Relocation

StageSeconds = Callable[[int, int], float]
"""(rank, layers) -> seconds of one micro-batch on that stage; infinite if it does not fit."""


def balance(counts: Sequence[int], stage_s: StageSeconds) -> tuple[int, ...]:
    """The layer counts after moving single layers away from the slowest stage (the last of equals).
    Each layer moves to the stage that minimises the sorted stage times, until no move reduces
    them."""
    best = tuple(counts)
    times = [stage_s(rank, n) for rank, n in enumerate(best)]
    for _ in range(sum(counts)):
        slowest = max(range(len(best)), key=lambda r: (times[r], r))
        moves = [
            _moved(best, slowest, target)
            for target in range(len(best))
            if target != slowest and best[slowest] > 1
        ]
        scored = [
            (sorted((stage_s(r, n) for r, n in enumerate(m)), reverse=True), m) for m in moves
        ]
        if not scored or min(scored)[0] >= sorted(times, reverse=True):
            break
        best = min(scored)[1]
        times = [stage_s(rank, n) for rank, n in enumerate(best)]
    return best


def _moved(counts: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    return tuple(n - (r == source) + (r == target) for r, n in enumerate(counts))


def contiguous(counts: Sequence[int]) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The partition with `counts` consecutive layers on the ranks, one chunk a rank."""
    bounds = [sum(counts[:rank]) for rank in range(len(counts) + 1)]
    return tuple((tuple(range(first, last)),) for first, last in pairwise(bounds))


def counts_of(plan: Plan) -> tuple[int, ...]:
    return tuple(sum(len(chunk) for chunk in chunks) for chunks in plan.partition)


class StageTimes:
    """The seconds of one micro-batch on a stage, as a function of (rank, number of layers). The
    peak at another number of layers is extrapolated from the base's ledger peaks: each further
    layer adds its states and its inputs in flight."""

    def __init__(self, relocation: Relocation) -> None:
        problem, base = relocation.problem, relocation.base
        table = problem.layer_kinds[0]
        ranks = range(problem.layout.pp)
        self.relocation, self.counts = relocation, counts_of(base)
        every = range(problem.workload.model.num_layers)
        self.in_flight = [
            layers_in_flight(problem, base, rank, every) / self.counts[rank] for rank in ranks
        ]
        self.layer_s = _pass_s(problem)
        self.ends_s = [0.0] * problem.layout.pp
        self.ends_s[0] += fsum(f(problem, problem.embedding) for f in (forward_s, backward_s))
        self.ends_s[-1] += fsum(f(problem, problem.head) for f in (forward_s, backward_s))
        lean = problem.cost.weigh(relocation.smallest_plan(base)).peak_device_bytes
        self.room = [relocation.usable - peak for peak in lean]
        kept_input = table.activations["layer_input"].nbytes
        states = _state_bytes(problem, base, table)
        self.per_layer = [states + kept_input * n for n in self.in_flight]

    def __call__(self, rank: int, layers: int) -> float:
        budget = self.room[rank] - (layers - self.counts[rank]) * self.per_layer[rank]
        group = LayerGroup(layers=layers, in_flight=round(layers * self.in_flight[rank]))
        policy = heuristic(self.relocation.front, (group,), budget)
        if policy.kept_bytes * group.in_flight > budget:
            return float("inf")
        return self.ends_s[rank] + layers * (self.layer_s + policy.exposed_s)


def _pass_s(problem: Problem) -> float:
    indices = range(problem.workload.model.num_layers)
    tables = [problem.layer(index) for index in indices]
    return fsum(forward_s(problem, t) + backward_s(problem, t) for t in tables) / len(tables)


def _state_bytes(problem: Problem, plan: Plan, table: OpTable) -> float:
    """Device bytes of the states of a table's operators on a rank, including whole copies that a
    pipeline holds until its last pass."""
    states, summed = problem.system.states, plan.state("gradient").release == "step"
    held = gathered_bytes(problem) if plan.state("parameter").release == "step" else 0
    sums, gradient = (states.reduce_bytes, 0) if summed else (0, states.grad_bytes)
    widths = {"parameter": states.param_bytes, "gradient": gradient}
    widths["optimizer"] = states.optimizer_bytes
    per = {s.kind: widths[s.kind] / s.shards for s in plan.states if s.home == "device"}
    weights = held + per.pop("parameter", 0.0)
    return weights * table.parameters + (sums + fsum(per.values())) * table.trained


def relocated(
    problem: Problem, base: Plan, *, exact: bool, repartition: bool
) -> Plan | Unsupported:
    """The fastest plan on the base's partition, on the balanced partition, and with recomputation
    in the bubbles of the cool-down.  An `exact` search also considers the heuristic's plan, because
    the solver's linear model of a stage may prefer a plan that is slower for the whole pipeline.
    Unsupported for a job without collectives and messages."""
    lay = problem.layout
    if lay.tp == lay.pp == lay.cp == lay.ulysses == 1:
        return Unsupported("needs tp, cp or pp > 1: there is no communication to hide beside")
    relocation = Relocation(problem, base, exact=exact)
    if relocation.fits(base):
        return base.noting(bound="no-op: the base plan already fits")
    best = _searched(relocation, repartition)
    if exact:
        best = relocation.faster(
            _searched(Relocation(problem, base, exact=False), repartition), best
        )
    bound = "device ledger" if relocation.fits(best) else "no choice fits the device memory"
    return best.noting(bound=bound, layers=", ".join(map(str, counts_of(best))))


def _searched(relocation: Relocation, repartition: bool) -> Plan:
    problem, base = relocation.problem, relocation.base
    best = relocation.fit(base)
    lay = problem.layout
    if repartition and lay.pp > 1 and lay.vpp == 1 and not base.rules:
        times = StageTimes(relocation)
        partition = contiguous(balance(times.counts, times))
        if partition != base.partition:
            moved = relocation.fit(replace(base, partition=partition))
            best = relocation.faster(best, moved)
    for share in (1.0, 0.5, 0.25) if lay.pp > 1 and not base.rules else ():
        best = relocation.faster(best, relocation.with_bubbles_filled(best, share))
    return best
