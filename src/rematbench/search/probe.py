"""What a pass of a plan costs at least, read from a program of one or two layers.

A chunk of n layers repeats its layers, so what its passes take and keep is a line in n.  The line
is read from blocks of the one lowering (`lower`), at two numbers of layers, on a pipeline of four
ranks (or of one) that has the same tensor- and context-parallel groups and the same micro-batch,
and no data-parallel traffic.  Nothing is said twice, and a method of a user's own has bounds too.

Everything here is a lower bound of what the simulator does with the same plan at any depth, width
of data parallelism and number of micro-batches: streams beside compute are left out, copies have
their link to themselves.
"""

from collections.abc import Iterator
from dataclasses import replace as replaced
from math import fsum
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.choose.candidates import Kind as Change
from rematbench.choose.candidates import changed_kinds
from rematbench.lowering.lower import lower
from rematbench.plan import Plan, PlanError, Unsupported
from rematbench.plugins.registry import Composition
from rematbench.problem import Problem
from rematbench.program.action import Kind
from rematbench.program.ledger import Profile, pool_bytes, program_profiles
from rematbench.program.program import Program
from rematbench.simulate.max_plus import COMPUTE, HOST, Macro, macro_of
from rematbench.simulate.seconds import ActionCosts
from rematbench.simulate.step import compile_block
from rematbench.spec.layout import Layout, LayoutError

RANKS = 4
"""Pipeline ranks of a probe: a first, two middle ones of different depth, a last."""

MICRO_BATCHES = 5
"""Enough for passes of the steady state on every rank."""


class PassCost(NamedTuple):
    """One pass of a chunk: seconds that compute takes from when it is free, and from when the host
    begins to issue; seconds of the host; device bytes that it leaves, and its highest above
    entry."""

    compute_s: float
    issued_s: float
    host_s: float
    net_bytes: int
    high_bytes: int

    def least(self, other: "PassCost") -> "PassCost":
        """The lower of two in everything."""
        return PassCost(*(min(a, b) for a, b in zip(self, other, strict=True)))


class ChunkCost(NamedTuple):
    """A chunk's two passes, what a copied chunk's release frees after the forward, seconds of its
    copies to the host and the bytes there, and bytes of its rank's staging pools."""

    forward: PassCost
    backward: PassCost
    released_bytes: int
    copied_s: float
    host_bytes: int
    pool_bytes: int

    @property
    def kept_bytes(self) -> int:
        """Device bytes between forward and backward."""
        return self.forward.net_bytes - self.released_bytes


class Line(NamedTuple):
    """A chunk of `layers` layers, and what one layer more adds."""

    layers: int
    base: ChunkCost
    slope: ChunkCost


class Facts(NamedTuple):
    """Lines of the first, a middle and the last rank's chunk (of one rank: three times the same).
    """

    first: Line
    middle: Line
    last: Line


class Probe(NamedTuple):
    """A method's lines, and the kinds of things that its plan changes."""

    facts: Facts
    kinds: frozenset[Change]


class Refused(NamedTuple):
    """Why a method has no plan here."""

    reason: str


def alone(layout: Layout, gpus_per_node: int, pp: int) -> Layout:
    """The smallest layout with the same tensor- and context-parallel groups and `pp` ranks that
    fills nodes, every copy of the model with as many micro-batches as a probe wants."""
    micro_batches = MICRO_BATCHES if pp > 1 else 2
    if pp == 1 and layout.zero_stage > 1:  # each pass gathers, or reduces, among all of them
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
    """Measures methods on the problem's shards of a layer; small problems, with what they know of
    costs, serve every method."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.single = problem.layout.pp == 1
        self.smalls: dict[tuple[int, ...], Small] = {}

    def __call__(self, method: Composition) -> Probe | Refused:
        """A method's lines."""
        made: list[Measured | Refused] = []
        for least in (1, 3):  # some methods leave the model's last layers alone
            sizes = [(least,), (least + 1,)] if self.single else [(least, least, least + 1, least)]
            made = [_measured(self._small(each), method) for each in sizes]
            found = [one for one in made if isinstance(one, Measured)]
            if len(found) == len(sizes):
                return self._lines(least, found)
        return next(one for one in made if isinstance(one, Refused))

    def _small(self, sizes: tuple[int, ...]) -> "Small":
        if sizes not in self.smalls:
            self.smalls[sizes] = _small(self.problem, sizes)
        return self.smalls[sizes]

    def _lines(self, least: int, found: list["Measured"]) -> Probe:
        kinds = found[0].kinds
        if self.single:
            (base,), (deeper,) = (one.chunks for one in found)
            line = Line(least, base, _minus(deeper, base))
            return Probe(Facts(line, line, line), kinds)
        first, middle, deeper, last = found[0].chunks
        slope = _minus(deeper, middle)
        return Probe(Facts(*(Line(least, one, slope) for one in (first, middle, last))), kinds)


def _minus(more: ChunkCost, less: ChunkCost) -> ChunkCost:
    """What a layer adds; a highest point is not extrapolated."""

    def passes(a: PassCost, b: PassCost) -> PassCost:
        lines = (x - y for x, y in zip(a[:4], b[:4], strict=True))
        return PassCost(*lines, 0)  # type: ignore[arg-type]  # four differences of a pass

    rest = (x - y for x, y in zip(more[2:], less[2:], strict=True))
    return ChunkCost(
        passes(more.forward, less.forward), passes(more.backward, less.backward), *rest
    )  # type: ignore[arg-type]  # differences of the other fields


class Small(NamedTuple):
    """A probe's problem and the plan that methods begin with."""

    problem: Problem
    base: Plan


def _small(problem: Problem, sizes: tuple[int, ...]) -> Small:
    """The problem with so many layers on its ranks and nothing between copies of the model."""
    model = problem.workload.model
    windows = model.attention_window[: sum(sizes)]
    work = replace(
        problem.workload,
        model=replace(model, num_layers=sum(sizes), attention_window=windows),
    )
    system = replace(problem.system, reduce_overlap=False, gather_overlap=False)
    small = replaced(
        problem,
        workload=work,
        system=system,
        layout=alone(problem.layout, problem.cluster.gpus_per_node, len(sizes)),
        _memo={},
        _weights={},
    )
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    partition = tuple((tuple(range(a, b)),) for a, b in zip(ends, ends[1:], strict=False))
    return Small(small, replace(small.base_plan, partition=partition))


class Measured(NamedTuple):
    """The chunk of every rank, and the kinds of things that the plan changes."""

    chunks: list[ChunkCost]
    kinds: frozenset[Change]


def _measured(small: Small, method: Composition) -> Measured | Refused:
    """The chunks under the method's plan."""
    try:
        plan = method.plan(small.problem, small.base)
        if isinstance(plan, Unsupported):
            return Refused(plan.reason)
        program = lower(plan, small.problem)
    except (PlanError, LayoutError) as error:
        return Refused(str(error))
    costs, profiles = ActionCosts(small.problem), program_profiles(program)
    chunks = [_chunk(program, rank, costs, profiles[rank]) for rank in range(program.pp)]
    return Measured(chunks, changed_kinds(small.base, plan))


def _chunk(
    program: Program, rank: int, costs: ActionCosts, profiles: list[Profile]
) -> ChunkCost:
    blocks = program.ranks[rank].blocks
    named = [(block.label, block, profile) for block, profile in zip(blocks, profiles, strict=True)]
    copied = [
        fsum(costs(action, rank) for action in block.actions if action.kind is Kind.D2H)
        for label, block, _ in named
        if label == "D2H"
    ]
    freed = [profile.device_net for label, _, profile in named if label == "free_d2h"]
    inside = (profile.host_net for label, _, profile in named if label == "F")
    beside = (profile.host_net for label, _, profile in named if label == "D2H")

    def passes(wanted: str) -> PassCost:
        return _least(
            pass_cost(macro_of(compile_block(block, rank, costs)), profile)
            for label, block, profile in named
            if label == wanted
        )

    return ChunkCost(
        forward=passes("F"),
        backward=passes("B"),
        released_bytes=max((-nbytes for nbytes in freed), default=0),
        copied_s=min(copied, default=0.0),
        host_bytes=min(inside) + min(beside, default=0),
        pool_bytes=pool_bytes(program.ranks[rank]),
    )


def _least(costs: Iterator[PassCost]) -> PassCost:
    found = next(costs)
    for cost in costs:
        found = found.least(cost)
    return found


def pass_cost(macro: Macro, profile: Profile) -> PassCost:
    """A block's paths that begin and end at compute or at the host, and its bytes."""
    ends = {target: dict(terms) for target, terms in macro.streams}
    compute = ends.get(COMPUTE, {})
    return PassCost(
        compute_s=compute.get(COMPUTE, 0.0),
        issued_s=compute.get(HOST, 0.0),
        host_s=ends.get(HOST, {}).get(HOST, 0.0),
        net_bytes=profile.device_net,
        high_bytes=profile.device_high,
    )
