"""Memory of ZeRO 2 and 3 during a step, weight by weight: what the operator table and a plan lack.

Three rules of deepspeed 0.19.8, read in its code and seen in traces at their peaks:

- Whole weights: released after their last use, others fetched ahead until 1e9 elements are whole
  (stage3_max_live_parameters; PartitionedParameterCoordinator).
- Gradients go into the reduce bucket as their weights' backward ends; one that no longer fits has
  the bucket reduced first, while it is alive itself (reduce_independent_p_g_buckets...).
- Reducing copies the bucket, partition by partition (reduce_scatter_coalesced), and makes this
  rank's part anew where the sum is in another type (__avg_scatter_grads).

So a peak is at the loss, or at a weight's gradient when the bucket is reduced.  A plan's own
gathers and gradient buffers are left out of the walk: these take their place.  ZeRO 2 has the same
bucket, but makes it with the first gradient and frees it with the last; its parameters are whole,
and the first rank's part of the gradients is made when the last weights' are reduced.
"""

from collections.abc import Iterator
from typing import NamedTuple

from rematbench.action import HOST, Kind
from rematbench.program import RankProgram
from rematbench.workload import Model

MAX_LIVE, PREFETCHED, KEPT_WHOLE = 1_000_000_000, 50_000_000, 100_000
"""stage3_max_live_parameters, _prefetch_bucket_size and _param_persistence_threshold, as DeepSpeed
has them: elements."""
NORM = 8
"""Bytes of an element of which an offloaded optimizer takes the norm, one part at a time."""
OWN = (".parameters", ".gradients")


class Weight(NamedTuple):
    """A matrix: its operator, the output whose gradient it needs, its elements."""

    op: str
    output: str
    elements: int


class Reduction(NamedTuple):
    """The gradient of a weight that finds the bucket full: elements in the bucket then; whether
    they are one gradient; elements of one too large for the bucket, which waits beside it."""

    weight: Weight
    bucket: int
    alone: bool
    beside: int


class Sizes(NamedTuple):
    """Bytes of an element: of weights, of what is reduced; ranks that share; the bucket's elements;
    whether layers are computed again, and whether the optimizer is on the host; of ZeRO 2 bytes of
    this rank's part of the gradients; elements that may be whole, and that are fetched ahead at
    once (0: ZeRO 2, whose parameters are whole anyway)."""

    element: int
    reduced: int
    ranks: int
    bucket: int
    checkpointed: bool
    offloaded: bool = False
    part: int = 0
    max_live: int = MAX_LIVE
    prefetched: int = PREFETCHED


def layer_weights(model: Model) -> tuple[Weight, ...]:
    """A layer's matrices in the order of its forward."""
    h, ffn = model.hidden, model.ffn
    gate = [Weight("fc1", "gate_out", h * ffn)] if model.gated else []
    return (
        Weight("qkv", "q", h * model.q_width),
        Weight("qkv", "k", h * model.kv_width),
        Weight("qkv", "v", h * model.kv_width),
        Weight("proj", "proj_out", model.q_width * h),
        Weight("fc1", "up_out", h * ffn),
        *gate,
        Weight("fc2", "fc2_out", ffn * h),
    )


def head_weight(model: Model) -> Weight:
    """The output projection."""
    return Weight("lm_head", "logits", model.vocab * model.hidden)


def small_elements(model: Model) -> int:
    """Elements of what is never released: norms and biases, at most KEPT_WHOLE each."""
    matrices = model.num_layers * sum(weight.elements for weight in layer_weights(model))
    tables = model.max_positions * model.hidden if model.position == "learned" else 0
    ends = (1 if model.tied_embeddings else 2) * head_weight(model).elements
    return model.parameters - matrices - tables - ends


class Whole:
    """Elements that are whole from the loss on: what is fetched ahead and released in a backward.

    The coordinator fetches ahead before every module, a bucket at most; a layer that is computed
    again is wanted in its forward's order and has as many modules more.
    """

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self.model, self.sizes = model, sizes
        layer = layer_weights(model)
        wanted = layer if sizes.checkpointed else layer[::-1]
        tables = [model.max_positions * model.hidden] if model.position == "learned" else []
        embedding = [] if model.tied_embeddings else [head_weight(model).elements]
        self._order = [head_weight(model).elements]
        self._order += [weight.elements for weight in wanted] * model.num_layers
        self._order += [*tables, *embedding]
        self.fetched = self.elements = 0
        while self.elements < sizes.max_live and self.fetched < len(self._order):
            self._fetch()

    def _fetch(self) -> int:
        size = self._order[self.fetched]
        self.fetched, self.elements = self.fetched + 1, self.elements + size
        return size

    def module(self) -> None:
        """Before a module: fetch ahead."""
        room = min(self.sizes.max_live - self.elements, self.sizes.prefetched)
        while room > 0 and self.fetched < len(self._order):
            room -= self._fetch()

    def layer(self, layer: int) -> None:
        """The backward of a layer starts: all its weights are there."""
        weights = len(layer_weights(self.model))
        needed = 1 + weights * (self.model.num_layers - layer)
        while self.fetched < needed and self.sizes.checkpointed:
            self._fetch()
        for _ in range(weights if self.sizes.checkpointed else 1):
            self.module()

    def release(self, weight: Weight) -> None:
        """Its last use is over."""
        self.elements -= weight.elements


def reductions(model: Model, bucket: int) -> Iterator[tuple[int, Reduction]]:
    """(layer, reduction) of a backward.  Biases come with their layer's norms."""
    small = model.layer_vector_parameters // 2
    norms = {"up_out": Weight("mlp_norm", "mlp_norm", small), "q": Weight("attn_norm", "", small)}
    order: list[tuple[int, Weight]] = []
    if not model.tied_embeddings:
        order.append((model.num_layers, head_weight(model)))
    order.append((model.num_layers, Weight("final_norm", "final_norm", model.hidden)))
    for layer in reversed(range(model.num_layers)):
        for weight in reversed(layer_weights(model)):
            order.append((layer, weight))
            order += [(layer, norms[weight.output])] if weight.output in norms else []
    filled = count = beside = 0
    for layer, weight in order:
        if filled and filled + weight.elements > bucket:
            yield layer, Reduction(weight, filled, count == 1, beside)
            filled = count = beside = 0
        beside += weight.elements if filled + weight.elements > bucket else 0
        filled, count = filled + weight.elements, count + 1


def activation_peak(model: Model, sizes: Sizes, rank: RankProgram) -> int:
    """The rank's largest sum of activations and of what ZeRO 3 holds beside states and bucket."""
    walk = _Walk(model, sizes)
    for action, micro_batch, chunk in rank.actions():
        for alloc in action.allocs:
            walk.born((micro_batch, chunk, alloc.name), alloc.nbytes)
        walk.at(action.kind, action.part, action.op, action.scratch)
        ended = [(micro_batch, chunk, name) for name in action.frees]
        walk.dead(ended)
    return walk.peak


class _Walk:
    """Live bytes in issue order, and their peak with ZeRO 3's."""

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self.model, self.sizes = model, sizes
        self.live, self.peak = 0, 0
        self._known: dict[tuple[int, int, str], int] = {}
        self._due = {(at, due.weight.output): due for at, due in reductions(model, sizes.bucket)}
        self._whole = Whole(model, sizes)
        self._layer, self._waiting = model.num_layers, 0
        self._ended: tuple[Weight, ...] = ()
        self._buckets, self._left = 0, model.parameters

    def _start(self) -> None:
        """Another micro-batch: what the last one's backward held is gone."""
        self.live -= self._waiting
        self._whole = Whole(self.model, self.sizes)
        self._layer, self._waiting, self._buckets = self.model.num_layers, 0, 0

    def born(self, key: tuple[int, int, str], nbytes: int) -> None:
        """A tensor of the device that is not the plan's own gather."""
        if not key[2].endswith((HOST, *OWN)):
            self._known[key] = nbytes
            self.live += nbytes

    def at(self, kind: Kind, part: str, op: str, scratch: int) -> None:
        """One action runs."""
        if kind == Kind.FORWARD and part == "E" and self._layer < self.model.num_layers:
            self._start()
        layer = int(part[1:]) if part[:1] == "L" else self.model.num_layers
        backward = kind == Kind.BACKWARD_INPUT and part != "E"
        if part[:1] == "L" and layer < self._layer and (backward or kind == Kind.RECOMPUTE):
            self._layer = layer
            self._whole.layer(layer)
        if backward:
            self._end({})  # an operator whose operands stay: others want them too
            self._ended = self._weights(layer, op)
            if self._ended or op == "attention":
                self._whole.module()
        self._seen(scratch)

    def _weights(self, layer: int, op: str) -> tuple[Weight, ...]:
        """Weights of an operator in the order of their gradients."""
        if op.endswith("norm"):
            return (Weight(op, op, 0),)
        matrices = layer_weights(self.model) if layer < self.model.num_layers else ()
        known = (*reversed(matrices), head_weight(self.model))
        return tuple(weight for weight in known if weight.op == op)

    def _seen(self, beside: int) -> None:
        ahead = self.sizes.max_live > 0
        whole = self.sizes.element * self._whole.elements if ahead else self._buckets
        self.peak = max(self.peak, self.live + whole + beside)

    def dead(self, keys: list[tuple[int, int, str]]) -> None:
        """Tensors end; after an operator's operands come its weights' gradients."""
        freed = {key[2]: self._known.pop(key, 0) for key in keys}
        self.live -= sum(freed.values())
        if keys:
            self._end(freed)

    def _end(self, freed: dict[str, int]) -> None:
        weights, self._ended = self._ended, ()
        if weights:
            self._gradients(weights, freed)

    def _gradients(self, weights: tuple[Weight, ...], freed: dict[str, int]) -> None:
        """One after the other: the gradients of outputs that later ones need, their common input
        and the sum of its gradient so far are still there."""
        inputs = [nbytes for name, nbytes in freed.items() if not name.startswith("d:")]
        shared = max(inputs, default=0)
        for place, weight in enumerate(weights):
            if place:
                self._whole.module()
            left = sum(_gradient_of(later, freed) for later in weights[place + 1 :])
            more = shared * ((place < len(weights) - 1) + (place > 0))
            self._gradient(weight, left + more)
            self._whole.release(weight)

    def _gradient(self, weight: Weight, beside: int) -> None:
        own = self.sizes.element * weight.elements
        if not self.sizes.max_live:  # ZeRO 2 makes its bucket now, and frees it with the last one
            self._buckets = self.sizes.reduced * self.sizes.bucket
        due = self._due.get((self._layer, weight.output))
        self._seen(beside + own + (self._reduced(due) if due else 0))
        if due:
            self._wait(0)
            self._part(due.bucket)
        if self._waits(weight):
            self._wait(own)

    def _part(self, reduced: int) -> None:
        """ZeRO 2: the first rank's part comes with the last weights, and stays."""
        before, self._left = self._left, self._left - reduced
        share = self.model.parameters // self.sizes.ranks
        if before > share >= self._left:
            self.live += self.sizes.part

    def _waits(self, weight: Weight) -> bool:
        """A gradient that stays as it is: too large for the bucket, or of a tied projection until
        the embedding's is there too."""
        tied = self.model.tied_embeddings and weight == head_weight(self.model)
        return tied or weight.elements > self.sizes.bucket

    def _wait(self, nbytes: int) -> None:
        if not self.model.tied_embeddings or nbytes:
            self.live += nbytes - self._waiting
            self._waiting = nbytes

    def _reduced(self, due: Reduction) -> int:
        """Bytes of a reduction: gradients that are not in the bucket in the type of the sum, copies
        of all by partition, this rank's part anew; of an offloaded optimizer a part on its way."""
        other = self.sizes.reduced != self.sizes.element
        if not self.sizes.max_live:
            return self.sizes.reduced * due.bucket
        converted = self.sizes.reduced * due.beside if other else 0
        copied = 0 if due.alone else self.sizes.reduced * due.bucket
        anew = self.sizes.element * (due.bucket // self.sizes.ranks) if other else 0
        largest = max(weight.elements for weight in layer_weights(self.model))
        part = -(-largest // self.sizes.ranks) if self.sizes.offloaded else 0
        return converted + copied + anew + part * (self.sizes.element + NORM)


def _gradient_of(weight: Weight, freed: dict[str, int]) -> int:
    names = (f".{weight.output}", f".{weight.output}_rows")
    return sum(n for name, n in freed.items() if name.startswith("d:") and name.endswith(names))
