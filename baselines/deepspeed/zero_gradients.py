"""Bytes of gradients that DeepSpeed holds, from a weight's gradient to the end of its micro-batch.

Rules of deepspeed 0.19.8, found in its code and confirmed by the peaks of traces
(`stage_1_and_2.py`, `stage3.py`, `engine.py`):

- ZeRO 0 and 1 keep whole gradients until the last micro-batch. ZeRO 0 then sums them MAX_SUMMED
  elements at a time, in a copy (buffered_allreduce_fallback). ZeRO 1 puts them into the reduce
  bucket in the order of parameters, with overlap_comm in the order in which they are made.
- ZeRO 1 and 2 allocate their bucket (with overlap_comm two) at the first gradient (setup_buckets)
  and free it in the epilogue. If a gradient no longer fits, the bucket is reduced first, while the
  gradient is alive. A gradient larger than the bucket is not copied into it
  (reduce_independent_p_g_buckets...).
- A reduction copies the bucket if the bucket holds parts of more than one rank, and once more in
  fp32 under Ulysses (allreduce_bucket). The first reduction of a parameter of this rank allocates
  memory for the whole gradients of all such parameters (copy_grads_in_partition).
- ZeRO 3's bucket exists from the start. A reduction copies it, partition by partition
  (reduce_scatter_coalesced), and allocates this rank's part again if the sum has another type.
- For an offloaded part, the norm is computed in fp64, then the part is copied in fp32.
"""

from collections.abc import Callable

from baselines.deepspeed import zero_sizes
from baselines.deepspeed.zero_sizes import Sizes, Weight
from rematbench.workload import Model

MAX_SUMMED = 500_000_000
"""MEMORY_OPT_ALLREDUCE_SIZE of DeepSpeed's engine, in elements."""
NORM, WIDE = 8, 4
"""Bytes per element of a tensor whose norm is computed (fp64), and of an fp32 element."""
ALIGNED = 2
"""A rank's part is a multiple of this number of elements (nccl_start_alignment_factor)."""
NORMED = 250_000_000
"""The number of elements for which ZeRO 3 computes a norm at once (_constant_buffered_norm2)."""


NotePeak = Callable[[int], None]
"""A function that records that this many bytes, in addition to `held`, are alive for a moment."""


def reducer(model: Model, sizes: Sizes, note_peak: NotePeak) -> "Zero0":
    kinds = (Zero0, Zero1, Zero2, Zero3)
    return kinds[sizes.stage](model, sizes, note_peak)


class Zero0:
    """ZeRO 0: gradients are kept, and are summed over ranks after the last micro-batch."""

    def __init__(self, model: Model, sizes: Sizes, note_peak: NotePeak) -> None:
        self.model, self.sizes, self.note_peak = model, sizes, note_peak
        self.order = zero_sizes.parameters(model)
        self.held = 0
        self.last = True
        self._kept: dict[int, int] = {}
        self._waiting = 0

    def gradient(self, weight: Weight, *, more: bool = False) -> None:
        """Count a weight's new gradient. `more`: it comes from a tile, and further tiles follow."""
        if weight.output == "logits" and self.model.tied_embeddings and not more:
            self._waiting = self._size(weight)  # it waits for the embedding's gradient
            self.held += self._waiting
            return
        if weight.offset == 0 and self._waiting:  # the embedding's sum is a separate tensor
            self.note_peak(2 * self._size(weight))
            self.held, self._waiting = self.held - self._waiting, 0
        self.note_peak(self._size(weight))
        self.add(weight, more=more)

    def add(self, weight: Weight, *, more: bool) -> None:
        self.keep(weight)

    def end(self) -> None:
        if not self.last:
            return
        summed = count = 0
        for weight in self.order:
            summed, count = summed + weight.elements, count + 1
            if summed > MAX_SUMMED:
                self.note_peak(self._copied(summed, count))
                summed = count = 0
        self.note_peak(self._copied(summed, count))
        self.held, self._kept = 0, {}

    def keep(self, weight: Weight) -> None:
        """Keep the gradient of a weight; an earlier gradient of the weight is the same tensor."""
        if weight.offset not in self._kept:
            self._kept[weight.offset] = self._size(weight)
            self.held += self._size(weight)

    def drop(self, weight: Weight) -> None:
        """Stop counting the gradient of a weight, which is copied elsewhere or freed."""
        self.held -= self._kept.pop(weight.offset, 0)

    def new_bytes(self, weight: Weight) -> int:
        """Bytes of a weight's new gradient; 0 if the weight has a kept gradient."""
        return 0 if weight.offset in self._kept else self._size(weight)

    def _size(self, weight: Weight) -> int:
        return self.sizes.element * weight.elements

    def _copied(self, elements: int, count: int) -> int:
        """Bytes of the copy that is summed (none for a single tensor) and of a copy in another
        type."""
        wide = self.sizes.reduced if self.sizes.reduced != self.sizes.element else 0
        return elements * ((self.sizes.element if count > 1 else 0) + wide)


class Bucketed(Zero0):
    """A ZeRO stage with a bucket. `filled` includes gradients that are larger than the bucket."""

    def __init__(self, model: Model, sizes: Sizes, note_peak: NotePeak) -> None:
        super().__init__(model, sizes, note_peak)
        self.filled: list[Weight] = []

    def elements(self) -> int:
        return sum(weight.elements for weight in self.filled)

    def add(self, weight: Weight, *, more: bool) -> None:
        """Put a new gradient into the bucket, unless another tile's gradient follows."""
        extra = self.new_bytes(weight)
        if self.filled and self.elements() + weight.elements > self.sizes.bucket:
            self.reduce(extra)
        if more or weight.elements > self.sizes.bucket:
            self.keep(weight)
        else:
            self.drop(weight)
        if not more:
            self.filled.append(weight)

    def reduce(self, extra: int) -> None:
        raise NotImplementedError

    def end(self) -> None:
        if self.filled:
            self.reduce(0)


class Zero2(Bucketed):
    """ZeRO 2: a bucket during the backward, and this rank's part of the gradients."""

    def __init__(self, model: Model, sizes: Sizes, note_peak: NotePeak) -> None:
        super().__init__(model, sizes, note_peak)
        unit = ALIGNED * sizes.ranks
        aligned = -(-sum(weight.elements for weight in self.order) // unit) * unit
        self.share = aligned // sizes.ranks
        mine = sum(weight.elements for weight in self.order if weight.offset < self.share)
        self._part = 0 if sizes.offloaded else sizes.element * mine
        self._buckets = self._now = self._before = 0

    def gradient(self, weight: Weight, *, more: bool = False) -> None:
        """Count a weight's new gradient; the first gradient allocates the bucket."""
        self.note_peak(self._size(weight))
        if more or not (weight.output == "logits" and self.model.tied_embeddings):
            self.buckets()
        super().gradient(weight, more=more)

    def buckets(self) -> None:
        if not self._buckets:
            count = 2 if self.sizes.overlap else 1
            self._buckets = count * self.sizes.element * self.sizes.bucket
            self.held += self._buckets

    def reduce(self, extra: int) -> None:
        """Sum the bucket over ranks in a copy, then move this rank's gradients to part or host."""
        self.note_peak(extra + max(self._summed(), default=0))
        for weight in self.filled:
            if weight.offset < self.share:
                self._mine(weight, extra)
            if weight.offset < self.share or self.sizes.stage > 1:
                self.drop(weight)
        self.filled = []

    def _summed(self) -> list[int]:
        """Bytes of the copies that are summed. A copy has slices of weights, each slice for one
        rank, until it has more elements than the bucket."""
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

    def _mine(self, weight: Weight, extra: int) -> None:
        if self.sizes.offloaded:
            part = min(weight.elements, self.share - weight.offset)
            self.note_peak(extra + NORM * part * self.last)
            return
        if not self._now:
            self._now = self._part
            self.held += self._now
        self.note_peak(extra)

    def end(self) -> None:
        super().end()
        for weight in self.order:
            self.drop(weight)
        self.held -= self._buckets
        if self._before:
            self.held -= self._now
        self._before = self._before or self._now
        self._buckets = self._now = 0


class Zero1(Zero2):
    """ZeRO 1: like ZeRO 2 in the last micro-batch, and like ZeRO 0 before it. Without overlap_comm
    the bucket is filled after all gradients have been made."""

    def add(self, weight: Weight, *, more: bool) -> None:
        if self.last and self.sizes.overlap:
            super().add(weight, more=more)
        else:
            self.keep(weight)

    def end(self) -> None:
        if not self.last:
            return
        if not self.sizes.overlap:
            for weight in self.order:
                super().add(weight, more=False)
        super().end()


class Zero3(Bucketed):
    """ZeRO 3: the bucket and this rank's part are states; the copies in a reduction are not."""

    def reduce(self, extra: int) -> None:
        """Copy the bucket by partition, allocate this rank's part again, then offload the part."""
        sizes, ranks = self.sizes, self.sizes.ranks
        other = sizes.reduced != sizes.element
        large = sum(w.elements for w in self.filled if w.elements > sizes.bucket)
        parts = [-(-weight.elements // ranks) for weight in self.filled]
        alone = len(parts) == 1 and self.filled[0].elements % ranks == 0
        copied = 0 if alone else ranks * sum(parts)
        anew = sizes.element * sum(parts) if other else 0
        self.note_peak(extra + sizes.reduced * (copied + (large if other else 0)) + anew)
        leaving = max(map(self._leaving, parts)) if sizes.offloaded else 0
        self.note_peak(extra + (anew if other else sizes.reduced * copied) + leaving)
        for weight in self.filled:
            self.drop(weight)
        self.filled = []

    def _leaving(self, part: int) -> int:
        """Bytes of copies of a gradient part whose optimizer is on the host. One copy comes back
        from the host, where the parts of micro-batches are added; the other is in fp64 for the norm
        or in fp32 for the optimizer, whichever is larger."""
        wide = WIDE * part if self.sizes.element != WIDE else 0
        return self.sizes.element * part + self.last * max(NORM * min(part, NORMED), wide)
