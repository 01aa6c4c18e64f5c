"""The order of a rank's steps: passes, messages, copies and releases, by the key of their block.

Plans of one layout differ in what their blocks hold far more often than in their order, so the
order is worked out from the few facts it depends on, once for all plans that agree in them.
"""

from functools import lru_cache
from typing import NamedTuple

from rematbench.lowering.schedule import phases
from rematbench.plan import Pass, Phase
from rematbench.program.program import Step

Key = tuple[object, ...]
"""What a block is: its kind, then the class of passes, storage or slot that it is about."""

Window = tuple[int, int]
"""Micro-batches [first, end) that some rule of a plan tells apart."""


class PassKind(NamedTuple):
    """What decides the fates of a (micro-batch, chunk)."""

    chunk: int
    phase: Phase
    inside: tuple[bool, ...]  # of each window


class Class(NamedTuple):
    """The number of a class of equal passes, whether any copies of its tensors to the host outlive
    its forward, and whether those are copies of the whole chunk, in blocks of their own."""

    number: int
    leaves: bool
    whole: bool


class Ends(NamedTuple):
    """Whether a chunk starts or ends the model, and the name of what it sends on."""

    first: bool
    last: bool
    output: str


class StepFacts(NamedTuple):
    """All that the order of a rank's steps depends on."""

    order: tuple[Pass, ...]
    windows: tuple[Window, ...]
    chunks: tuple[Ends, ...]
    classes: tuple[tuple[PassKind, Class], ...]
    release_lag: int
    reload_slots: int
    hold_phases: tuple[Phase, ...]  # the copy beside such a pass ends before its send starts
    sends_beside: bool  # a send's buffer is released one pass later
    gather: bool  # parameters in every forward
    gather_first: bool  # in each chunk's first forward
    reduce: bool  # gradients in every backward
    reduce_last: bool  # in each chunk's last backward


class RankSteps(NamedTuple):
    """The keys of a rank's blocks, in order of first use, and its steps."""

    keys: tuple[Key, ...]
    steps: tuple[Step, ...]


@lru_cache(maxsize=256)
def pass_kinds(order: tuple[Pass, ...], windows: tuple[Window, ...]) -> dict[PassKind, Pass]:
    """The kinds of passes that a rank has, each with its first pass."""
    found: dict[PassKind, Pass] = {}
    phase = phases(order)
    for item in order:
        found.setdefault(_kind(item, phase, windows), item)
    return found


def _kind(item: Pass, phase: dict[tuple[int, int], Phase], windows: tuple[Window, ...]) -> PassKind:
    inside = tuple(first <= item.micro_batch < end for first, end in windows)
    return PassKind(item.chunk, phase[item.micro_batch, item.chunk], inside)


def last_backwards(order: tuple[Pass, ...]) -> dict[int, Pass]:
    """Each chunk's last backward, in which its gradients are complete."""
    return {item.chunk: item for item in order if not item.forward}


@lru_cache(maxsize=256)
def rank_steps(facts: StepFacts) -> RankSteps:
    """All steps of one rank up to the last pass, with what is still to be released after it."""
    return _Walk(facts).run()


class _Walk:
    """Goes through the passes of a rank."""

    def __init__(self, facts: StepFacts) -> None:
        self.facts = facts
        self.phase = phases(facts.order)
        classes = dict(facts.classes)
        self.class_of = {
            item[1:]: classes[_kind(item, self.phase, facts.windows)] for item in facts.order
        }
        self.started: set[int] = set()  # chunks that have had a forward
        self.final = set(last_backwards(facts.order).values())
        self.index: dict[Key, int] = {}
        self.steps: list[Step] = []
        self.releases: list[tuple[int, str, Pass]] = []
        self.fetches = 0
        self.copying: Pass | None = None

    def run(self) -> RankSteps:
        fetch_at = self._fetch_positions()
        for position, item in enumerate(self.facts.order):
            for target in fetch_at.get(position, ()):
                self._fetch(target)
            if item.forward:
                self._forward(item, position)
            else:
                self._backward(item, position)
            self._release_due(position)
        self._release_due(len(self.facts.order) + self.facts.release_lag + 1)
        return RankSteps(tuple(self.index), tuple(self.steps))

    def _add(self, key: Key, item: Pass) -> None:
        index = self.index.setdefault(key, len(self.index))
        self.steps.append(Step(index, item.micro_batch, item.chunk))

    def _fetch_positions(self) -> dict[int, list[Pass]]:
        """Where each backward's H2D is issued: when the previous backward starts (the first one's:
        when the pass before it starts), but not before its own forward is done."""
        at: dict[int, list[Pass]] = {}
        forward_at: dict[tuple[int, int], int] = {}
        previous = -1
        for index, item in enumerate(self.facts.order):
            where = (item.micro_batch, item.chunk)
            if item.forward:
                forward_at[where] = index
                continue
            if self.class_of[where].leaves and self.class_of[where].whole:
                beside = previous if previous >= 0 else index - 1
                at.setdefault(max(beside, forward_at[where] + 1), []).append(item)
            previous = index
        return at

    def _forward(self, item: Pass, position: int) -> None:
        facts, ends = self.facts, self.facts.chunks[item.chunk]
        number, leaves, whole = self.class_of[item[1:]]
        if not ends.first:
            self._add(("recv_f",), item)
        gather = facts.gather or (facts.gather_first and item.chunk not in self.started)
        self.started.add(item.chunk)
        self._add(("F", number, gather), item)
        if leaves:
            if whole:
                self._add(("D2H", number), item)
            self.releases.append((position + facts.release_lag, "d2h", item))
        if not ends.last:
            self._hold_send(item)
            self._send(item, position, "send_f")
        if leaves and whole:
            self.copying = item

    def _backward(self, item: Pass, position: int) -> None:
        facts, ends = self.facts, self.facts.chunks[item.chunk]
        self._release_copies(item)
        if not ends.last:
            self._add(("recv_b", ends.output), item)
        reduce = facts.reduce or (facts.reduce_last and item in self.final)
        self._add(("B", self.class_of[item[1:]].number, reduce), item)
        if not ends.first:
            self._send(item, position, "send_b")

    def _hold_send(self, item: Pass) -> None:
        """In the plan's phases, the copy that ran beside this pass ends before its send starts."""
        phase = self.phase[item.micro_batch, item.chunk]
        if self.copying is not None and phase in self.facts.hold_phases:
            self._add(("hold",), self.copying)

    def _send(self, item: Pass, position: int, what: str) -> None:
        self._add((what, self.facts.chunks[item.chunk].output), item)
        self.releases.append((position + int(self.facts.sends_beside), what, item))

    def _fetch(self, item: Pass) -> None:
        """H2D of a (chunk, micro-batch); its device copy must be released first."""
        self._release_copies(item)
        slots = self.facts.reload_slots
        slot = f"slot/reload{self.fetches % slots}" if slots else ""
        self.fetches += 1
        self._add(("H2D", self.class_of[item[1:]].number, slot), item)

    def _release_copies(self, item: Pass) -> None:
        """Release a (chunk, micro-batch)'s device copies now, if they still wait for it."""
        waiting = [r for r in self.releases if r[1] == "d2h" and r[2][1:] == item[1:]]
        for release in waiting:
            self.releases.remove(release)
            self._release("d2h", release[2])

    def _release_due(self, position: int) -> None:
        due = [r for r in self.releases if r[0] <= position]
        if due:
            self.releases = [r for r in self.releases if r[0] > position]
        for _, what, item in due:
            self._release(what, item)

    def _release(self, what: str, item: Pass) -> None:
        """Wait for a copy or a send and free its device storages."""
        output = self.facts.chunks[item.chunk].output
        match what:
            case "d2h":
                self._add(("free_d2h", self.class_of[item[1:]].number), item)
            case "send_f":
                self._add(("free_f", output), item)
            case _:
                self._add(("free_b", output), item)
