"""Tensors that Megatron-core 0.16.1 holds at other times than a plan says.

Read in its code and seen in traces at their peaks:

- Offloaded tensors leave and come back group by group (offloads).
- The softmax is made in the fp32 copy of the logits, and the gradient of the logits in the
  softmax. fp32 logits are that copy themselves, so all three share one storage
  (VocabParallelCrossEntropy).
"""

from rematbench.packages.megatron_core import offloads
from rematbench.packages.megatron_core.plan import MegatronCore
from rematbench.program.action import HOST
from rematbench.program.program import RankProgram

MADE_IN = {"H.loss_saved": "H.logits", "d:H.logits": "H.loss_saved"}
"""The storage in which the loss makes a tensor, if both have the same number of bytes."""


def activation_peak(policy: MegatronCore, rank: RankProgram) -> int:
    """The rank's largest sum of activations under a policy's plan: bytes, in issue order."""
    moved = offloads.Groups(policy.moved, rank)
    sizes: dict[tuple[tuple[int, int], str], int] = {}
    live = peak = 0
    for action, micro_batch, chunk in rank.actions():
        where = micro_batch, chunk
        live += moved.before(action, where)
        for alloc in action.allocs:
            if alloc.name.endswith(HOST):
                continue
            sizes[where, alloc.name] = alloc.nbytes
            live += moved.born(action, where, alloc)
            storage = where, MADE_IN.get(alloc.name, "")
            if sizes.get(storage) == alloc.nbytes:  # the new tensor takes over these bytes
                sizes[storage] = 0
                live -= alloc.nbytes
        peak = max(peak, live + action.scratch)
        for name in action.frees:
            live -= moved.dead(where, name, sizes.pop((where, name), 0))
    return peak
