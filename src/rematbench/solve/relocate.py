"""Turns policies of layers into a plan that fits the device.

The solvers' model of memory is linear (kept bytes times layers in flight).  The ledger of the
lowered plan corrects it: the budget of a stage becomes the device bytes that all other tensors
leave free, and the stage is solved again, at most ROUNDS times.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import fsum, inf

from msgspec.structs import replace

from rematbench.engine.lowering.lower import rank_orders
from rematbench.engine.lowering.schedule import phases
from rematbench.plan import Plan, Recompute, Rule, Window
from rematbench.problem import Evaluation, Problem, Weight
from rematbench.solve.kept import holding_inputs, kept_activations, rule_of, with_live_rules
from rematbench.solve.layer_costs import layers_in_flight
from rematbench.solve.layer_policies import (
    LayerGroup,
    Placement,
    StagePolicy,
    heuristic,
    optimum,
    policy_front,
)
from rematbench.solve.windows import LayerWindows, layer_windows

ROUNDS = 6
BEFORE_RECEIVE = Window(op="recv", direction="before_recv")
Layers = tuple[int, ...]


class Stage:
    """One rank of a partition, with its groups of layers; all layers of a group share a policy."""

    def __init__(self, problem: Problem, plan: Plan, rank: int, *, exact: bool) -> None:
        layers = tuple(layer for chunk in plan.partition[rank] for layer in chunk)
        self.groups = _halves(layers) if exact else (layers,)
        self.sizes = tuple(
            LayerGroup(layers=len(g), in_flight=layers_in_flight(problem, plan, rank, g))
            for g in self.groups
        )
        self.exact = exact

    def solve(
        self,
        layer: LayerWindows,
        front: Sequence[StagePolicy],
        budget_bytes: float,
        layers_per_chunk: int,
    ) -> tuple[StagePolicy, ...]:
        """A policy for each group within a budget: one shared policy, or the MILP's policies if
        they cost less."""
        shared = (heuristic(front, self.sizes, budget_bytes),) * len(self.sizes)
        if not self.exact or self.kept_bytes(shared) > budget_bytes:
            return shared
        found = optimum(layer, self.sizes, budget_bytes, layers_per_chunk)
        return found if found and self.cost_s(found) < self.cost_s(shared) else shared

    def kept_bytes(self, policies: Sequence[StagePolicy]) -> int:
        return sum(p.kept_bytes * g.in_flight for p, g in zip(policies, self.sizes, strict=True))

    def cost_s(self, policies: Sequence[StagePolicy]) -> float:
        return fsum(p.cost_s * g.layers for p, g in zip(policies, self.sizes, strict=True))


def _halves(layers: Layers) -> tuple[Layers, ...]:
    """Groups of a half, a quarter, ... of the layers, which can add up to any number."""
    groups = []
    while layers:
        size = (len(layers) + 1) // 2
        groups.append(layers[:size])
        layers = layers[size:]
    return tuple(groups)


@dataclass
class _Limit:
    ceiling: float = inf
    waste: int = 0


class Relocation:
    """Plans for one problem and base.  With `exact` the MILP chooses a policy for each group of a
    stage; otherwise all layers of a stage share one policy."""

    def __init__(self, problem: Problem, base: Plan, *, exact: bool) -> None:
        self.problem, self.base, self.exact = problem, base, exact
        self.usable = problem.usable_bytes - problem.reserve_bytes
        table, lay = problem.layer_kinds[0], problem.layout
        kept = kept_activations(problem, base) - {"layer_input"}
        self.layer = layer_windows(problem, table, kept)
        self.per_chunk = max(1, problem.workload.model.num_layers // lay.num_chunks)
        self._known: dict[tuple[tuple[LayerGroup, ...], float], tuple[StagePolicy, ...]] = {}

    @cached_property
    def front(self) -> tuple[StagePolicy, ...]:
        return policy_front(self.layer, self.per_chunk)

    def stages(self, base: Plan) -> list[Stage]:
        ranks = range(self.problem.layout.pp)
        return [Stage(self.problem, base, rank, exact=self.exact) for rank in ranks]

    def smallest_plan(self, base: Plan) -> Plan:
        """The plan in which every rank drops all tensors that can be rebuilt."""
        stages, least = self.stages(base), min(self.front, key=lambda policy: policy.kept_bytes)
        return self.assemble(base, stages, [(least,) * len(s.groups) for s in stages])

    def assemble(
        self, base: Plan, stages: Sequence[Stage], policies: Sequence[tuple[StagePolicy, ...]]
    ) -> Plan:
        """The plan with the policies as rules.  Before the backward of a chunk's top layer there is
        no layer whose collectives could hide a job, so such jobs run before the receive."""
        tops = self._tops(base)
        where: dict[tuple[tuple[str, ...], Recompute], set[int]] = {}
        for stage, of_stage in zip(stages, policies, strict=True):
            for layers, policy in zip(stage.groups, of_stage, strict=True):
                for item in policy.placements:
                    for layer in layers:
                        key = (item.job.outputs, _fate(item, top=layer in tops))
                        where.setdefault(key, set()).add(layer)
        rules = (rule_of(names, fate, tuple(sorted(g))) for (names, fate), g in where.items())
        dropped = {name for names, _ in where for name in names}
        base = holding_inputs(self.problem, base, dropped, whole=False)
        return with_live_rules(self.problem, base, *rules)

    def _tops(self, plan: Plan) -> set[int]:
        """The last layer of each chunk that receives a gradient from another rank."""
        last = (self.problem.layout.pp - 1, self.problem.layout.vpp - 1)
        return {
            layers[-1]
            for rank, chunks in enumerate(plan.partition)
            for chunk, layers in enumerate(chunks)
            if (rank, chunk) != last
        }

    def fit(self, base: Plan) -> Plan:
        """The fastest plan of all rounds that fits; if none fits, the plan with the fewest kept
        bytes."""
        stages, best = self.stages(base), self.smallest_plan(base)
        peaks = self.problem.cost.weigh(best).peak_device_bytes
        budgets = [float(self.usable - peak) for peak in peaks]
        limits = [_Limit() for _ in stages]
        seen: set[tuple[tuple[StagePolicy, ...], ...]] = set()
        for _ in range(ROUNDS):
            policies = tuple(
                self._solved(stage, budget) for stage, budget in zip(stages, budgets, strict=True)
            )
            if policies in seen:
                break
            seen.add(policies)
            plan = self.assemble(base, stages, policies)
            best = self.faster(best, plan)
            kept = [s.kept_bytes(chosen) for s, chosen in zip(stages, policies, strict=True)]
            budgets = self._budgets(self.problem.cost.weigh(plan), kept, limits)
        return best

    def _solved(self, stage: Stage, budget: float) -> tuple[StagePolicy, ...]:
        """A stage's policies (memoised, because ranks and rounds often have equal budgets)."""
        key = (stage.sizes, budget)
        if key not in self._known:
            self._known[key] = stage.solve(self.layer, self.front, budget, self.per_chunk)
        return self._known[key]

    def _budgets(
        self, weight: Weight | Evaluation, kept: Sequence[int], limits: Sequence["_Limit"]
    ) -> list[float]:
        """Each rank's budget of kept bytes: the device bytes that all other tensors leave free, on
        the fullest rank less the bytes that the allocator wastes.  A budget stays below all numbers
        of kept bytes that did not fit."""
        peaks = weight.peak_device_bytes
        fullest = max(range(len(peaks)), key=lambda rank: peaks[rank])
        waste = weight.reserved_bytes - peaks[fullest]
        limits[fullest].waste = max(limits[fullest].waste, waste)
        budgets = []
        for rank, limit in enumerate(limits):
            room = self.usable - limit.waste - peaks[rank]
            if room < 0:
                limit.ceiling = min(limit.ceiling, kept[rank] - 1.0)
            budgets.append(min(limit.ceiling, room + kept[rank]))
        return budgets

    def fits(self, plan: Plan) -> bool:
        """Whether the device holds the bytes that the fullest rank reserves."""
        return self.problem.cost.headroom_bytes(plan) >= 0

    def faster(self, first: Plan, second: Plan) -> Plan:
        """The faster of two plans that fit; if one does not, the plan that exceeds the device by
        fewer bytes."""

        def merit(plan: Plan) -> tuple[int, float]:
            short = -self.problem.cost.headroom_bytes(plan)
            return (short, 0.0) if short > 0 else (0, self.problem.cost.step_s(plan))

        return min(first, second, key=merit)

    def with_bubbles_filled(self, plan: Plan, share: float) -> Plan:
        """The plan with recomputation moved into the bubbles of the cool-down, where all ranks
        except the last wait for gradients.  The jobs of the top layers of each stage (`share` of a
        chunk) are moved before the receive."""
        orders = rank_orders(plan, self.problem)[:-1]
        waiting = {
            (rank, chunk)  # With a single group of micro-batches, only the last chunk waits.
            for rank, order in enumerate(orders)
            for (_, chunk), phase in phases(order).items()
            if phase == "cooldown"
        }
        chunks = [plan.partition[rank][chunk] for rank, chunk in waiting]
        tops = {
            layer
            for chunk in chunks
            for layer in chunk[len(chunk) - max(1, round(len(chunk) * share)) :]
        }
        added = []
        for rule in plan.rules[len(self.base.rules) :]:
            layers = tuple(sorted(tops & set(rule.select.layers or ())))
            if layers:
                select = replace(rule.select, layers=layers, phases=("cooldown",), kept=False)
                added.append(Rule(select, Recompute(window=BEFORE_RECEIVE)))
        return plan.with_rules(*added)


def _fate(item: Placement, *, top: bool) -> Recompute:
    slot = item.slot
    if top and (slot is None or slot.layer_offset > 0):
        return Recompute(window=BEFORE_RECEIVE)
    if slot is None:
        return Recompute()
    return Recompute(window=Window(slot.op, "backward", slot.layer_offset))
