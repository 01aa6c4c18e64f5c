"""Lower bounds of the costs of a plan's passes, measured on programs of one or two layers.

A chunk of n layers repeats its layers, so the seconds and bytes of its passes are linear in n.  The
line is read from blocks of `lower`, at two numbers of layers, on a pipeline of four ranks (or of
one) that has the same tensor- and context-parallel groups and the same micro-batch, and no
data-parallel traffic.  No cost rule is written twice, and a user's method has bounds too.

All numbers are lower bounds of the simulator's results for the same plan at any depth, width of
data parallelism and number of micro-batches, because only the compute stream counts and each copy
has its link to itself."""

from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, get_args

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.advise.bounds.lines import (
    Chunk,
    ChunkCost,
    Facts,
    Line,
    Probe,
    Refused,
    Reply,
    behind_embedding,
    compute_cost,
    further,
    no_cost,
)
from rematbench.advise.bounds.small_problems import (
    Stored,
    leaves_nodes,
    placed_alike,
    shrunk,
    stored,
)
from rematbench.costs.copies import CopyTraffic
from rematbench.engine.lowering.blocks.chunk_ops import ChunkFacts, ChunkOps
from rematbench.engine.lowering.blocks.fates import ChunkPlace, covered, phased
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.profile import program_profiles
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.evaluator import same_plan
from rematbench.inputs.layout import LayoutError
from rematbench.plan import VOCABULARY, Phase, Plan, PlanError, Unsupported, leaves
from rematbench.plugins.kinds import changed_kinds, copies
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem


# Why: docs/decisions/advise.md, Have methods formulas of bounds beside their plans?
class Lowered:
    """A plan's program for a probe, and the chunk of each of its ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        profiles = program_profiles(program)
        self.chunks = [Chunk(program, rank, own) for rank, own in enumerate(profiles)]


Content = tuple[bytes, Sequence[int]]
"""The key of a lowered program: the bytes of `same_plan`, and the lowered ranks. The first rank may
be left out, because a rule that matches something there also matches it on the second rank."""


class Plans(NamedTuple):
    """Cached results for the plans of a small problem, independent of its cluster: lowered programs
    by their content, and stored bytes by `same_plan`."""

    lowered: dict[Content, Lowered]
    stored: dict[bytes, list[Stored]]


ProbePrograms = dict[bytes, Plans]
"""Cached results for small problems, by the encoded problem without its cluster."""


class Small(NamedTuple):
    """A small problem for probes: the problem, the plan that methods start from, the costs of
    actions under each traffic on the links of copies, cached results of plans, and the costs of
    chunks with seconds, by plan, rank and traffic."""

    problem: Problem
    base: Plan
    costs: dict[CopyTraffic, ActionCosts]
    programs: Plans
    chunks: dict[tuple[bytes, int, CopyTraffic], ChunkCost]

    def stored(self, plan: Plan) -> list[ChunkCost]:
        """The costs of each rank's first chunk under a plan, with only the bytes that it stores and
        without seconds; PlanError as in `stored`."""
        content = same_plan(plan)
        if content not in self.programs.stored:
            self.programs.stored[content] = stored(self.problem, plan)
        none = no_cost()
        share = min(plan.slices) / sum(plan.slices) if plan.slices else 1.0  # the smallest slice
        return [
            none._replace(
                forward=none.forward._replace(net_bytes=share * kept_bytes),
                host_bytes=share * sum(copied),
            )
            for kept_bytes, copied in self.programs.stored[content]
        ]

    @property
    def ranks(self) -> range:
        return range(len(self.base.partition))

    def alike(self, plan: Plan) -> bool:
        """Whether a plan treats the chunks of the first and the second rank alike.  They then
        differ only by the embedding, which keeps nothing and takes no part in traffic."""
        hosted = self.problem.system.host.optimizer_on_host
        if plan.orders or plan.states != self.base.states or hosted:
            return False
        if self.problem.embedding.saved or plan.partition != self.base.partition:
            return False
        layers = [plan.partition[rank][0] for rank in (0, 1)]
        reached = [
            covered(plan.rules, ChunkPlace(stage=rank, chunk=0, layers=own))
            for rank, own in enumerate(layers)
        ]
        return len(layers[0]) == len(layers[1]) and reached[0] == reached[1]

    def last_chunk(self, plan: Plan) -> ChunkOps:
        """The model's last chunk under a plan."""
        facts = ChunkFacts(plan.mini_sequences, plan.held)
        return ChunkOps.of(self.problem, len(self.ranks) - 1, 0, plan.partition[-1][-1], facts)

    def ends_alike(self, plan: Plan, base: Plan) -> bool:
        """Whether a plan differs from its base only in rules and copies, and neither plan copies
        anything of the last rank's chunk, whose fates are equal under both."""
        if replace(plan, rules=base.rules, transfers=base.transfers, fit=base.fit) != base:
            return False
        rules = (*plan.rules, *base.rules)
        if copies(base) or any(rule.select.micro_batches is not None for rule in rules):
            return False
        chunk = self.last_chunk(plan)
        return all(
            chunk.fates(plan, phase, 0)[0] == chunk.fates(base, phase, 0)[0]
            for phase in (get_args(Phase) if phased(rules) else ("steady",))
        )


class Measured:
    """A plan of a small problem, lowered for some of the ranks, and the kinds of change that it
    makes."""

    def __init__(self, small: Small, plan: Plan, ranks: Sequence[int]) -> None:
        self.small, self.plan, self.same, self.ranks = small, plan, same_plan(plan), ranks
        content = (self.same, tuple(ranks))
        if content not in small.programs.lowered:
            few = ranks[0] > 1 or ranks[-1] < small.ranks[-1]
            program = lower(plan, small.problem, ranks, partly=few)
            small.programs.lowered[content] = Lowered(program)
        self._lowered = small.programs.lowered[content]
        self.kinds = changed_kinds(small.base, plan)

    def end_bytes(self) -> tuple[int, ...]:
        """Bytes that the head, with the last 0, 1, 2, ... layers, keeps on the device in every
        pass; (0,) if copies may reach the head or passes may keep different bytes."""
        selects = [rule.select for rule in self.plan.rules]
        reach = [rule.select.parts for rule in self.plan.rules if leaves(rule.fate)]
        if any(parts is None or "head" in parts for parts in reach):
            return (0,)
        if any(select.phases or select.micro_batches for select in selects):
            return (0,)  # other passes may keep less
        chunk = self.small.last_chunk(self.plan)
        last, (fates, _) = chunk.layers, chunk.fates(self.plan, "steady", 0)
        kept = [0] * (len(last) + 1)  # first the head, then layers from the last on
        for (part, layer, _), fate in fates.items():
            kept[0 if part == "head" else len(last) - layer] += fate.keep_bytes
        return tuple(accumulate(kept))

    def cost(self, rank: int, traffic: CopyTraffic | None) -> ChunkCost:
        """The costs of a rank's chunk: with the seconds under `traffic` alongside its copies, or
        without seconds (None)."""
        small, chunk = self.small, self._lowered.chunks[rank]
        if traffic is None:
            return chunk.nbytes
        key = (self.same, rank, traffic)
        if key not in small.chunks:
            if traffic not in small.costs:
                small.costs[traffic] = ActionCosts(small.problem, crowd=traffic)
            crossing = placed_alike(small.problem) and leaves_nodes(small.problem)
            small.chunks[key] = chunk.timed(small.costs[traffic], crossing=crossing)
        return small.chunks[key]


MORE_LAYERS = (3, 4)
"""The numbers of layers of further probes if a method has no plan for a probe with fewer."""


class Prober:
    """Measures methods on small problems, which are built once for all methods.  `layers`: the
    number of layers lowered so far."""

    def __init__(self, problem: Problem, programs: ProbePrograms) -> None:
        self.problem, self.programs = problem, programs
        self.single = problem.layout.pp == 1
        self.dense = problem.workload.model.first_dense
        self.smalls: dict[tuple[int, ...], Small] = {}
        self.plans: dict[tuple[str, tuple[int, ...]], Plan | Refused] = {}
        self._before: dict[tuple[str, tuple[int, ...]], Plan | Unsupported] = {}
        self._layers: dict[tuple[str, ...], int] = {}  # keyed by methods and unit
        self.layers = 0

    def __call__(self, method: Composition) -> Probe | Refused:
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
        """What `measure` returns for a method.  Some methods have no plan for one or two layers,
        and copies by layer repeat only after a few layers.  Such methods are measured with more
        layers, at once if they needed as many with other settings."""
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

        return Probe(made.plan, made.kinds, made.end_bytes, lines)

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
            elif ended is not made:  # the last rank's chunk is not copied
                ending = further(ended.cost(3, traffic), last, unit)
            return Facts(
                Line(sizes[0], first, slope), Line(fewest, middle, slope), Line(ends, last, ending)
            )

        return Probe(made.plan, made.kinds, made.end_bytes, lines)

    def _same_end(self, method: Composition, sizes: tuple[int, ...]) -> Measured | None:
        """The plan to which a method's last part was added, if that part copies chunks but changes
        nothing on the last rank, where both plans then have equal blocks; otherwise None."""
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
        line = Line(begun, base, further(longer, base, unit))
        return Facts(line, line, line)

    def _floor(self, method: Composition, fewest: int) -> Facts | Refused:
        """The lines of the bytes that a method stores in a pipeline. A method that copies tensors
        has none if the last rank's backward waits, because it may then keep other tensors."""
        unit = unit_of(method)
        sizes = self._sizes(fewest, unit)
        plan = self._planned(method, sizes)
        if isinstance(plan, Refused):
            return plan
        first, middle, deeper, last = self._small(sizes).stored(plan)
        slope, nothing = further(deeper, middle, unit), compute_cost(0.0, 0.0)
        ending = (nothing, nothing) if copies(plan) else (last, slope)
        lines = (
            Line(sizes[0], first, slope),
            Line(fewest, middle, slope),
            Line(sizes[-1], *ending),
        )
        return Facts._make(lines)

    def _begun(self, fewest: int, unit: int) -> int:
        """The layers of a probe's first chunk: the dense layers before those with experts, plus as
        many as another chunk has."""
        return whole(self.dense + fewest, unit)

    def _sizes(self, fewest: int, unit: int) -> tuple[int, ...]:
        begun = self._begun(fewest, unit)
        return begun, fewest, fewest + unit, whole(min(fewest, 3), unit)

    @cached_property
    def _keeping(self) -> Measured:
        """The plan that keeps everything, in a pipeline."""
        small = self._small((1, 1, 2, 1))
        return Measured(small, small.base, small.ranks)

    def _small(self, sizes: tuple[int, ...]) -> Small:
        if sizes not in self.smalls:
            small, base = shrunk(self.problem, sizes)
            same = encode((small.workload, small.system, small.layout, small.attention, sizes))
            plans = self.programs.setdefault(same, Plans({}, {}))
            self.smalls[sizes] = Small(small, base, {}, plans, {})
        return self.smalls[sizes]

    def _planned(self, method: Composition, sizes: tuple[int, ...]) -> Plan | Refused:
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
        if plan.schedule in VOCABULARY:
            return Refused(f"{method.text}: all stages share its vocabulary")
        fewest, moves = sizes[0] - self.dense, plan.transfers
        # A layer waits for the copies of an earlier one once every reload slot is in use.
        layers = moves.reload_slots + 1 if moves.granularity == "layer" else 1
        if fewest < layers:
            return Refused(f"copies by layer do not repeat within {fewest} layers", layers)
        return plan

    def _on_plan_before(self, method: Composition, sizes: tuple[int, ...]) -> Plan | Unsupported:
        """A method's plan.  The plan that its last part changes is computed once and shared."""
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
        """A method's plan with `sizes` layers on the ranks, of which `ranks` are lowered.  By
        default these are all, except a first rank that differs from the second only by the
        embedding and, with `end` False, the last."""
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
    return measured.plan.transfers.granularity == "chunk" and copied[1] == 0 < copied[0]


def unit_of(method: Composition) -> int:
    """The number of which a chunk's layers must be a multiple for a method to have a plan (see
    Method)."""
    return max(getattr(part, "unit", 1) for part in method.methods) if method.methods else 1


def whole(layers: int, unit: int) -> int:
    """The least multiple of `unit` that is no less than `layers`."""
    return -(-layers // unit) * unit
