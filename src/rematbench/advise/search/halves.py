"""A search in several processes: each has its share of the shards, and all know the best step.

A round is a fixed amount of work, counted and not timed, so that the plans found do not depend on
the speed of the machine.
"""

from collections import Counter
from collections.abc import Generator, Sequence
from functools import partial
from itertools import count
from math import inf

from msgspec import Struct

from rematbench.advise.search.frontier import Search
from rematbench.advise.search.job import Asked, SearchJob
from rematbench.advise.search.space import Choice
from rematbench.advise.search.trial import Tried
from rematbench.host.console import CommandError
from rematbench.host.workers import Pool, collect_rarely

WORK = 400
"""Work of a round (`Search.work`), about half a second."""

MINUTE = 20
"""Most rounds of one search where many run in a row: one or two minutes of a core."""

MINUTE_OF_ONE = 2 * MINUTE * WORK
"""The work of MINUTE rounds of two processes, for a search in one process."""

LATER = 40
"""Most rounds after the gap is proved, for the other plans to show: half a minute."""

AFTER = 300
"""Work that one process goes on with after its gap is proved: some tenths of a second."""

LIMIT_S = 3600
"""Limit on the CPU seconds of a worker's task; a round takes a few seconds."""


class Round(Struct, frozen=True):
    """What a process is told before a round: the best step of all processes, in seconds, and
    whether to look for the other plans to show."""

    best_s: float
    listing: bool


class State(Struct, frozen=True, kw_only=True):
    """The answer of a process after a round: the plans simulated in the round, and `bound_s`,
    `short_bytes`, `fell` (with what is `slower`) and `plans` of its Search."""

    tried: tuple[Tried, ...]
    bound_s: float
    short_bytes: float
    fell: dict[str, int]
    plans: int


class Part:
    """The search of a share of the shards, in a worker process."""

    def __init__(self, asked: Asked, part: int, parts: int, *, lists: bool) -> None:
        collect_rarely()
        self.search = SearchJob(asked).search(part, parts, lists=lists)
        self.steps = self.search.run()

    def __call__(self, told: Round) -> State:
        """Work for one round and return the State after it."""
        search, tried = self.search, []
        search.beat(told.best_s)
        if told.listing and not search.listing:
            search.list_all()
            self.steps = search.run()
        end = search.work + WORK
        for found in self.steps:
            if found is not None:
                tried.append(found)
            if search.work >= end or search.ended:
                break
        return _state(search, tried)


def _state(search: Search, tried: Sequence[Tried]) -> State:
    return State(
        tried=tuple(tried),
        bound_s=search.bound_s,
        short_bytes=search.short_bytes,
        fell=dict(search.fell + search.slower),
        plans=search.plans,
    )


class Progress(Struct, frozen=True, kw_only=True):
    """A search after a round.  `found`: the plans that fit, fastest first; `known_s`: a step that
    was known to fit before the search; `bound_s`: no plan that is left has a shorter step;
    `listed_s`: nor has any that is not in `found`, also of those that cannot be the fastest;
    `fell`: counts of excluded plans by reason; `short_bytes`: the fewest device bytes that any of
    them lacked; `plans`: joint plans of the space."""

    found: tuple[Tried, ...] = ()
    known_s: float = inf
    bound_s: float = 0.0
    listed_s: float = 0.0
    simulations: int = 0
    fell: dict[str, int] = {}
    short_bytes: float = inf
    plans: int = 0

    @property
    def best_s(self) -> float:
        """Seconds of the fastest step that fits."""
        return min(self.known_s, self.found[0].step_s if self.found else inf)

    @property
    def gap(self) -> float:
        """How much shorter the step of an unknown plan may be, as a share of the best step."""
        return max(0.0, 1.0 - self.bound_s / self.best_s) if self.best_s < inf else inf

    def lists(self, shown: int, within: float) -> bool:
        """Whether the first `shown` plans are known: no other plan has a step that is shorter than
        the last one's by more than the gap."""
        if len(self.found) < shown:
            return self.listed_s == inf
        return shown == 1 or self.listed_s >= (1.0 - within) * self.found[shown - 1].step_s


def rounds(
    asked: Asked,
    *,
    shown: int = 10,
    processes: int = 2,
    known_s: float = inf,
    most_rounds: int | None = None,
) -> Generator[Progress, None, None]:
    """Progress after each round, until the gap is proved and the first `shown` plans are known (or
    LATER rounds have looked for these), or no plan is left, or `most_rounds` rounds are done.
    `known_s`: a step that is known to fit; the search then leaves out plans more than a tenth
    slower."""
    pools: list[Pool[Round, State]] = [
        Pool(1, partial(Part, lists=shown > 1), (asked, part, processes), LIMIT_S)
        for part in range(processes)
    ]
    at, later = Progress(known_s=known_s), 0
    try:
        for done in count(1):
            listing = later > 0 and shown > 1
            for pool in pools:
                pool.add([Round(at.best_s, listing)])
                pool.begin()
            states = [answer for pool in pools for _, answer in pool.run()]
            at = _after(at, states, listing=listing)
            yield at
            later += at.gap <= asked.within
            proved = later > LATER or (later > 0 and at.lists(shown, asked.within))
            left_s = at.listed_s if listing else at.bound_s
            ends = left_s == inf and (listing or shown == 1 or not at.found)
            if proved or ends or done == most_rounds:
                return
    finally:
        for pool in pools:
            pool.close()


def in_one_process(search: Search, *, most_work: int, after: int = AFTER) -> list[Tried]:
    """The plans that a search in this process tries.  The search ends with `after` more work once
    its gap is proved (a faster plan may be near), or with `most_work`."""
    tried, proved = [], False
    for found in search.run():
        if found is not None:
            tried.append(found)
        if search.gap <= search.within and not proved:
            proved, most_work = True, min(most_work, search.work + after)
        if search.work >= most_work or search.gap == 0.0:
            break
    return tried


def _after(before: Progress, states: Sequence[State | str], *, listing: bool) -> Progress:
    fell: Counter[str] = Counter()
    known = [state for state in states if isinstance(state, State)]
    if len(known) < len(states):
        raise CommandError("a process of the search died (out of memory on this machine?)")
    for state in known:
        fell.update(state.fell)
    tried = [one for state in known for one in state.tried]
    found = [*before.found, *(one for one in tried if one.evaluation is not None)]
    return Progress(
        found=tuple(distinct(found)),
        known_s=before.known_s,
        bound_s=max(before.bound_s, least_s := min(state.bound_s for state in known)),
        listed_s=least_s if listing else 0.0,
        simulations=before.simulations + len(tried),
        fell=dict(fell),
        short_bytes=min(state.short_bytes for state in known),
        plans=sum(state.plans for state in known),
    )


def distinct(found: Sequence[Tried]) -> list[Tried]:
    """The plans, fastest first: at one layout one plan of an arm, and of plans with equal steps
    only the one that reserves the fewest bytes."""

    def order(tried: Tried) -> tuple[float, int]:
        reserved = tried.evaluation.reserved_bytes if tried.evaluation else 0
        return round(tried.step_s, 9), reserved

    kept: list[Tried] = []
    known: set[tuple[Choice, object]] = set()
    for one in sorted(found, key=order):
        keys = {(one.choice, order(one)[0]), (one.choice, one.arm or one.method)}
        if not keys & known:
            kept.append(one)
            known |= keys
    return kept
