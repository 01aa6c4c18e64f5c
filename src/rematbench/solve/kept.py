"""What a plan leaves whole on the device: the only sites a composed method may still change."""

from rematbench.lowering.chunk_ops import ChunkOps
from rematbench.lowering.fates import PHASES, resolve
from rematbench.operators.ops import Part
from rematbench.plan import Plan
from rematbench.problem import Problem


def kept_activations(problem: Problem, plan: Plan, part: Part = "layer") -> frozenset[str]:
    """Saved activations of a part that some site keeps whole under the plan."""
    tables = {"embedding": (problem.embedding,), "head": (problem.head,)}
    names = {name for t in tables.get(part, problem.layer_kinds) for name in t.saved}
    if not plan.rules:
        return frozenset(names)
    kept: set[str] = set()
    for rank, chunks in enumerate(plan.partition):
        for chunk, layers in enumerate(chunks):
            ops = ChunkOps(problem, rank, chunk, layers)
            for phase in PHASES:
                fates, _ = resolve(plan, ops.sites, phase, 0)
                kept |= {n for (p, _, n), f in fates.items() if p == part and not f.changed}
        if kept == names:
            break
    return frozenset(kept)


def offloaded_activations(problem: Problem, plan: Plan, part: Part = "layer") -> frozenset[str]:
    """Saved activations of a part of which some site leaves the device, all or in part."""
    found: set[str] = set()
    for rank, chunks in enumerate(plan.partition if plan.rules else ()):
        for chunk, layers in enumerate(chunks):
            ops = ChunkOps(problem, rank, chunk, layers)
            for phase in PHASES:
                fates, _ = resolve(plan, ops.sites, phase, 0)
                found |= {n for (p, _, n), f in fates.items() if p == part and f.offload_bytes}
    return frozenset(found)


def kept_layer_bytes(problem: Problem, plan: Plan) -> int:
    """Bytes of tensors with a gradient that the layers of the first chunk keep whole for one
    micro-batch (row statistics and masks are left out, as the published formulas do)."""
    ops = ChunkOps(problem, 0, 0, plan.partition[0][0])
    fates, _ = resolve(plan, ops.sites, "warmup", 0)
    tensors = ops.sites.sites
    return sum(
        tensors[site].nbytes
        for site, fate in fates.items()
        if site[0] == "layer" and not fate.changed and tensors[site].differentiable
    )
