"""Elements of whole weights under ZeRO 3, while modules fetch weights ahead, wait for them and
release them.

The rules follow PartitionedParameterCoordinator of deepspeed 0.19.8, once it knows the order of
modules:

- Before a module runs, its weights are fetched, if they are not whole, and waited for. Then the
  next weights in order are fetched ahead: one bucket at most, and only until
  stage3_max_live_parameters are whole.
- Several weights that are fetched at once arrive in one buffer. Waiting for any of them copies all
  of them out of the buffer; the buffer exists until the last of them has been waited for
  (AllGatherCoalescedHandle).
- After a module has run, its weights are released, unless they are used again within
  stage3_max_reuse_distance elements, or fetching ahead has reached a later use of them.

Small parameters are never released, so they are not counted here.
"""

from collections.abc import Sequence

from baselines.deepspeed.zero_sizes import Sizes, Weight, matrices


class Whole:
    """Counts the elements of gathered weights and of gather buffers while the modules of a
    micro-batch run in order. `uses` has the weight of each module, or None for a module without a
    weight."""

    def __init__(self, uses: Sequence[Weight | None], sizes: Sizes) -> None:
        self.sizes = sizes
        self._wanted = [
            use if use is not None and use.elements > sizes.kept_whole else None for use in uses
        ]
        self.elements = 0
        self._at = self._next = self._there = 0
        self._last: dict[int, int] = {}
        self._groups: dict[int, list[Weight]] = {}
        self._waiting: dict[int, set[int]] = {}

    def module(self) -> None:
        if self._at == len(self._wanted):
            return
        weight = self._wanted[self._at]
        if weight is not None:
            self._fetch([weight])
            self._wait(weight)
        self._next = max(self._next, self._at + 1)
        if weight is not None:
            self._last[weight.offset] = max(self._at, self._last.get(weight.offset, 0))
        self._ahead()
        self._at += 1

    def release(self, weight: Weight) -> None:
        """Release the weight of a module that has run, unless it is used again soon."""
        if weight.offset not in self._groups or self._last[weight.offset] >= self._at:
            return
        seen = 0
        for use in self._wanted[self._at :]:
            if seen >= self.sizes.reuse:
                break
            if use is not None and use.offset == weight.offset:
                return
            seen += use.elements if use is not None else 0
        del self._groups[weight.offset]
        self._there -= weight.elements
        self.elements -= weight.elements

    def _fetch(self, found: list[Weight]) -> None:
        missing = [weight for weight in found if weight.offset not in self._groups]
        names = {weight.offset for weight in missing}
        for weight in missing:
            self._groups[weight.offset] = missing
            self._waiting[weight.offset] = names
            self._there += weight.elements
            self.elements += weight.elements

    def _wait(self, weight: Weight) -> None:
        """Wait for a weight. The first wait for a weight of a buffer copies all its weights; the
        last wait frees the buffer."""
        left = self._waiting.pop(weight.offset, None)
        if left is None:
            return
        group = self._groups[weight.offset]
        together = len(group) > 1 and self.sizes.ranks > 1
        size = sum(one.elements for one in group) if together else 0
        self.elements += size if len(left) == len(group) else 0
        left.discard(weight.offset)
        self.elements -= 0 if left else size

    def _ahead(self) -> None:
        room = min(self.sizes.max_live - self._there, self.sizes.prefetched)
        found: dict[int, Weight] = {}
        size = 0
        while size < room and self._next < len(self._wanted):
            weight = self._wanted[self._next]
            if weight is not None:
                self._last[weight.offset] = max(self._next, self._last.get(weight.offset, 0))
                if weight.offset not in self._groups and weight.offset not in found:
                    found[weight.offset] = weight
                    size += weight.elements
            self._next += 1
        self._fetch(list(found.values()))


def modules(op: str, weights: Sequence[Weight], *, forward: bool) -> list[Weight | None]:
    """The weights of an operator's modules in the order in which the modules run (None: a module
    without a weight). `weights` is in the order of gradients. The model and a layer run before the
    modules inside them."""
    found: list[Weight | None] = list(matrices(weights))
    if forward:
        found = found[::-1]
    if not found and (op.endswith("norm") or op == "attention"):
        found = [None]
    around = op in ("embedding", "attn_norm")
    return [None, *found] if forward and around else found
