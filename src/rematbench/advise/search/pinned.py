"""Bytes that pinned blocks in host memory hold beyond the tensors in them."""

from collections import Counter
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rematbench.costs.copies import pinned_block_bytes
from rematbench.engine.program.action import Kind
from rematbench.engine.program.program import Program
from rematbench.plan import MIB, ByteBudget, Fate, Offload, Plan, Split


class Pinned(NamedTuple):
    """The tensors that a chunk of `layers` layers copies to the host, in bytes, the largest first.
    `budget`: whether a share of the bytes leaves (ByteBudget), which takes the tensors in this
    order; None where some tensors leave by a budget and others do not.  `besides`: more layers of
    the chunk, which may copy nothing."""

    layers: int
    sizes: tuple[int, ...]
    budget: bool | None
    besides: int = 0

    def further(self, more: "Pinned") -> "Pinned":
        """What each further layer copies, from a chunk with one layer `more`."""
        added = Counter(more.sizes) - Counter(self.sizes)
        sizes = tuple(sorted(added.elements(), reverse=True))
        return Pinned(more.layers - self.layers, sizes, self.budget, besides=self.layers)

    def more_bytes(self, share: Any, layers: Any) -> Any:
        """Least bytes by which the pinned blocks of a chunk of `layers` layers exceed the tensors
        in them, at a share of the bytes; arrays for arrays.  The block of a tensor that leaves in
        part may exceed nothing."""
        if not self.sizes or self.budget is None:
            return 0.0 * share * layers
        layers = np.maximum(0, layers - self.besides)
        over = [pinned_block_bytes(nbytes) - nbytes for nbytes in self.sizes]
        if not self.budget:
            return sum(over) / self.layers * layers + 0.0 * share
        shares = np.cumsum((0, *self.sizes)) / sum(self.sizes)
        surely = np.where(share < 1.0, share - 2 * MIB * self.layers / sum(self.sizes), 1.0)
        found = np.interp(surely, shares, np.cumsum((0, *over))) / self.layers * layers
        parted = np.searchsorted(shares[1:-1], surely, side="right")
        return np.maximum(0.0, found - np.where(surely < 1.0, np.take(over, parted), 0.0))


NOTHING = Pinned(1, (), False)
"""No tensors."""


def pinned_of(plan: Plan, program: Program) -> Pinned:
    """What the chunk of a program's second rank (or of its only one) copies to the host."""
    rank = min(1, program.pp - 1)
    blocks = [block for block in program.ranks[rank].blocks if block.label in ("D2H", "F")]
    block = next((block for block in blocks if block.label == "D2H"), blocks[0])
    copies = ([a.nbytes] * times for a, times in block.counted() if a.kind is Kind.D2H)
    sizes = sorted(chain.from_iterable(copies), reverse=True)
    return Pinned(sum(map(len, plan.partition[rank])), tuple(sizes), by_budget(plan))


def by_budget(plan: Plan) -> bool | None:
    """Whether what a plan copies to the host leaves by a byte budget; None where a part does."""
    budgets = {isinstance(rule.fate, ByteBudget) for rule in plan.rules if leaves(rule.fate)}
    return next(iter(budgets), False) if len(budgets) < 2 else None


def leaves(fate: Fate) -> bool:
    """Whether a fate may move bytes to the host."""
    return isinstance(fate, Offload | ByteBudget) or (isinstance(fate, Split) and fate.offload > 0)
