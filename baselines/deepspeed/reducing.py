"""What DeepSpeed holds of gradients from a weight's gradient until the end of its micro-batch.

Rules of deepspeed 0.19.8, read in its code and seen in traces at their peaks (`stage_1_and_2.py`,
`stage3.py`, `engine.py`):

- ZeRO 0 and 1 keep whole gradients until the last micro-batch.  ZeRO 0 then sums them MAX_SUMMED
  elements at a time, in a copy (buffered_allreduce_fallback); ZeRO 1 puts them into the reduce
  bucket in the order of parameters, with overlap_comm as they come.
- ZeRO 1 and 2 make their bucket (with overlap_comm two) with the first gradient (setup_buckets) and
  drop it in the epilogue.  A gradient that no longer fits has the bucket reduced first, while it is
  alive itself; one larger than the bucket stays as it is (reduce_independent_p_g_buckets...).
- Reducing copies the bucket if it holds parts of more than one rank, and once more in fp32 under
  Ulysses (allreduce_bucket).  The first reduction of this rank's parameters makes room for all of
  them, whole (copy_grads_in_partition).
- ZeRO 3's bucket is there from the start.  Reducing copies it, partition by partition
  (reduce_scatter_coalesced), and makes this rank's part anew where the sum is in another type.
- Of a rank's part that leaves for the host the norm is taken in fp64, then it is copied in fp32.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rematbench.plugins.discover import load_module
from rematbench.workload import Model

if TYPE_CHECKING:
    from baselines.deepspeed import weights
    from baselines.deepspeed.sizes import Sizes
    from baselines.deepspeed.weights import Weight
else:  # this file is loaded by its path
    weights = load_module(Path(__file__).with_name("weights.py"))

MAX_SUMMED = 500_000_000
"""MEMORY_OPT_ALLREDUCE_SIZE of its engine: elements."""
NORM, WIDE = 8, 4
"""Bytes of an element of which a norm is taken, and of an fp32 one."""
ALIGNED = 2
"""Elements of which a rank's part is a multiple (nccl_start_alignment_factor)."""
NORMED = 250_000_000
"""Elements of which ZeRO 3 takes the norm at once (_constant_buffered_norm2)."""


See = Callable[[int], None]
"""Told of bytes that are there for a moment, beside `held`."""


def reducer(model: Model, sizes: "Sizes", see: See) -> "Zero0":
    """The class of a ZeRO stage."""
    kinds = (Zero0, Zero1, Zero2, Zero3)
    return kinds[sizes.stage](model, sizes, see)


class Zero0:
    """ZeRO 0: every gradient stays, and is summed with others after the last micro-batch."""

    def __init__(self, model: Model, sizes: "Sizes", see: See) -> None:
        self.model, self.sizes, self.see = model, sizes, see
        self.order = weights.parameters(model)
        self.held = 0
        self.last = True
        self._kept: dict[int, int] = {}
        self._waiting = 0

    def gradient(self, weight: "Weight", *, more: bool = False) -> None:
        """A weight's gradient is there (`more`: of one of several tiles, not the last)."""
        if weight.output == "logits" and self.model.tied_embeddings and not more:
            self._waiting = self._size(weight)  # until the embedding's is there too
            self.held += self._waiting
            return
        if weight.offset == 0 and self._waiting:  # the embedding: the sum is a tensor of its own
            self.see(2 * self._size(weight))
            self.held, self._waiting = self.held - self._waiting, 0
        self.see(self._size(weight))
        self.made(weight, more=more)

    def made(self, weight: "Weight", *, more: bool) -> None:
        """It is added to what is kept of the weight."""
        self.keep(weight)

    def end(self) -> None:
        """The backward of a micro-batch is over."""
        if not self.last:
            return
        summed = count = 0
        for weight in self.order:
            summed, count = summed + weight.elements, count + 1
            if summed > MAX_SUMMED:
                self.see(self._copied(summed, count))
                summed = count = 0
        self.see(self._copied(summed, count))
        self.held, self._kept = 0, {}

    def keep(self, weight: "Weight") -> None:
        """Its gradient stays where it is, with what was there of it."""
        if weight.offset not in self._kept:
            self._kept[weight.offset] = self._size(weight)
            self.held += self._size(weight)

    def let(self, weight: "Weight") -> None:
        """Its gradient is somewhere else, or gone."""
        self.held -= self._kept.pop(weight.offset, 0)

    def beside(self, weight: "Weight") -> int:
        """Bytes of a new gradient that is not kept."""
        return 0 if weight.offset in self._kept else self._size(weight)

    def _size(self, weight: "Weight") -> int:
        return self.sizes.element * weight.elements

    def _copied(self, elements: int, count: int) -> int:
        """Bytes of the copy that is summed (of one tensor none), and of its conversion."""
        wide = self.sizes.reduced if self.sizes.reduced != self.sizes.element else 0
        return elements * ((self.sizes.element if count > 1 else 0) + wide)


class Bucketed(Zero0):
    """A stage with a bucket: what is in it, and what was too large for it."""

    def __init__(self, model: Model, sizes: "Sizes", see: See) -> None:
        super().__init__(model, sizes, see)
        self.filled: list[Weight] = []

    def elements(self) -> int:
        """Elements in the bucket, with one that is too large for it."""
        return sum(weight.elements for weight in self.filled)

    def made(self, weight: "Weight", *, more: bool) -> None:
        """It goes into the bucket, unless another tile's is to come."""
        beside = self.beside(weight)
        if self.filled and self.elements() + weight.elements > self.sizes.bucket:
            self.reduce(beside)
        if more or weight.elements > self.sizes.bucket:
            self.keep(weight)
        else:
            self.let(weight)
        if not more:
            self.filled.append(weight)

    def reduce(self, beside: int) -> None:
        """Reduce what is in the bucket, `beside` bytes being there too."""
        raise NotImplementedError

    def end(self) -> None:
        """What is left in the bucket is reduced."""
        if self.filled:
            self.reduce(0)


class Zero2(Bucketed):
    """ZeRO 2: a bucket while gradients come, and this rank's part of them."""

    def __init__(self, model: Model, sizes: "Sizes", see: See) -> None:
        super().__init__(model, sizes, see)
        unit = ALIGNED * sizes.ranks
        aligned = -(-sum(weight.elements for weight in self.order) // unit) * unit
        self.share = aligned // sizes.ranks
        mine = sum(weight.elements for weight in self.order if weight.offset < self.share)
        self._part = 0 if sizes.offloaded else sizes.element * mine
        self._buckets = self._now = self._before = 0

    def gradient(self, weight: "Weight", *, more: bool = False) -> None:
        """The first makes the bucket, when its weight is reached."""
        self.see(self._size(weight))
        if more or not (weight.output == "logits" and self.model.tied_embeddings):
            self.buckets()
        super().gradient(weight, more=more)

    def buckets(self) -> None:
        """Make them, or have them."""
        if not self._buckets:
            count = 2 if self.sizes.overlap else 1
            self._buckets = count * self.sizes.element * self.sizes.bucket
            self.held += self._buckets

    def reduce(self, beside: int) -> None:
        """All ranks' sum, in a copy; then this rank's gradients go to its part or to the host."""
        self.see(beside + max(self._summed(), default=0))
        for weight in self.filled:
            if weight.offset < self.share:
                self._mine(weight, beside)
            if weight.offset < self.share or self.sizes.stage > 1:
                self.let(weight)
        self.filled = []

    def _summed(self) -> "list[int]":
        """Bytes of the copies: slices of one rank each, as many at once as fill the bucket."""
        slices: list[tuple[int, int]] = []
        for weight in self.filled:
            at, end = weight.offset, weight.offset + weight.elements
            while at < end:
                owner = min(at // self.share, self.sizes.ranks - 1)
                stop = end if owner == self.sizes.ranks - 1 else min(end, (owner + 1) * self.share)
                if slices and slices[-1][0] == owner:
                    slices[-1] = owner, slices[-1][1] + stop - at
                else:
                    slices.append((owner, stop - at))
                at = stop
        found, summed, count = [0], 0, 0
        for _, elements in slices:
            summed, count = summed + elements, count + 1
            if summed > self.sizes.bucket:
                found.append(self._copied(summed, count))
                summed = count = 0
        return [*found, self._copied(summed, count)]

    def _mine(self, weight: "Weight", beside: int) -> None:
        if self.sizes.offloaded:
            part = min(weight.elements, self.share - weight.offset)
            self.see(beside + NORM * part * self.last)
            return
        if not self._now:
            self._now = self._part
            self.held += self._now
        self.see(beside)

    def end(self) -> None:
        """The bucket goes; the part stays, or is added to that of the micro-batches before."""
        super().end()
        for weight in self.order:
            self.let(weight)
        self.held -= self._buckets
        if self._before:
            self.held -= self._now
        self._before = self._before or self._now
        self._buckets = self._now = 0


class Zero1(Zero2):
    """ZeRO 1: as ZeRO 2 in the last micro-batch, and as ZeRO 0 until then; without overlap_comm the
    bucket is filled when all gradients are there."""

    def made(self, weight: "Weight", *, more: bool) -> None:
        """It stays, or goes into the bucket."""
        if self.last and self.sizes.overlap:
            super().made(weight, more=more)
        else:
            self.keep(weight)

    def end(self) -> None:
        """After the last micro-batch all are reduced."""
        if not self.last:
            return
        if not self.sizes.overlap:
            for weight in self.order:
                super().made(weight, more=False)
        super().end()


class Zero3(Bucketed):
    """ZeRO 3: bucket and part are states; what reducing copies is not."""

    def reduce(self, beside: int) -> None:
        """Copies of all by partition, this rank's part anew; then that goes to the host."""
        sizes, ranks = self.sizes, self.sizes.ranks
        other = sizes.reduced != sizes.element
        large = sum(w.elements for w in self.filled if w.elements > sizes.bucket)
        parts = [-(-weight.elements // ranks) for weight in self.filled]
        alone = len(parts) == 1 and self.filled[0].elements % ranks == 0
        copied = 0 if alone else ranks * sum(parts)
        anew = sizes.element * sum(parts) if other else 0
        self.see(beside + sizes.reduced * (copied + (large if other else 0)) + anew)
        leaving = max(map(self._leaving, parts)) if sizes.offloaded else 0
        self.see(beside + (anew if other else sizes.reduced * copied) + leaving)
        for weight in self.filled:
            self.let(weight)
        self.filled = []

    def _leaving(self, part: int) -> int:
        """Bytes of a part of an offloaded optimizer: on its way back from the host, where it was
        added; in the type of the norm, then of the optimizer."""
        wide = WIDE * part if self.sizes.element != WIDE else 0
        return self.sizes.element * part + self.last * max(NORM * min(part, NORMED), wide)
