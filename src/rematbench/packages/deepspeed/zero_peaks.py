"""Memory of a rank under ZeRO during a step, weight by weight, beside the operator table and plan.

A weight's gradient exists when the backward of its operator is over. `reducing` says what DeepSpeed
then holds of the gradient, `whole` which parameters are whole under ZeRO 3. So a peak is at the
loss, at a weight's gradient (most of all when the bucket is reduced), or when a micro-batch ends. A
plan's own gathers and gradient buffers are left out of the walk: ZeRO's take their place.
"""

from collections import Counter

from rematbench.packages.deepspeed import alive, reducing, weights, whole
from rematbench.packages.deepspeed.sizes import Sizes
from rematbench.packages.deepspeed.weights import Weight
from rematbench.program.action import Action
from rematbench.program.program import RankProgram
from rematbench.workload import Model

ZERO_3 = 3


def activation_peak(model: Model, sizes: Sizes, rank: RankProgram) -> int:
    """The rank's largest sum of activations and of what ZeRO holds beside states: bytes."""
    last = max(step.micro_batch for step in rank.steps)
    walk = _Walk(model, sizes, rank)
    for action, micro_batch, chunk in rank.actions():
        walk.reducer.last = micro_batch == last
        walk.alive.before(action)
        for alloc in action.allocs:
            walk.alive.born((micro_batch, chunk, alloc.name), alloc.nbytes, action.kind)
        walk.at(action)
        walk.dead([(micro_batch, chunk, name) for name in action.frees])
    return walk.peak


def module_order(model: Model, rank: RankProgram) -> list[Weight | None]:
    """The modules of the first micro-batch, with their weights, in the order in which they run."""
    of = weights.by_operator(model)
    found: list[Weight | None] = []
    for action, micro_batch, _ in rank.actions():
        forward = alive.direction(action)
        if micro_batch == 0 and forward is not None:
            weighed = of.get((action.part, action.op), ())
            found += whole.modules(action.op, weighed, forward=forward)
    return found


class _Walk:
    """The peak of live bytes, ZeRO's included, in issue order."""

    def __init__(self, model: Model, sizes: Sizes, rank: RankProgram) -> None:
        self.model, self.sizes = model, sizes
        self.peak = 0
        self.alive = alive.Alive(sizes)
        self.reducer = reducing.reducer(model, sizes, self._seen)
        self._of = weights.by_operator(model)
        first = [action for action, micro_batch, _ in rank.actions() if micro_batch == 0]
        self._backward = [
            self._of.get((action.part, action.op), ())
            for action in first
            if alive.direction(action) is False
        ]
        gathers = sizes.stage == ZERO_3 and (sizes.ranks > 1 or sizes.away)
        self._order = module_order(model, rank) if gathers else []
        self._ended: tuple[Weight, ...] = ()
        self._start()

    def _start(self) -> None:
        """Start a micro-batch: no weight is whole yet, and no tile of an operator has run."""
        self._tiles = Counter(self._backward)
        self._whole = whole.Whole(self._order, self.sizes)
        self._over = False

    def at(self, action: Action) -> None:
        """Account for one action; before an operator its modules fetch their weights."""
        forward = alive.direction(action)
        if forward is not None:
            self._end()  # an operator whose operands stay alive, because others read them too
            if forward and self._over:
                self._start()
            weighed = self._of.get((action.part, action.op), ())
            self._ended = () if forward else weighed
            run = whole.modules(action.op, weighed, forward=forward)
            for weight in run if forward else run[:1]:
                self._whole.module()
                self._seen(action.scratch)
                if forward and weight is not None:
                    self._whole.release(weight)
        self._seen(action.scratch)

    def _seen(self, beside: int) -> None:
        gathered = self.sizes.element * self._whole.elements
        self.peak = max(self.peak, self.alive.nbytes + gathered + self.reducer.held + beside)

    def dead(self, keys: list[alive.Key]) -> None:
        """Free tensors; after an operator's operands come the gradients of its weights."""
        self.alive.gone(keys)
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
        """Account for the gradients of an operator's weights, one after another. A table's module
        has no input gradient, so it keeps its weight to the end."""
        self._tiles[ended] -= 1
        tied = self.model.tied_embeddings and ended[0].op == "embedding"
        more = self._tiles[ended] > 0 or (tied and self._backward.count(ended) > 1)
        later = weights.matrices(ended)[1:]
        for weight in ended:
            if weight in later:
                self._whole.module()
            self.reducer.gradient(weight, more=more)
            if weight.output:
                self._whole.release(weight)
