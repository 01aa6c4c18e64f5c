"""The small problems that probes lower, and the bytes that plans store there."""

from itertools import pairwise
from math import gcd
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.costs.copies import NO_TRAFFIC
from rematbench.engine.lowering.states.state_shards import has_whole_gradients
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System, with_facts
from rematbench.plan import Plan, state_fates
from rematbench.problem import Problem
from rematbench.solve.kept import resolved


class Stored(NamedTuple):
    """The bytes that the layers of a rank's chunk store for one micro-batch: those kept on the
    device, and those of each tensor that is copied to the host, the largest first."""

    kept_bytes: int
    copied: tuple[int, ...]


def stored(problem: Problem, plan: Plan) -> list[Stored]:
    """The fewest bytes that each rank's first chunk stores in any phase.  PlanError if the plan's
    fates cannot be lowered."""
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


MICRO_BATCHES = 5
"""Micro-batches of a probe with a pipeline: enough for steady-state passes on every rank."""


def alone(layout: Layout, gpus_per_node: int, domain: int, pp: int) -> Layout:
    """The smallest layout for a probe: the same tensor- and context-parallel groups, `pp` ranks,
    and enough copies of the model to fill whole nodes and NVLink domains (or to lie inside one),
    each with the micro-batches of a probe.  If that takes more GPUs than the job has, there is one
    copy, whose groups are the job's first ones."""
    micro_batches = MICRO_BATCHES if pp > 1 else 2
    if pp == 1 and layout.zero_stage > 1:  # every pass gathers or reduces among all replicas
        count = micro_batches * layout.replicas * layout.micro_batch
        return replace(layout, global_batch=count, stages="")
    model = layout.tp * layout.cp * layout.ulysses  # these ranks hold one copy of a stage
    block = layout.ep * layout.expert_tp

    def fills(copies: int) -> bool:
        gpus = model * pp * copies
        whole = all(gpus <= unit or gpus % unit == 0 for unit in (gpus_per_node, domain))
        return whole and gpus <= layout.gpus

    fewest = block // gcd(block, model)  # they hold only whole groups of experts
    copies = next(filter(fills, range(fewest, domain * block + 1, fewest)), fewest)
    return replace(
        layout,
        pp=pp,
        vpp=1,
        stages="",
        dp=layout.ulysses * copies,
        shard_degree=0,
        zero_stage=1,
        global_batch=micro_batches * copies * layout.micro_batch,
    )


NO_COMMUNICATION = 1e-9
"""The factor on the seconds of a probe's collectives if a bound must not count them, because the
probe's groups may be placed worse than a layout's, or because longer chunks gather further
ahead."""


def _same_copies(problem: Problem) -> Cluster:
    """The problem's cluster, changed so that copies run at the problem's rates with any number of
    ranks, although a probe has other numbers of ranks per node to share links and DRAM.  NVLink
    domains are as large as the problem's."""
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


def leaves_nodes(problem: Problem) -> bool:
    """Whether tensor-, context- or expert-parallel groups lie on several nodes."""
    lay = problem.layout
    inner = max(lay.tp * lay.cp * lay.ulysses, lay.ep * lay.expert_tp)
    return inner > problem.cost.domain


def _without_overlaps(system: System, layout: Layout) -> System:
    """The stack of a probe, without the traffic between replicas that passes do not wait for.
    Limits of gathers and buckets, which a short chunk does not reach, are set to their minimum."""
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


def placed_alike(problem: Problem) -> bool:
    """Whether tensor-, context- and expert-parallel groups are placed on nodes in the same way in
    every layout: their ranks are neighbours, and each group's size (for experts ep x etp) divides a
    node or is a number of whole nodes."""
    lay, node = problem.layout, problem.cost.domain
    nested = lay.tp * lay.ulysses
    sizes = (lay.tp, nested, nested * lay.cp, lay.ep * lay.expert_tp)
    whole = all(node % size == 0 or size % node == 0 for size in sizes)
    return whole and problem.system.parallel.rank_order[:2] == ("tp", "cp")


def shrunk(problem: Problem, sizes: tuple[int, ...]) -> tuple[Problem, Plan]:
    """The problem with `sizes` layers on its ranks, without overlapped traffic between replicas and
    without prediction layers, and the plan that methods start from.  Its programs do not depend on
    the cluster, because no file of lowering reads it."""
    model, node = problem.workload.model, problem.cluster.gpus_per_node
    windows = sorted(
        set(model.attention_window), key=lambda window: window or problem.workload.seq_len
    )
    narrowest = tuple(windows[:1]) * sum(sizes)
    model = replace(model, num_layers=sum(sizes), attention_window=narrowest, mtp_layers=0)
    lay = alone(problem.layout, node, problem.cost.domain, len(sizes))
    system = _without_overlaps(problem.system, lay)
    if not placed_alike(problem) or system.zero.prefetch_elements or system.zero.whole_buckets:
        scales = replace(system.scales, communication=NO_COMMUNICATION)
        system = replace(system, scales=scales)
    small = problem.remade(
        workload=replace(problem.workload, model=model),
        cluster=_same_copies(problem),
        system=system,
        layout=lay,
    )
    ends = [sum(sizes[:index]) for index in range(len(sizes) + 1)]
    partition = tuple((tuple(range(a, b)),) for a, b in pairwise(ends))
    return small, replace(small.base_plan, partition=partition)
