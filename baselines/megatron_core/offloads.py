"""Tensors that megatron-core 0.16.1 holds for a longer or shorter time than a plan.

The softmax is made in the fp32 copy of the logits, and the gradient of the logits in the softmax;
if the logits are fp32, they are this copy, so all three share one storage
(VocabParallelCrossEntropy).

Tensors are offloaded and reloaded by group: a group is the tensors that one module of one layer
saves. A group is offloaded when the forward of its module is over. (A plan frees the device's copy
when the copy on a separate stream is done; a trace has no streams.) After the backward of a group,
the group that was offloaded last and is not reloaded yet is reloaded. If there is none, a group of
the next chunk is (ChunkOffloadHandler.bulk_reload).
"""

from baselines.megatron_core.plan import MegatronCore
from rematbench.engine.program.action import Action, Alloc, Kind
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.storage import HEAD, HOST, ModelPart, Storage, storage_of

Where = tuple[int, int]
Group = tuple[ModelPart, str]
COMMITS = {
    "qkv": "qkv_linear",
    "attention": "core_attn",
    "proj": "attn_proj",
    "attn_add": "attn_norm",
    "mlp_add": "mlp_norm",
}
"""The module whose group is offloaded after the forward of this operator."""
STARTS = {
    "mlp_norm": "mlp_norm",
    "proj": "attn_proj",
    "attention": "core_attn",
    "qkv": "qkv_linear",
    "attn_norm": "attn_norm",
}
"""The module that starts with this operator. After the operator's backward a group is reloaded."""
VIEWED = ("qkv_before_rope", "qkv_beside_views")
"""Tensors that are alive because core attention's operands are views (stack.py). They are freed
with the operands and not reloaded, because a view is reloaded as a separate tensor."""


class Groups:
    """The offload groups of a rank. Its methods return changes of the device's live bytes."""

    def __init__(self, tensors: dict[str, tuple[str, ...]], rank: RankProgram) -> None:
        """`tensors`: the tensors that each module offloads."""
        self._starts = {op: module for op, module in STARTS.items() if module in tensors}
        self._module_of = {name: module for module in tensors for name in tensors[module]}
        if "core_attn" in tensors:
            self._module_of |= dict.fromkeys(VIEWED, "core_attn")
        backwards = (
            (micro_batch, chunk)
            for action, micro_batch, chunk in rank.actions()
            if action.kind == Kind.BACKWARD_INPUT
        )
        self._waiting = list(dict.fromkeys(backwards)) if tensors else []
        self._held: dict[tuple[Where, Group], dict[Storage, int]] = {}
        self._away: dict[Where, list[Group]] = {}
        self._leaving: set[tuple[Where, Storage]] = set()
        self._over: tuple[Where, Group] | None = None
        self._ended: Where | None = None

    def before(self, action: Action, where: Where) -> int:
        if not self._module_of or action.kind in (Kind.BACKWARD_WEIGHT, Kind.FREE):
            return 0
        change = self._back() - self._commit()
        self._over = self._ended = None
        if action.part.letter != "L":
            return change
        if action.kind == Kind.D2H:
            self._leaving.update((where, storage) for storage in action.reads)
        if action.kind == Kind.FORWARD and action.op in COMMITS:
            self._over = where, (action.part, COMMITS[action.op])
        if action.kind == Kind.BACKWARD_INPUT:
            if where in self._waiting:
                self._waiting.remove(where)
            if action.op in self._starts:
                self._ended = where
                change += self._load(where, (action.part, self._starts[action.op]))
        return change

    def born(self, action: Action, where: Where, alloc: Alloc) -> int:
        group = self._group(alloc.storage)
        if group is None:
            return alloc.nbytes
        if action.kind == Kind.H2D:  # the plan reloads at another time
            return 0
        self._held.setdefault((where, group), {})[alloc.storage] = alloc.nbytes
        return alloc.nbytes

    def dead(self, where: Where, storage: Storage, nbytes: int) -> int:
        """Note a storage that the plan frees; return the bytes that are freed now."""
        group = self._group(storage)
        if group is None:
            return nbytes
        if (where, storage) in self._leaving:  # the plan frees at another time
            self._leaving.remove((where, storage))
            return 0
        return self._held[where, group].pop(storage, 0)

    def _group(self, storage: Storage) -> Group | None:
        part = storage.part
        own = part.letter == "L" and storage is storage_of(part, storage.tensor)
        module = self._module_of.get(storage.tensor) if own else None
        return (part, module) if module else None

    def _commit(self) -> int:
        """Offload the group of the module whose forward is over; return its bytes."""
        tensors = self._held.get(self._over, {}) if self._over else {}
        if self._over is None or not tensors:
            return 0
        where, group = self._over
        self._away.setdefault(where, []).append(group)
        return sum(tensors.values())

    def _load(self, where: Where, group: Group) -> int:
        if group not in self._away.get(where, ()):
            return 0
        self._away[where].remove(group)
        tensors = self._held[where, group]
        for storage in [storage for storage in tensors if storage.tensor in VIEWED]:
            del tensors[storage]
        return sum(tensors.values())

    def _back(self) -> int:
        """Reload the next group after the backward of a group; return its bytes."""
        for chunk in (self._ended, *self._waiting[:1]) if self._ended else ():
            if self._away.get(chunk):
                return self._load(chunk, self._away[chunk][-1])
        return 0


LOGITS, SOFTMAX = storage_of(HEAD, "logits"), storage_of(HEAD, "loss_saved")
MADE_IN = {SOFTMAX: LOGITS, LOGITS.gradient: SOFTMAX}
"""The tensor in whose storage the loss makes another tensor, if both have equally many bytes."""


def activation_peak(policy: MegatronCore, rank: RankProgram) -> int:
    """The rank's peak bytes of activations, in issue order, under a policy's plan."""
    moved = Groups(policy.moved, rank)
    sizes: dict[tuple[Where, Storage | None], int] = {}
    live = peak = 0
    for action, micro_batch, chunk in rank.actions():
        where = micro_batch, chunk
        live += moved.before(action, where)
        for alloc in action.allocs:
            if alloc.storage.place == HOST:
                continue
            sizes[where, alloc.storage] = alloc.nbytes
            live += moved.born(action, where, alloc)
            taken = where, MADE_IN.get(alloc.storage)
            if sizes.get(taken) == alloc.nbytes:  # the new tensor takes over these bytes
                sizes[taken] = 0
                live -= alloc.nbytes
        peak = max(peak, live + action.scratch)
        for freed in action.frees:
            live -= moved.dead(where, freed, sizes.pop((where, freed), 0))
    return peak
