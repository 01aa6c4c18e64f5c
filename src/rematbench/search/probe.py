"""Lower bounds of the cost of a plan's passes, read from a program of one or two layers.

A chunk of n layers repeats its layers, so the seconds and bytes of its passes are linear in n.  The
line is read from blocks of `lower`, at two numbers of layers, on a pipeline of four ranks (or of
one) that has the same tensor- and context-parallel groups and the same micro-batch, and no
data-parallel traffic.  No cost rule is written twice, and a user's own method has bounds too.

All numbers are lower bounds of what the simulator finds for the same plan at any depth, width of
data parallelism and number of micro-batches: streams beside compute are left out, and each copy has
its link to itself.
"""

from collections.abc import Callable
from dataclasses import replace as replaced
from functools import cached_property
from itertools import accumulate, pairwise
from math import floor
from typing import NamedTuple

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.choose.candidates import changed_kinds, same_plan
from rematbench.cost.copies import ALONE, Crowd
from rematbench.lowering.chunk_ops import ChunkOps
from rematbench.lowering.fates import resolve
from rematbench.lowering.lower import lower
from rematbench.plan import Plan, PlanError, Transfers, Unsupported
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.program.ledger import program_profiles
from rematbench.program.program import Program
from rematbench.search.kernels import placed_alike
from rematbench.search.passes import Chunk, ChunkCost, further
from rematbench.search.pinned import Pinned, leaves, pinned_of
from rematbench.simulate.seconds import ActionCosts
from rematbench.spec.cluster import Cluster
from rematbench.spec.layout import Layout, LayoutError

MICRO_BATCHES = 5
"""Micro-batches of a probe with a pipeline: enough for steady-state passes on every rank."""

STEPS = 1024
"""Numbers of a crowd are rounded down to a multiple of 1 / STEPS."""

MORE_LAYERS = (3, 4)
"""Layers of a method's further probes, after a probe with fewer layers gave no plan."""


class Line(NamedTuple):
    """The costs of a chunk of `layers` layers (`base`), and what each further layer adds."""

    layers: int
    base: ChunkCost
    slope: ChunkCost


class Facts(NamedTuple):
    """Lines of the chunk of the first, a middle and the last rank; all equal for one rank."""

    first: Line
    middle: Line
    last: Line


class Probe:
    """The kinds of change of a method's plan, the plan's transfers, what an inner chunk copies to
    the host, and what the model's end keeps.  `lines`: gives the method's lines, with or without
    seconds."""

    def __init__(
        self, made: "Measured", pinned: Pinned, lines: "Callable[[Crowd | None], Facts]"
    ) -> None:
        self.kinds, self.transfers, self.pinned = made.kinds, made.transfers, pinned
        self._made, self._lines = made, lines

    @property
    def copies(self) -> bool:
        """Whether the plan may copy activations to the host."""
        return any(leaves(rule.fate) for rule in self._made.plan.rules)

    @cached_property
    def end_bytes(self) -> tuple[int, ...]:
        """Bytes that the head, with the model's last 0, 1, 2, ... layers, keeps on the device under
        any schedule: none where copies may reach the head, as a method may copy the last chunk
        under some schedules only."""
        return self._made.end_bytes()

    @cached_property
    def facts(self) -> Facts:
        """The method's lines."""
        return self._lines(ALONE)

    def beside(self, crowd: Crowd) -> Facts:
        """The method's lines where all copies are beside `crowd`, rounded down, so that layouts
        often share it."""
        return self._lines(Crowd._make(floor(STEPS * number) / STEPS for number in crowd))

    @cached_property
    def nbytes(self) -> Facts:
        """The method's lines without seconds, which a plan that does not fit needs not."""
        return self._lines(None)


class Refused(NamedTuple):
    """Why a method has no plan for a probe; `layers`: the number of layers to try the method with,
    where it is known."""

    reason: str
    layers: int = 0


class Lowered:
    """A plan's program for a probe, and the chunk of each of its ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        profiles = program_profiles(program)
        self.chunks = [Chunk(program, rank, own) for rank, own in enumerate(profiles)]


Known = dict[bytes, dict[bytes, Lowered]]
"""Lowered programs by the encoded small problem (without its cluster), then by `same_plan`."""


def alone(layout: Layout, gpus_per_node: int, pp: int) -> Layout:
    """The smallest layout for a probe: the same tensor- and context-parallel groups, `pp` ranks,
    and enough copies of the model to fill whole nodes, each with the micro-batches of a probe."""
    micro_batches = MICRO_BATCHES if pp > 1 else 2
    if pp == 1 and layout.zero_stage > 1:  # every pass gathers or reduces among all replicas
        count = micro_batches * layout.replicas * layout.micro_batch
        return replace(layout, global_batch=count)
    for copies in range(1, gpus_per_node + 1):
        dp = layout.ulysses * copies
        gpus = layout.tp * layout.cp * pp * dp
        if gpus <= gpus_per_node or gpus % gpus_per_node == 0:
            break
    return replace(
        layout,
        pp=pp,
        vpp=1,
        dp=dp,
        zero_stage=1,
        global_batch=micro_batches * copies * layout.micro_batch,
    )


class Prober:
    """Measures the passes of methods on small problems, which are made once for all methods.
    `layers`: the number of layers measured so far."""

    def __init__(self, problem: Problem, known: Known) -> None:
        self.problem, self.known = problem, known
        self.single = problem.layout.pp == 1
        self.smalls: dict[tuple[int, ...], Small] = {}
        self.layers = 0

    def __call__(self, method: Composition) -> Probe | Refused:
        """A method's Probe.  Some methods have no plan for one or two layers, and copies by layer
        repeat only after a few layers: such a method is measured with more layers."""
        least = 3 if self.problem.layout.zero_stage > 1 else 1
        measure = self._one_rank if self.single else self._pipeline
        found = measure(method, least)
        for layers in MORE_LAYERS:
            if not isinstance(found, Refused):
                break
            if max(layers, found.layers) > least:
                least = max(layers, found.layers)
                found = measure(method, least)
        return found

    def _one_rank(self, method: Composition, least: int) -> Probe | Refused:
        made, more = (self._measured(method, (layers,)) for layers in (least, least + 1))
        if isinstance(made, Refused) or isinstance(more, Refused):
            return made if isinstance(made, Refused) else Refused(str(more))

        def lines(crowd: Crowd | None) -> Facts:
            base = made.cost(0, crowd)
            line = Line(least, base, further(more.cost(0, crowd), base))
            return Facts(line, line, line)

        return Probe(made, made.pinned.further(more.pinned), lines)

    def _pipeline(self, method: Composition, least: int) -> Probe | Refused:
        ends = min(least, 3)
        made = self._measured(method, (least, least, least + 1, ends))
        if isinstance(made, Refused):
            return made
        ended = made
        copied = [made.cost(rank, None).released_bytes for rank in (1, 3)]
        if made.transfers.granularity == "chunk" and copied[1] == 0 < copied[0]:
            more = self._measured(method, (least, least, least, ends + 1))
            if isinstance(more, Refused):
                return more
            ended = more

        def lines(crowd: Crowd | None) -> Facts:
            first, middle, deeper, last = (made.cost(rank, crowd) for rank in range(4))
            slope = ending = further(deeper, middle)
            if ended is not made:  # no copies of the last rank's chunk
                ending = further(ended.cost(3, crowd), last)
            return Facts(
                Line(least, first, slope), Line(least, middle, slope), Line(ends, last, ending)
            )

        return Probe(made, made.pinned, lines)

    def _measured(self, method: Composition, sizes: tuple[int, ...]) -> "Measured | Refused":
        """A method's plan with `sizes` layers on the ranks, lowered."""
        if sizes not in self.smalls:
            self.smalls[sizes] = _small(self.problem, sizes, self.known)
        small = self.smalls[sizes]
        try:
            plan = method.plan(small.problem, small.base)
            if isinstance(plan, Unsupported):
                return Refused(plan.reason)
            if sizes[0] < (layers := _rhythm(plan.transfers)):
                return Refused(f"copies by layer have no rhythm yet after {sizes[0]}", layers)
            self.layers += sum(sizes)
            return Measured(small, plan)
        except (PlanError, LayoutError) as error:
            return Refused(str(error))


def _rhythm(moves: Transfers) -> int:
    """Layers after which a further layer waits for the copies of an earlier one: copies by layer
    have it once every reload slot is in use.  Passes of more layers take no less for each."""
    return moves.reload_slots + 1 if moves.granularity == "layer" else 1


class Small(NamedTuple):
    """A probe's problem, the plan that methods begin with, the seconds of its actions by what its
    copies are beside, and by plan its lowered programs and, also by rank and crowd, the costs of
    their chunks with seconds."""

    problem: Problem
    base: Plan
    costs: dict[Crowd, ActionCosts]
    lowered: dict[bytes, Lowered]
    chunks: dict[tuple[bytes, int, Crowd], ChunkCost]


NO_COMMUNICATION = 1e-9
"""Factor on the seconds of a probe's collectives, where a probe's groups may lie worse on nodes
than a layout's groups: a bound may not count them."""


def _same_copies(problem: Problem) -> Cluster:
    """The cluster, on which copies run at the problem's rates with any number of ranks: a probe has
    other ranks on a node, which would share links and DRAM otherwise."""
    alone, both = problem.cost.copy_bytes_per_s(), ALONE._replace(both=1.0)
    return replace(
        problem.cluster,
        pcie_bytes_per_s=alone,
        pcie_gpus_per_link=1,
        dram_bytes_per_s=None,
        d2h_beside_h2d=problem.cost.copy_bytes_per_s("d2h", both) / alone,
        h2d_beside_d2h=problem.cost.copy_bytes_per_s("h2d", both) / alone,
    )


def _small(problem: Problem, sizes: tuple[int, ...], known: Known) -> Small:
    """The problem with `sizes` layers on its ranks and no overlapped traffic between copies of the
    model.  Its programs do not depend on the cluster (no file of lowering reads the cluster)."""
    model = problem.workload.model
    windows = sorted(
        set(model.attention_window), key=lambda window: window or problem.workload.seq_len
    )
    work = replace(
        problem.workload,
        model=replace(
            model, num_layers=sum(sizes), attention_window=tuple(windows[:1]) * sum(sizes)
        ),
    )
    system = replace(
        problem.system, reduce_overlap=False, gather_overlap=False, p2p_synchronous=False
    )
    if not placed_alike(problem):
        scales = replace(system.scales, communication=NO_COMMUNICATION)
        system = replace(system, scales=scales)
    small = replaced(
        problem,
        workload=work,
        cluster=_same_copies(problem),
        system=system,
        layout=alone(problem.layout, problem.cluster.gpus_per_node, len(sizes)),
        _memo={},
        _weights={},
    )
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    partition = tuple((tuple(range(a, b)),) for a, b in pairwise(ends))
    base = replace(small.base_plan, partition=partition)
    same = encode((work, system, small.layout, small.attention, sizes))
    return Small(small, base, {}, known.setdefault(same, {}), {})


class Measured:
    """A plan of a small problem, lowered: its kinds of change, its transfers, and what the chunk of
    the second rank (or of the only one) copies to the host."""

    def __init__(self, small: Small, plan: Plan) -> None:
        self.small, self.plan, self.same = small, plan, same_plan(plan)
        if self.same not in small.lowered:
            small.lowered[self.same] = Lowered(lower(plan, small.problem))
        self.kinds, self.transfers = changed_kinds(small.base, plan), plan.transfers
        self.pinned = pinned_of(plan, small.lowered[self.same].program)

    def end_bytes(self) -> tuple[int, ...]:
        """Bytes that the head, with the last 0, 1, 2, ... layers, keeps on the device in every
        pass; none where copies may reach the head."""
        selects = [rule.select for rule in self.plan.rules]
        reach = [rule.select.parts for rule in self.plan.rules if leaves(rule.fate)]
        if any(parts is None or "head" in parts for parts in reach):
            return (0,)
        if any(select.phases or select.micro_batches for select in selects):
            return (0,)  # other passes may keep less
        problem, plan = self.small.problem, self.plan
        last = plan.partition[-1][-1]
        chunk = ChunkOps(problem, problem.layout.pp - 1, 0, last, plan.mini_sequences, plan.held)
        fates, _ = resolve(plan, chunk.sites, "steady", 0)
        kept = [0] * (len(last) + 1)  # of the head, and of the layers from the last one on
        for (part, layer, _), fate in fates.items():
            kept[0 if part == "head" else len(last) - layer] += fate.keep_bytes
        return tuple(accumulate(kept))

    def cost(self, rank: int, crowd: Crowd | None) -> ChunkCost:
        """The costs of a rank's chunk, with seconds where copies are beside `crowd`, or without
        seconds."""
        small, chunk = self.small, self.small.lowered[self.same].chunks[rank]
        if crowd is None:
            return chunk.nbytes
        key = (self.same, rank, crowd)
        if key not in small.chunks:
            if crowd not in small.costs:
                small.costs[crowd] = ActionCosts(small.problem, crowd=crowd)
            small.chunks[key] = chunk.timed(small.costs[crowd])
        return small.chunks[key]
