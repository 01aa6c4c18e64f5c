"""From layer policies to a plan that fits: budgets by the ledger, windows as rules, partition.

The memory model of the solvers is linear (kept bytes times layers in flight); what the ledger says
of the lowered plan corrects it: the budget of each stage is set to what the device leaves beside
everything else, and solved again, a bounded number of times.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache

from msgspec.structs import replace

from rematbench.plan import Plan, Recompute, Rule, Select, Window
from rematbench.problem import Problem, rank_parameters
from rematbench.solve.kept import kept_activations
from rematbench.solve.layers import backward_s, forward_s, layers_in_flight
from rematbench.solve.lynx import (
    Group,
    Placed,
    Policy,
    heuristic,
    optimum,
    policy_front,
)
from rematbench.solve.partition import balance, contiguous, counts_of
from rematbench.solve.windows import layer_windows

ROUNDS = 5
BEFORE_RECEIVE = Window(op="recv", direction="before_recv")


class Relocation:
    """Plans for one problem and base: `exact` solves groups of layers by MILP, else one policy per
    stage is taken from the layer's front."""

    def __init__(self, problem: Problem, base: Plan, *, exact: bool) -> None:
        self.problem, self.base, self.exact = problem, base, exact
        self.usable = problem.cluster.usable_bytes
        self.table = problem.layer_kinds[0]
        kept = kept_activations(problem, base) - {"layer_input"}
        makers = {name for name in kept if self.table.producer(name) is not None}
        self.layer = layer_windows(problem, self.table, makers)

    @cached_property
    def per_chunk(self) -> int:
        """Layers of an average chunk."""
        lay = self.problem.layout
        return max(1, self.problem.workload.model.num_layers // lay.num_chunks)

    @cached_property
    def front(self) -> tuple[Policy, ...]:
        """The layer's policies, solved once."""
        return policy_front(self.layer, self.per_chunk)

    @cached_property
    def lean(self) -> Plan:
        """The base with everything dropped that can be rebuilt."""
        return self.assemble(self.base, [[self.front[-1]]] * self.problem.layout.pp, [[]])

    # -- plans ----------------------------------------------------------------------------------

    def groups(self, plan: Plan, rank: int) -> list[tuple[int, ...]]:
        """Layers of a rank that share a policy: halves, quarters, ... so that any number of layers
        can go one way; all of them for the heuristic."""
        layers = tuple(layer for chunk in plan.partition[rank] for layer in chunk)
        if not self.exact:
            return [layers]
        groups = []
        while layers:
            size = (len(layers) + 1) // 2
            groups.append(layers[:size])
            layers = layers[size:]
        return groups

    def solve(self, plan: Plan, rank: int, budget_bytes: float) -> list[Policy]:
        """Policies of a rank's groups within a budget; the MILP never does worse than the front."""
        sizes = self._sizes(plan, rank)
        shared = heuristic(self.front, sizes, budget_bytes)
        policies = [shared] * len(sizes)
        fits = shared.kept_bytes * sum(size.in_flight for size in sizes) <= budget_bytes
        if not self.exact or not fits:
            return policies
        better = optimum(self.layer, sizes, budget_bytes, self.per_chunk)
        if better is not None and _cost(better, sizes) < _cost(policies, sizes):
            policies = list(better)
        return policies

    def _sizes(self, plan: Plan, rank: int) -> list[Group]:
        return [
            Group(layers=len(g), in_flight=layers_in_flight(self.problem, plan, rank, g))
            for g in self.groups(plan, rank)
        ]

    def kept_bytes(self, plan: Plan, rank: int, policies: Sequence[Policy]) -> int:
        """Bytes the policies keep on a rank with all its micro-batches in flight."""
        sizes = self._sizes(plan, rank)
        return sum(p.kept_bytes * g.in_flight for p, g in zip(policies, sizes, strict=True))

    def assemble(
        self, base: Plan, policies: Sequence[Sequence[Policy]], groups: Sequence[Sequence[tuple[int, ...]]]
    ) -> Plan:
        """Rules of every rank's policies; the top layer of a chunk, which no layer's collectives
        precede, is rebuilt before the receive."""
        lay = self.problem.layout
        tops = {c[-1] for r, cs in enumerate(base.partition) for k, c in enumerate(cs)
                if (r, k) != (lay.pp - 1, lay.vpp - 1)}  # fmt: skip
        where: dict[tuple[tuple[str, ...], Recompute], set[int]] = {}
        for rank, of_groups in enumerate(policies):
            members = groups[rank] if len(groups) == lay.pp else self._all_layers(base, rank)
            for policy, layers in zip(of_groups, members, strict=True):
                for item in policy.placed:
                    for layer in layers:
                        key = (item.job.outputs, _fate(item, top=layer in tops))
                        where.setdefault(key, set()).add(layer)
        return base.with_rules(
            *(
                Rule(Select(parts=("layer",), layers=tuple(sorted(layers)), activations=names, kept=True), fate)
                for (names, fate), layers in where.items()
            )
        )

    def _all_layers(self, plan: Plan, rank: int) -> list[tuple[int, ...]]:
        return [tuple(layer for chunk in plan.partition[rank] for layer in chunk)]

    # -- fitting --------------------------------------------------------------------------------

    def fitted(self, base: Plan) -> Plan:
        """The fastest plan found that the ledger says fits; the leanest if none does."""
        pp = self.problem.layout.pp
        best = self.assemble(base, [[self.front[-1]]] * pp, [])
        peaks = self.problem.cost.evaluate(best).peak_device_bytes
        budgets = [float(self.usable - peak) for peak in peaks]
        ceilings = [float("inf")] * pp
        groups = [self.groups(base, rank) for rank in range(pp)]
        seen: set[Plan] = set()
        for _ in range(ROUNDS):
            policies = [self.solve(base, rank, budgets[rank]) for rank in range(pp)]
            plan = self.assemble(base, policies, groups)
            if plan in seen:
                break
            seen.add(plan)
            best = self.better(best, plan)
            peaks = self.problem.cost.evaluate(plan).peak_device_bytes
            for rank in range(pp):
                kept = self.kept_bytes(base, rank, policies[rank])
                if peaks[rank] > self.usable:
                    ceilings[rank] = min(ceilings[rank], kept - 1.0)
                budgets[rank] = min(ceilings[rank], self.usable - (peaks[rank] - kept))
        return best

    def better(self, one: Plan, other: Plan) -> Plan:
        """The faster of two plans that fit; the smaller where not both do."""
        def rank(plan: Plan) -> tuple[float, float]:
            peak, step = self.problem.cost.peak_bytes(plan), self.problem.cost.step_s(plan)
            return (0.0, step) if peak <= self.usable else (float(peak), step)
        return other if rank(other) < rank(one) else one
