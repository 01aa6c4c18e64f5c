"""Memory of a rank under ZeRO during a step, weight by weight, in addition to the operator table
and the plan.

A weight's gradient exists when the backward of its operator is over. `zero_gradients` computes how
many bytes of gradients DeepSpeed then holds, and `zero_weights` which parameters are whole under
ZeRO 3. A peak is therefore at the loss, at a weight's gradient (most often when the bucket is
reduced), or at the end of a micro-batch. ZeRO's gathers and gradient buffers replace those of the
plan. TiledMLP rebuilds its tiles in its backward, one at a time, even in a recomputed layer.
"""

from collections import Counter

from baselines.deepspeed import zero_gradients, zero_sizes, zero_weights
from baselines.deepspeed.zero_sizes import ZERO_3, Sizes, Weight
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.storage import HOST, Role, Storage
from rematbench.workload import Model

Key = tuple[int, int, Storage]
PLAN_STATES = (Role.WEIGHTS, Role.WEIGHT_GRADIENTS)
"""The plan's own gathers and gradient buffers, which are not counted here."""
TILED, LAST = ("up_out", "gate_out", "act_out", "fc2_in"), "fc2"
"""The tensors that TiledMLP rebuilds, and the operator that ends a tile."""


def direction(action: Action) -> bool | None:
    """True for actions of a forward or recomputation, False for those of a backward, else None."""
    if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return True
    kind = Kind.BACKWARD_WEIGHT if action.part == "E" else Kind.BACKWARD_INPUT
    return False if action.kind == kind else None


class Alive:
    """Live bytes of the device, while the actions are passed in issue order."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.nbytes = 0
        self._known: dict[Key, int] = {}
        self._remade: dict[Key, int] = {}
        self._tile: list[Key] = []
        self._tile_ends = False

    def born(self, key: Key, nbytes: int, kind: Kind) -> None:
        """Count a tensor that an action makes or reloads."""
        storage = key[2]
        if storage.place != HOST and storage.role not in PLAN_STATES:
            self._known[key] = nbytes
            self.nbytes += nbytes
            tile = storage.role is Role.ACTIVATION and storage.piece is not None
            remade = self.sizes.tiles_rebuilt and kind == Kind.RECOMPUTE
            if tile and remade and storage.tensor in TILED:
                self._tile.append(key)

    def before(self, action: Action) -> None:
        """Free a finished tile, and count the tile that is rebuilt because the action needs it."""
        if direction(action) is not None:
            if self._tile_ends:
                kept = [key for key in self._tile if key in self._known]
                self._remade |= {key: self._known[key] for key in kept}
                self._tile = []
                self.freed(kept)
            self._tile_ends = action.op == LAST
        if action.kind == Kind.BACKWARD_INPUT and action.op == LAST:
            tile = {alloc.storage.piece for alloc in action.allocs}
            for key in [key for key in self._remade if key[2].piece in tile]:
                self.born(key, self._remade.pop(key), action.kind)

    def freed(self, keys: list[Key]) -> None:
        self.nbytes -= sum(self._known.pop(key, 0) for key in keys)


def activation_peak(model: Model, sizes: Sizes, rank: RankProgram) -> int:
    """The rank's peak bytes of activations and of ZeRO's tensors other than states."""
    last = max(step.micro_batch for step in rank.steps)
    walk = _Walk(model, sizes, rank)
    for action, micro_batch, chunk in rank.actions():
        walk.reducer.last = micro_batch == last
        walk.alive.before(action)
        for alloc in action.allocs:
            walk.alive.born((micro_batch, chunk, alloc.storage), alloc.nbytes, action.kind)
        walk.at(action)
        walk.dead([(micro_batch, chunk, freed) for freed in action.frees])
    return walk.peak


def module_order(model: Model, rank: RankProgram) -> list[Weight | None]:
    """The modules of the first micro-batch, with their weights, in the order in which they run."""
    of = zero_sizes.by_operator(model)
    found: list[Weight | None] = []
    for action, micro_batch, _ in rank.actions():
        forward = direction(action)
        if micro_batch == 0 and forward is not None:
            weighed = of.get((action.part, action.op), ())
            found += zero_weights.modules(action.op, weighed, forward=forward)
    return found


class _Walk:
    """The peak of live bytes, ZeRO's included, while the actions are passed in issue order."""

    def __init__(self, model: Model, sizes: Sizes, rank: RankProgram) -> None:
        self.model, self.sizes = model, sizes
        self.peak = 0
        self.alive = Alive(sizes)
        self.reducer = zero_gradients.reducer(model, sizes, self._note)
        self._of = zero_sizes.by_operator(model)
        first = [action for action, micro_batch, _ in rank.actions() if micro_batch == 0]
        self._backward = [
            self._of.get((action.part, action.op), ())
            for action in first
            if direction(action) is False
        ]
        gathers = sizes.stage == ZERO_3 and (sizes.ranks > 1 or sizes.params_on_host)
        self._order = module_order(model, rank) if gathers else []
        self._ended: tuple[Weight, ...] = ()
        self._start()

    def _start(self) -> None:
        """Start a micro-batch: no weight is whole yet, and no tile of an operator has run."""
        self._tiles = Counter(self._backward)
        self._whole = zero_weights.Whole(self._order, self.sizes)
        self._over = False

    def at(self, action: Action) -> None:
        """Count the bytes of one action; before an operator its modules fetch their weights."""
        forward = direction(action)
        if forward is not None:
            self._end()  # other readers keep the operator's operands alive
            if forward and self._over:
                self._start()
            weighed = self._of.get((action.part, action.op), ())
            self._ended = () if forward else weighed
            run = zero_weights.modules(action.op, weighed, forward=forward)
            for weight in run if forward else run[:1]:
                self._whole.module()
                self._note(action.scratch)
                if forward and weight is not None:
                    self._whole.release(weight)
        self._note(action.scratch)

    def _note(self, extra: int) -> None:
        gathered = self.sizes.element * self._whole.elements
        self.peak = max(self.peak, self.alive.nbytes + gathered + self.reducer.held + extra)

    def dead(self, keys: list[Key]) -> None:
        """Free tensors. If an operator's operands are freed, count its weights' gradients."""
        self.alive.freed(keys)
        if keys:
            self._end()

    def _end(self) -> None:
        ended, self._ended = self._ended, ()
        if ended:
            self._gradients(ended)
        if ended and ended[0].op == "embedding" and not ended[-1].output:
            self.reducer.end()
            self._over = True

    def _gradients(self, ended: "tuple[Weight, ...]") -> None:
        """Count the gradients of an operator's weights, one after another. The weight of an
        embedding table is not released, because its module has no input gradient."""
        self._tiles[ended] -= 1
        tied = self.model.tied_embeddings and ended[0].op == "embedding"
        more = self._tiles[ended] > 0 or (tied and self._backward.count(ended) > 1)
        later = zero_sizes.matrices(ended)[1:]
        for weight in ended:
            if weight in later:
                self._whole.module()
            self.reducer.gradient(weight, more=more)
            if weight.output:
                self._whole.release(weight)
