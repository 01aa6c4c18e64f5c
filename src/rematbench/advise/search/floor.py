"""Bytes that a plan keeps and copies, from the fates of its tensors alone.

A probe lowers blocks to know what a pass needs; what lies between a forward and its backward is
known from the fates, in a fifth of the time.  That alone excludes most plans that do not fit.
"""

from typing import NamedTuple

from rematbench.advise.search.kernels import compute_cost
from rematbench.advise.search.passes import ChunkCost
from rematbench.advise.search.pinned import Pinned, by_budget, leaves
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.solve.kept import resolved


class Stored(NamedTuple):
    """What the layers of a rank's chunk store for one micro-batch: bytes on the device, and the
    bytes of each tensor that is copied to the host, the largest first."""

    kept_bytes: int
    copied: tuple[int, ...]

    @property
    def cost(self) -> ChunkCost:
        """A chunk that takes no seconds and needs these bytes alone."""
        none = compute_cost(0.0, 0.0)
        forward = none.forward._replace(net_bytes=float(self.kept_bytes))
        return none._replace(forward=forward, host_bytes=float(sum(self.copied)))


def stored(problem: Problem, plan: Plan) -> list[Stored]:
    """What each rank's first chunk stores at least, over its phases.  PlanError for a plan that
    cannot be lowered because of its fates."""
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


def pinned(plan: Plan, layers: int, chunk: Stored) -> Pinned:
    """The tensors that a chunk of `layers` layers copies to the host."""
    return Pinned(layers, chunk.copied, by_budget(plan))


def copies(plan: Plan) -> bool:
    """Whether a plan may copy activations to the host."""
    return any(leaves(rule.fate) for rule in plan.rules)
