"""The order of a rank's steps (passes, messages, copies, releases), as keys of blocks.

Plans of one layout often differ in the contents of blocks but rarely in their order. The order
depends on few facts, so it is computed once for all plans with equal facts.
"""

from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

from rematbench.engine.lowering.blocks.chunk_ops import ChunkEnds
from rematbench.engine.lowering.schedule import phases
from rematbench.engine.program.program import Step
from rematbench.engine.program.storage import Slot, Storage
from rematbench.plan import Pass, Phase

Key = tuple[object, ...]
"""The key of a block: its kind, then the pass class, the storage or the slot that it handles."""

Window = tuple[int, int]
"""A range [first, end) of micro-batches that a rule of the plan selects."""


class PassKind(NamedTuple):
    """The facts of a (micro-batch, chunk) on which its fates depend."""

    chunk: int
    phase: Phase
    inside: tuple[bool, ...]  # whether each window contains the micro-batch
    slice: int = 0


class Slice(NamedTuple):
    """The last element of the key of a slice's block: the number of the slice."""

    number: int


class PassFacts(NamedTuple):
    """A class of passes with equal fates. `number`: identifies the class; `leaves`: whether some
    copy to the host ends after the forward; `whole`: whether they are of the whole chunk, in
    separate blocks."""

    number: int
    leaves: bool
    whole: bool


WIDE: tuple[Key, Key] = ((), ("wide",))
"""The last elements of a message's key: of a narrow message, and of a wide one."""


class StepFacts(NamedTuple):
    """All facts that determine the order of a rank's steps."""

    order: tuple[Pass, ...]
    windows: tuple[Window, ...]
    chunks: tuple[ChunkEnds, ...]
    classes: tuple[tuple[PassKind, PassFacts], ...]
    release_lag: int
    reload_slots: int
    hold_phases: tuple[Phase, ...]  # phases in which copies end before the pass's send starts
    overlapped_sends: bool  # a send runs during the next pass, and its buffer is freed after that
    holds_outputs: bool  # a chunk's output is freed after its backward
    gather: bool  # parameters are gathered in every forward
    gather_first: bool  # parameters are gathered in each chunk's first forward
    reduce: bool  # gradients are reduced in every backward
    reduce_last: bool  # gradients are reduced in each chunk's last backward
    sum_first: bool  # each chunk's first backward allocates sums of gradients
    pairs: bool = False  # a backward and the forward after it overlap their exchanges
    slices: int = 1  # slices of a sequence have consecutive numbers of passes
    barriers: int | None = None  # barriers of a micro-batch, if stages share a vocabulary
    update_last: bool = False  # pieces of states are updated during each chunk's last backward


class RankSteps(NamedTuple):
    keys: tuple[Key, ...]
    steps: tuple[Step, ...]


@lru_cache(maxsize=256)
def pass_kinds(
    order: tuple[Pass, ...], windows: tuple[Window, ...], slices: int = 1
) -> dict[PassKind, Pass]:
    """Return the kinds of a rank's passes, each with its first forward pass. If sequences are cut
    into `slices`, a pass's `micro_batch` is the micro-batch times `slices` plus the slice."""
    found: dict[PassKind, Pass] = {}
    kinds = _kinds(order, windows, slices)
    for item in order:
        if item.forward:  # Its backward has the same kind.
            found.setdefault(kinds[item[1:]], item)
    return found


@lru_cache(maxsize=256)
def _kinds(
    order: tuple[Pass, ...], windows: tuple[Window, ...], slices: int
) -> dict[tuple[int, int], PassKind]:
    inside = {
        micro_batch: tuple([first <= micro_batch // slices < end for first, end in windows])
        for micro_batch in {item.micro_batch for item in order}
    }
    return {
        (micro_batch, chunk): PassKind(chunk, phase, inside[micro_batch], micro_batch % slices)
        for (micro_batch, chunk), phase in phases(order).items()
    }


LAYERS_BACKWARD = (False, "B", "W")
"""Kinds of passes that run a chunk's layers backward."""


def first_passes(order: tuple[Pass, ...], *, forward: bool) -> dict[int, Pass]:
    kinds = (True,) if forward else LAYERS_BACKWARD
    return {item.chunk: item for item in reversed(order) if item.kind in kinds}


def last_backwards(order: tuple[Pass, ...]) -> dict[int, Pass]:
    """Return the last backward of each chunk, after which its gradients are complete."""
    return {item.chunk: item for item in order if item.kind in LAYERS_BACKWARD}


@lru_cache(maxsize=256)
def rank_steps(facts: StepFacts) -> RankSteps:
    """Return the steps of a rank's passes, and the releases that follow its last pass."""
    return _Walk(facts).run()


Release = tuple[int, Key, Pass]
"""A release: its number in the order of creation, the key of its block, and its pass."""


class _Walk:
    def __init__(self, facts: StepFacts) -> None:
        self.facts = facts
        self.phase = phases(facts.order)
        classes = dict(facts.classes)
        kinds = _kinds(facts.order, facts.windows, facts.slices)
        self.class_of = {where: classes[kind] for where, kind in kinds.items()}
        self.opening = set(first_passes(facts.order, forward=True).values())
        self.summing = set(first_passes(facts.order, forward=False).values())
        self.final = set(last_backwards(facts.order).values())
        self.index: dict[Key, int] = {}
        self.steps: list[tuple[int, int, int]] = []
        self.due: dict[int, list[Release]] = {}  # by the position at which they are due
        self.copied: dict[tuple[int, int], tuple[int, Release]] = {}  # (due position, release)
        self.releases = 0
        self.fetches = 0
        self.copying: Pass | None = None

    def run(self) -> RankSteps:
        fetch_at = self._fetch_positions()
        for position, item in enumerate(self.facts.order):
            for target in fetch_at.get(position, ()):
                self._fetch(target)
            if item.forward:
                self._forward(item, position)
            elif item.kind == "W":
                reduce = self.facts.reduce_last and item in self.final
                self._add(("W", self.class_of[item[1:]].number, reduce), item)
            elif not item.of_layers:
                if item.kind == "S" and not self.facts.chunks[0].last:
                    self._add(("vocabulary", "recv_x"), item)
                if item.kind == "T":
                    self._add(("vocabulary", "sum_s"), item)
                self._add(("vocabulary", str(item.kind)), item)
            else:
                self._backward(item, position)
            for _, key, of in self.due.pop(position, ()):
                self._add(key, of)
        for _, key, of in sorted(chain.from_iterable(self.due.values())):
            self._add(key, of)
        steps = map(partial(tuple.__new__, Step), self.steps)  # _make() takes three times as long
        return RankSteps(tuple(self.index), tuple(steps))

    def _add(self, key: Key, item: Pass) -> None:
        _, micro_batch, chunk = item
        if (slices := self.facts.slices) > 1:
            micro_batch, number = divmod(micro_batch, slices)
            key = (*key, Slice(number))
        self.steps.append((self.index.setdefault(key, len(self.index)), micro_batch, chunk))

    def _fetch_positions(self) -> dict[int, list[Pass]]:
        """The backwards whose copies to the device are issued at each position. Copies of a whole
        chunk are issued when the previous backward starts; copies of single layers, and those for
        the first backward, when the previous pass starts. No copy is issued before the forward of
        the same micro-batch and chunk is done."""
        at: dict[int, list[Pass]] = {}
        forward_at: dict[tuple[int, int], int] = {}
        previous = -1
        for index, item in enumerate(self.facts.order):
            where = (item.micro_batch, item.chunk)
            if item.forward:
                forward_at[where] = index
            if not item.backward:
                continue
            cls = self.class_of[where]
            if cls.leaves:
                beside = previous if cls.whole and previous >= 0 else index - 1
                at.setdefault(max(beside, forward_at[where] + 1), []).append(item)
            previous = index
        return at

    def _forward(self, item: Pass, position: int) -> None:
        facts, ends = self.facts, self.facts.chunks[item.chunk]
        number, leaves, whole = self.class_of[item[1:]]
        if not ends.first:
            word = ends.word("f", receives=True)
            self._add(("recv", word, ends.input, *WIDE[ends.wide_in]), item)
        gather = facts.gather or (facts.gather_first and item in self.opening)
        beside = facts.pairs and position > 0 and not facts.order[position - 1].forward
        self._add(("F", number, gather, beside), item)
        if facts.barriers is not None and ends.last:
            self._add(("vocabulary", "send_x"), item)
        if leaves:
            if whole:
                self._add(("D2H", number), item)
            at = position + facts.release_lag
            self.copied[item[1:]] = at, self._release_at(at, ("free_d2h", number), item)
        if not ends.last:
            # In these phases the copy that runs during this pass must end before the send starts.
            if self.copying is not None and self.phase[item[1:]] in facts.hold_phases:
                self._add(("hold",), self.copying)
            free, word = "sent_f" if facts.holds_outputs or ends.local else "free_f", ends.word("f")
            if ends.local and facts.overlapped_sends:  # The backward frees the output it reads.
                self._add(("send", word, ends.output, *WIDE[ends.wide_out]), item)
            else:
                self._send(item, position, (word, free), (ends.output, ends.wide_out))
        if leaves and whole:
            self.copying = item

    def _backward(self, item: Pass, position: int) -> None:
        facts, ends = self.facts, self.facts.chunks[item.chunk]
        number, leaves, _ = self.class_of[item[1:]]
        if leaves:
            self._release_copies(item)
        back = ends.back if item.kind is False else ends.input
        if facts.barriers == 2:
            self._add(("vocabulary", "sum_g"), item)
        if not ends.last and not ends.local:
            word = ends.word("b", receives=True)
            self._add(("recv", word, ends.output, *WIDE[ends.wide_out]), item)
        reduce = facts.reduce or (facts.reduce_last and item in self.final)
        reduce = reduce or (facts.sum_first and item in self.summing)
        after = facts.order[position + 1 : position + 2]
        beside = facts.pairs and any(one.forward for one in after)
        updates = (True,) if facts.update_last and item in self.final else ()
        if item.kind is False:
            self._add(("B", number, reduce, beside, *updates), item)
        else:
            self._add(("B apart", number), item)
        if (facts.holds_outputs or ends.local) and not ends.last:
            waits = ends.local and facts.overlapped_sends
            self._add(("free_f" if waits else "free_held", ends.output), item)
        if not ends.first and not ends.cut:
            self._send(item, position, (ends.word("b"), "free_b"), (back, ends.wide_in))

    def _send(
        self, item: Pass, position: int, keys: tuple[str, str], sent: tuple[Storage, bool]
    ) -> None:
        """Send an activation or its gradient. `sent`: its storage, and whether the message is wide;
        `keys`: the message's word, and the kind of the block that waits for the send."""
        (word, free), (storage, wide) = keys, sent
        self._add(("send", word, storage, *WIDE[wide]), item)
        self._release_at(position + self.facts.overlapped_sends, (free, storage), item)

    def _release_at(self, position: int, key: Key, item: Pass) -> Release:
        """Plan a release at a later position: it waits for a copy or a send and frees storages."""
        self.releases += 1
        release = (self.releases, key, item)
        self.due.setdefault(position, []).append(release)
        return release

    def _fetch(self, item: Pass) -> None:
        """Issue the copies to the device for a (chunk, micro-batch), after freeing its storages
        there."""
        self._release_copies(item)
        number, _, whole = self.class_of[item[1:]]
        slots = self.facts.reload_slots if whole else 0
        slot = Slot(by_layer=False, number=self.fetches % slots) if slots else None
        self.fetches += 1
        self._add(("H2D", number, slot), item)

    def _release_copies(self, item: Pass) -> None:
        """Free the offloaded device storages of a (chunk, micro-batch), if they still exist."""
        position, release = self.copied.pop(item[1:], (-1, None))
        waiting = self.due.get(position, [])
        if release is not None and release in waiting:
            waiting.remove(release)
            self._add(*release[1:])
