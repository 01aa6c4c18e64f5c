"""Lower bounds of the cost of a plan's passes, read from a program of one or two layers.

A chunk of n layers repeats its layers, so the seconds and bytes of its passes are linear in n.  The
line is read from blocks of `lower`, at two numbers of layers, on a pipeline of four ranks (or of
one) that has the same tensor- and context-parallel groups and the same micro-batch, and no
data-parallel traffic.  No cost rule is written twice, and a user's method has bounds too.

All numbers are lower bounds of the simulator's results for the same plan at any depth, width of
data parallelism and number of micro-batches: streams other than compute are left out, and each copy
has its link to itself.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import floor
from typing import NamedTuple, TypeVar

from rematbench.advise.search.pass_costs import (
    Facts,
    Line,
    behind_embedding,
    compute_cost,
    further,
)
from rematbench.advise.search.probe_problems import (
    Measured,
    ProbePrograms,
    Small,
    copies,
    small_problem,
)
from rematbench.advise.search.space import first_dense
from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic
from rematbench.inputs.layout import LayoutError
from rematbench.plan import Plan, PlanError, Transfers, Unsupported
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem

STEPS = 1024
"""Numbers of a traffic are rounded down to a multiple of 1 / STEPS."""


MORE_LAYERS = (3, 4)
"""Layers of a method's further probes, after a probe with fewer layers gave no plan."""


class Probe:
    """The kinds of change of a method's plan, the plan's transfers, and the bytes that the model's
    end keeps.  `lines`: gives the method's lines, with or without seconds."""

    def __init__(self, measured: Measured, lines: Callable[[CopyTraffic | None], Facts]) -> None:
        self.kinds, self.transfers = measured.kinds, measured.transfers
        self._measurement, self._lines = measured, lines

    @property
    def copies(self) -> bool:
        """Whether the plan may copy activations to the host."""
        return copies(self._measurement.plan)

    @cached_property
    def end_bytes(self) -> tuple[int, ...]:
        """Bytes that the head, with the model's last 0, 1, 2, ... layers, keeps on the device under
        any schedule.  Empty if copies may reach the head, because a method may copy the last chunk
        under some schedules only."""
        return self._measurement.end_bytes()

    @cached_property
    def facts(self) -> Facts:
        """The method's lines without other traffic on the links of its copies."""
        return self._lines(NO_TRAFFIC)

    def with_traffic(self, traffic: CopyTraffic) -> Facts:
        """The method's lines if all copies run with `traffic`, which is rounded down so that
        layouts often share it."""
        return self._lines(CopyTraffic._make(floor(STEPS * number) / STEPS for number in traffic))

    @cached_property
    def nbytes(self) -> Facts:
        """The method's lines without seconds, which are enough for a plan that does not fit."""
        return self._lines(None)


class Refused(NamedTuple):
    """The reason why a method has no plan for a probe; `layers`: the number of layers to try next
    (0: unknown)."""

    reason: str
    layers: int = 0


Reply = TypeVar("Reply")


class Prober:
    """Measures the passes of methods on small problems, which are built once for all methods.
    `layers`: the number of layers measured so far."""

    def __init__(self, problem: Problem, programs: ProbePrograms) -> None:
        self.problem, self.programs = problem, programs
        self.single = problem.layout.pp == 1
        self.dense = first_dense(problem.workload.model)
        self.smalls: dict[tuple[int, ...], Small] = {}
        self.plans: dict[tuple[str, tuple[int, ...]], Plan | Refused] = {}
        self._before: dict[tuple[str, tuple[int, ...]], Plan | Unsupported] = {}
        self._layers: dict[tuple[str, ...], int] = {}  # layers of a probe, by methods and unit
        self.layers = 0

    def __call__(self, method: Composition) -> Probe | Refused:
        """A method's Probe."""
        return self._of_layers(self._one_rank if self.single else self._pipeline, method)

    def floor(self, method: Composition) -> Facts | Refused:
        """Return the lines of the bytes that a method stores, which need no lowering."""
        try:
            return self._of_layers(self._floor_of_one if self.single else self._floor, method)
        except PlanError as error:
            return Refused(str(error))

    def _of_layers(
        self, measure: Callable[[Composition, int], Reply | Refused], method: Composition
    ) -> Reply | Refused:
        """What `measure` finds of a method.  Some methods have no plan for one or two layers, and
        copies by layer repeat only after a few layers: such a method is measured with more, at once
        where the methods needed so many with other settings."""
        unit = unit_of(method)
        names = (*(each.name for each in method.methods), str(unit))
        exchanges = self.single and self.problem.layout.zero_stage > 1
        least = self._layers.get(names, 3 if exchanges else 1)
        fewest = whole(least, unit)
        found = measure(method, fewest)
        for layers in MORE_LAYERS:
            if not isinstance(found, Refused):
                break
            if (more := whole(max(layers, found.layers), unit)) > fewest:
                fewest = more
                found = measure(method, fewest)
        if not isinstance(found, Refused):
            self._layers[names] = fewest
        return found

    def _one_rank(self, method: Composition, fewest: int) -> Probe | Refused:
        unit = unit_of(method)
        begun = self._begun(fewest, unit)
        made, more = (self._measured(method, (layers,)) for layers in (begun, begun + unit))
        if isinstance(made, Refused) or isinstance(more, Refused):
            return made if isinstance(made, Refused) else Refused(str(more))

        def lines(traffic: CopyTraffic | None) -> Facts:
            base = made.cost(0, traffic)
            line = Line(begun, base, further(more.cost(0, traffic), base, unit))
            return Facts(line, line, line)

        return Probe(made, lines)

    def _pipeline(self, method: Composition, fewest: int) -> Probe | Refused:
        unit = unit_of(method)
        sizes = self._sizes(fewest, unit)
        ends = sizes[-1]
        same = self._same_end(method, sizes)
        made = self._measured(method, sizes, end=same is None)
        if isinstance(made, Refused):
            return made
        ended = made
        if same is None and _spares_end(made):
            more = self._measured(method, (sizes[0], fewest, fewest, ends + unit), ranks=(3,))
            if isinstance(more, Refused):
                return more
            ended = more

        def lines(traffic: CopyTraffic | None) -> Facts:
            middle, deeper = (made.cost(rank, traffic) for rank in (1, 2))
            last = (same or made).cost(3, traffic)
            if 0 in made.ranks:
                first = made.cost(0, traffic)
            else:
                keep = self._keeping
                first = behind_embedding(middle, keep.cost(0, traffic), keep.cost(1, traffic))
            slope = ending = further(deeper, middle, unit)
            if same is not None:
                ending = further(same.cost(2, traffic), same.cost(1, traffic), unit)
            elif ended is not made:  # no copies of the last rank's chunk
                ending = further(ended.cost(3, traffic), last, unit)
            return Facts(
                Line(sizes[0], first, slope), Line(fewest, middle, slope), Line(ends, last, ending)
            )

        return Probe(made, lines)

    def _same_end(self, method: Composition, sizes: tuple[int, ...]) -> Measured | None:
        """The plan that a method's last part was added to, where the part copies chunks but changes
        nothing of the last rank's: then both plans have equal blocks there."""
        plan, before = self._planned(method, sizes), Composition(method.methods[:-1])
        if isinstance(plan, Refused) or plan.transfers.granularity != "chunk" or not copies(plan):
            return None
        base = self._planned(before, sizes)
        if isinstance(base, Refused) or not self._small(sizes).ends_alike(plan, base):
            return None
        found = self._measured(before, sizes)
        return None if isinstance(found, Refused) else found

    def _floor_of_one(self, method: Composition, fewest: int) -> Facts | Refused:
        unit = unit_of(method)
        begun = self._begun(fewest, unit)
        made, more = (self._planned(method, (layers,)) for layers in (begun, begun + unit))
        if isinstance(made, Refused) or isinstance(more, Refused):
            return made if isinstance(made, Refused) else Refused(str(more))
        (base,), (longer,) = (
            self._small((layers,)).stored(plan)
            for layers, plan in ((begun, made), (begun + unit, more))
        )
        line = Line(begun, base.cost, further(longer.cost, base.cost, unit))
        return Facts(line, line, line)

    def _floor(self, method: Composition, fewest: int) -> Facts | Refused:
        """The last rank's chunk may keep other tensors where it waits, if any are copied: then it
        has no floor."""
        unit = unit_of(method)
        sizes = self._sizes(fewest, unit)
        plan = self._planned(method, sizes)
        if isinstance(plan, Refused):
            return plan
        found = self._small(sizes).stored(plan)
        first, middle, deeper, last = (chunk.cost for chunk in found)
        slope, nothing = further(deeper, middle, unit), compute_cost(0.0, 0.0)
        ending = (nothing, nothing) if copies(plan) else (last, slope)
        lines = (
            Line(sizes[0], first, slope),
            Line(fewest, middle, slope),
            Line(sizes[-1], *ending),
        )
        return Facts._make(lines)

    def _begun(self, fewest: int, unit: int) -> int:
        """Layers of a probe's first chunk: the model's dense layers before those with experts, and
        as many with experts as another chunk has."""
        return whole(self.dense + fewest, unit)

    def _sizes(self, fewest: int, unit: int) -> tuple[int, ...]:
        """Layers of the ranks of a probe's pipeline."""
        begun = self._begun(fewest, unit)
        return begun, fewest, fewest + unit, whole(min(fewest, 3), unit)

    @cached_property
    def _keeping(self) -> Measured:
        """The plan that keeps everything, in a pipeline."""
        small = self._small((1, 1, 2, 1))
        return Measured(small, small.base, small.ranks)

    def _small(self, sizes: tuple[int, ...]) -> Small:
        if sizes not in self.smalls:
            self.smalls[sizes] = small_problem(self.problem, sizes, self.programs)
        return self.smalls[sizes]

    def _planned(self, method: Composition, sizes: tuple[int, ...]) -> Plan | Refused:
        """A method's plan with `sizes` layers on the ranks."""
        key = (method.text, sizes)
        if key not in self.plans:
            self.plans[key] = self._plan(method, sizes)
        return self.plans[key]

    def _plan(self, method: Composition, sizes: tuple[int, ...]) -> Plan | Refused:
        try:
            plan = self._on_plan_before(method, sizes)
        except (PlanError, LayoutError) as error:
            return Refused(str(error))
        if isinstance(plan, Unsupported):
            return Refused(plan.reason)
        fewest = sizes[0] - self.dense
        if fewest < (layers := _rhythm(plan.transfers)):
            return Refused(f"copies by layer have no rhythm yet after {fewest}", layers)
        return plan

    def _on_plan_before(self, method: Composition, sizes: tuple[int, ...]) -> Plan | Unsupported:
        """A method's plan.  The plan that its last part changes is computed once for all such
        parts."""
        before, small = Composition(method.methods[:-1]), self._small(sizes)
        if not before.methods:
            return method.plan(small.problem, small.base)
        key = (before.text, sizes)
        if key not in self._before:
            self._before[key] = self._on_plan_before(before, sizes)
        base = self._before[key]
        last = Composition(method.methods[-1:])
        return base if isinstance(base, Unsupported) else last.plan(small.problem, base)

    def _measured(
        self,
        method: Composition,
        sizes: tuple[int, ...],
        ranks: Sequence[int] = (),
        *,
        end: bool = True,
    ) -> Measured | Refused:
        """A method's plan with `sizes` layers on the ranks.  Of a pipeline's ranks the given ones
        are lowered, else all but a first rank that is like the second but for the embedding; with
        `end` False not the last one either."""
        small, plan = self._small(sizes), self._planned(method, sizes)
        if isinstance(plan, Refused):
            return plan
        if not ranks:
            spared = not self.single and plan != small.base and small.alike(plan)
            ranks = small.ranks[int(spared) : None if end else -1]
        self.layers += sum(sizes[rank] for rank in ranks)
        try:
            return Measured(small, plan, ranks)
        except (PlanError, LayoutError) as error:
            return Refused(str(error))


def _spares_end(measured: Measured) -> bool:
    """Whether a plan copies chunks, but not that of the last rank."""
    copied = [measured.cost(rank, None).released_bytes for rank in (1, 3)]
    return measured.transfers.granularity == "chunk" and copied[1] == 0 < copied[0]


def unit_of(method: Composition) -> int:
    """The number of layers of which a chunk must have a multiple for a method to have a plan
    (see Method)."""
    return max(getattr(part, "unit", 1) for part in method.methods) if method.methods else 1


def whole(layers: int, unit: int) -> int:
    """The least multiple of `unit` that is no less than `layers`."""
    return -(-layers // unit) * unit


def _rhythm(moves: Transfers) -> int:
    """Layers after which a further layer waits for the copies of an earlier one: copies by layer
    have it once every reload slot is in use.  Passes of more layers take no less for each."""
    return moves.reload_slots + 1 if moves.granularity == "layer" else 1
