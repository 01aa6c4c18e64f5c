"""Small problems that probes lower, the tensors that plans store there, and chunk costs.

A probe lowers blocks to find the costs of a pass.  The tensors stored between a forward and its
backward follow from their fates alone, in a fifth of the time.  They exclude most plans that do not
fit.
"""

from collections.abc import Sequence
from dataclasses import replace as replaced
from itertools import accumulate, pairwise
from math import gcd
from typing import NamedTuple, get_args

from msgspec.json import encode
from msgspec.structs import replace

from rematbench.advise.compare.compositions import changed_kinds
from rematbench.advise.search.pass_costs import Chunk, ChunkCost, compute_cost, placed_alike
from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import ChunkPlace, covered, phased
from rematbench.engine.lowering.lower import lower
from rematbench.engine.lowering.states.state_shards import has_whole_gradients
from rematbench.engine.program.profile import program_profiles
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.evaluator import same_plan
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System, with_facts
from rematbench.plan import ByteBudget, Fate, Offload, Phase, Plan, Split
from rematbench.problem import Problem, state_fates
from rematbench.solve.kept import resolved


def leaves(fate: Fate) -> bool:
    """Whether a fate may move bytes to the host."""
    return isinstance(fate, Offload | ByteBudget) or (isinstance(fate, Split) and fate.offload > 0)


class Stored(NamedTuple):
    """The bytes that the layers of a rank's chunk store for one micro-batch: on the device, and per
    tensor copied to the host, the largest first."""

    kept_bytes: int
    copied: tuple[int, ...]

    @property
    def cost(self) -> ChunkCost:
        """The costs of a chunk that takes no seconds and needs only these bytes."""
        none = compute_cost(0.0, 0.0)
        forward = none.forward._replace(net_bytes=float(self.kept_bytes))
        return none._replace(forward=forward, host_bytes=float(sum(self.copied)))


def stored(problem: Problem, plan: Plan) -> list[Stored]:
    """Return the fewest bytes that each rank's first chunk stores in any phase.  Raises PlanError
    if the plan's fates cannot be lowered."""
    kept: dict[int, int] = {}
    copied: dict[int, tuple[int, ...]] = {}
    for ops, fates, _ in resolved(problem, plan, apart=True):
        parts = [
            part
            for unit in ops.layer_unit.values()
            for name, storage, site in ops.saved(unit)
            for part in ops.parts(unit, name, storage, fates[site])
        ]
        stage = ops.sites.stage
        here = sum(part.nbytes for part in parts if not part.offload)
        out = sorted((part.nbytes for part in parts if part.offload), reverse=True)
        kept[stage] = min(here, kept.get(stage, here))
        copied[stage] = min(tuple(out), copied.get(stage, tuple(out)), key=sum)
    return [Stored(kept[stage], copied[stage]) for stage in sorted(kept)]


def copies(plan: Plan) -> bool:
    """Whether a plan may copy activations to the host."""
    return any(leaves(rule.fate) for rule in plan.rules)


MICRO_BATCHES = 5
"""Micro-batches of a probe with a pipeline: enough for steady-state passes on every rank."""


class Lowered:
    """A plan's program for a probe, and the chunk of each of its ranks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        profiles = program_profiles(program)
        self.chunks = [Chunk(program, rank, own) for rank, own in enumerate(profiles)]


Content = tuple[bytes, Sequence[int]]
"""The key of a lowered program: `same_plan`, and the ranks that are lowered.  Rules that
match something on the first rank match it on the second too, where only the first is left out."""


class Plans(NamedTuple):
    """Cached results for the plans of a small problem, independent of its cluster: lowered programs
    by their content, and stored bytes by `same_plan`."""

    lowered: dict[Content, Lowered]
    stored: dict[bytes, list[Stored]]


ProbePrograms = dict[bytes, Plans]
"""Cached results for small problems, by the encoded problem without its cluster."""


def alone(layout: Layout, gpus_per_node: int, domain: int, pp: int) -> Layout:
    """The smallest layout for a probe: the same tensor- and context-parallel groups, `pp` ranks,
    and enough copies of the model to fill whole nodes and NVLink domains (or a part of one), each
    with the micro-batches of a probe.  One copy where only more GPUs than the job's would fill
    them: its groups are the job's first ones."""
    micro_batches = MICRO_BATCHES if pp > 1 else 2
    if pp == 1 and layout.zero_stage > 1:  # every pass gathers or reduces among all replicas
        count = micro_batches * layout.replicas * layout.micro_batch
        return replace(layout, global_batch=count)
    model = layout.tp * layout.cp * layout.ulysses  # ranks of one copy of a stage
    block = layout.ep * layout.expert_tp

    def fills(copies: int) -> bool:
        gpus = model * pp * copies
        whole = all(gpus <= unit or gpus % unit == 0 for unit in (gpus_per_node, domain))
        return whole and gpus <= layout.gpus

    fewest = block // gcd(block, model)  # copies in which whole groups of experts lie
    copies = next(filter(fills, range(fewest, domain * block + 1, fewest)), fewest)
    return replace(
        layout,
        pp=pp,
        vpp=1,
        dp=layout.ulysses * copies,
        shard_degree=0,
        zero_stage=1,
        global_batch=micro_batches * copies * layout.micro_batch,
    )


class Small(NamedTuple):
    """A probe's problem, the plan that methods begin with, the seconds of its actions by the
    traffic during its copies, the cached results of its plans, and the costs of a chunk with
    seconds, by plan, rank and traffic."""

    problem: Problem
    base: Plan
    costs: dict[CopyTraffic, ActionCosts]
    programs: Plans
    chunks: dict[tuple[bytes, int, CopyTraffic], ChunkCost]

    def stored(self, plan: Plan) -> list[Stored]:
        """The bytes that each rank's first chunk stores under a plan; PlanError as in `stored`."""
        content = same_plan(plan)
        if content not in self.programs.stored:
            self.programs.stored[content] = stored(self.problem, plan)
        return self.programs.stored[content]

    @property
    def ranks(self) -> range:
        """All ranks."""
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
        layers, pieces = plan.partition[-1][-1], plan.mini_sequences
        return ChunkOps.of(self.problem, len(self.ranks) - 1, 0, layers, pieces, plan.held)

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


NO_COMMUNICATION = 1e-9
"""Factor on the seconds of a probe's collectives, where a probe's groups may lie worse on nodes
than a layout's groups, or a longer chunk gathers further ahead: a bound may not count them."""


def _same_copies(problem: Problem) -> Cluster:
    """The cluster, on which copies run at the problem's rates with any number of ranks: a probe has
    other ranks on a node, which would share links and DRAM otherwise.  Its NVLink domains are as
    large as the problem's."""
    alone, both = problem.cost.copy_bytes_per_s(), NO_TRAFFIC._replace(two_way_share=1.0)
    return replace(
        problem.cluster,
        pcie_bytes_per_s=alone,
        pcie_gpus_per_link=1,
        dram_bytes_per_s=None,
        nvlink_domain=problem.cost.domain,
        d2h_beside_h2d=problem.cost.copy_bytes_per_s("d2h", both) / alone,
        h2d_beside_d2h=problem.cost.copy_bytes_per_s("h2d", both) / alone,
    )


def _leaves_nodes(problem: Problem) -> bool:
    """Whether tensor-, context- or expert-parallel groups lie on several nodes."""
    lay = problem.layout
    inner = max(lay.tp * lay.cp * lay.ulysses, lay.ep * lay.expert_tp)
    return inner > problem.cost.domain


def _without_overlaps(system: System, layout: Layout) -> System:
    """The stack of a probe: without the traffic between replicas that a pass does not wait for.
    Limits of bytes of gathers and buckets, which a short chunk does not reach, are the least."""
    fates = {fate.kind: fate for fate in state_fates(layout, system)}
    peers = layout.has_peers
    reduces = has_whole_gradients(fates["gradient"], layout)
    gathers = fates["parameter"].gather == "layer"
    bounded = peers and gathers and system.zero.prefetch_elements > 0
    bucketed = peers and reduces and system.zero.whole_buckets
    return with_facts(
        system,
        reduce_overlap=system.zero.reduce_overlap and reduces and peers,
        gather_overlap=system.zero.gather_overlap and gathers and peers,
        p2p_synchronous=False,
        ep_overlap="none" if system.experts.ep_overlap == "none" else "always",
        prefetch_elements=1 if bounded else 0,
        live_elements=1 if bounded else 0,
        whole_buckets=bucketed,
        bucket_bytes=1 if bucketed else system.zero.bucket_bytes,
    )


def small_problem(problem: Problem, sizes: tuple[int, ...], programs: ProbePrograms) -> Small:
    """Return the problem with `sizes` layers on its ranks and no overlapped traffic between
    replicas.  Its programs do not depend on the cluster (no file of lowering reads the cluster)."""
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
    lay = alone(problem.layout, problem.cluster.gpus_per_node, problem.cost.domain, len(sizes))
    system = _without_overlaps(problem.system, lay)
    if not placed_alike(problem) or system.zero.prefetch_elements or system.zero.whole_buckets:
        scales = replace(system.scales, communication=NO_COMMUNICATION)
        system = replace(system, scales=scales)
    small = replaced(
        problem,
        workload=work,
        cluster=_same_copies(problem),
        system=system,
        layout=lay,
        _memo={},
        _weights={},
    )
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    partition = tuple((tuple(range(a, b)),) for a, b in pairwise(ends))
    base = replace(small.base_plan, partition=partition)
    same = encode((work, system, small.layout, small.attention, sizes))
    return Small(small, base, {}, programs.setdefault(same, Plans({}, {})), {})


class Measured:
    """A plan of a small problem with some of its ranks lowered: its kinds of change and its
    transfers."""

    def __init__(self, small: Small, plan: Plan, ranks: Sequence[int]) -> None:
        self.small, self.plan, self.same, self.ranks = small, plan, same_plan(plan), ranks
        content = (self.same, tuple(ranks))
        if content not in small.programs.lowered:
            few = ranks[0] > 1 or ranks[-1] < small.ranks[-1]
            program = lower(plan, small.problem, ranks, partly=few)
            small.programs.lowered[content] = Lowered(program)
        self._lowered = small.programs.lowered[content]
        self.kinds, self.transfers = changed_kinds(small.base, plan), plan.transfers

    def end_bytes(self) -> tuple[int, ...]:
        """Bytes that the head, with the last 0, 1, 2, ... layers, keeps on the device in every
        pass; empty if copies may reach the head."""
        selects = [rule.select for rule in self.plan.rules]
        reach = [rule.select.parts for rule in self.plan.rules if leaves(rule.fate)]
        if any(parts is None or "head" in parts for parts in reach):
            return (0,)
        if any(select.phases or select.micro_batches for select in selects):
            return (0,)  # other passes may keep less
        chunk = self.small.last_chunk(self.plan)
        last, (fates, _) = chunk.layers, chunk.fates(self.plan, "steady", 0)
        kept = [0] * (len(last) + 1)  # of the head, and of the layers from the last one on
        for (part, layer, _), fate in fates.items():
            kept[0 if part == "head" else len(last) - layer] += fate.keep_bytes
        return tuple(accumulate(kept))

    def cost(self, rank: int, traffic: CopyTraffic | None) -> ChunkCost:
        """The costs of a rank's chunk, with seconds if `traffic` runs alongside its copies, or
        without seconds."""
        small, chunk = self.small, self._lowered.chunks[rank]
        if traffic is None:
            return chunk.nbytes
        key = (self.same, rank, traffic)
        if key not in small.chunks:
            if traffic not in small.costs:
                small.costs[traffic] = ActionCosts(small.problem, crowd=traffic)
            crossing = placed_alike(small.problem) and _leaves_nodes(small.problem)
            small.chunks[key] = chunk.timed(small.costs[traffic], crossing=crossing)
        return small.chunks[key]
