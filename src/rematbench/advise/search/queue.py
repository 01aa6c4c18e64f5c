"""A queue in the order of bounds, whose ripe (nearly done) entries may be taken out of turn."""

import heapq
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")
Entry = tuple[float, int, T]


class Queue(Generic[T]):
    """Entries in the order of their bounds; entries of equal bounds in the order of arrival.
    *Ripe* entries also stand in a second order, of ripe entries only."""

    def __init__(self) -> None:
        self._all: list[Entry[T]] = []
        self._ripe: list[Entry[T]] = []
        self._waiting: set[int] = set()
        self._numbers = count()

    def push(self, bound: float, item: T, *, ripe: bool) -> None:
        """Add an entry."""
        entry = (bound, next(self._numbers), item)
        self._waiting.add(entry[1])
        heapq.heappush(self._all, entry)
        if ripe:
            heapq.heappush(self._ripe, entry)

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Iterator[tuple[float, T]]:
        """The entries with their bounds, in no order."""
        return ((bound, item) for bound, number, item in self._all if number in self._waiting)

    @property
    def bound(self) -> float:
        """The least bound; infinite for an empty queue."""
        self._drop(self._all)
        return self._all[0][0] if self._all else float("inf")

    @property
    def ripe_bound(self) -> float:
        """The least bound of a ripe entry; infinite where no ripe entry waits."""
        self._drop(self._ripe)
        return self._ripe[0][0] if self._ripe else float("inf")

    def pop(self, *, ripe: bool = False) -> tuple[float, T]:
        """Remove and return the entry of the least bound, of all or of the ripe entries; IndexError
        where there is no such entry."""
        heap = self._ripe if ripe else self._all
        self._drop(heap)
        bound, number, item = heapq.heappop(heap)
        self._waiting.remove(number)
        return bound, item

    def _drop(self, heap: list[Entry[T]]) -> None:
        """Remove entries from the front of an order that were taken by the other order."""
        while heap and heap[0][1] not in self._waiting:
            heapq.heappop(heap)
