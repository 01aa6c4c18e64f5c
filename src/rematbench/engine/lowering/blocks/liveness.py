"""Decides where a block frees its tensors: after their last readers, on the compute stream."""

from collections.abc import Sequence, Set
from operator import attrgetter

from rematbench.engine.program.action import COMPUTE, Action, Kind
from rematbench.engine.program.storage import Event, Storage
from rematbench.host.table import grouped

FREE = Kind.FREE  # A module variable, because a lookup in an Enum is slow.


def frees_by_action(
    actions: Sequence[Action], survivors: Set[Storage], arrivals: Set[Storage]
) -> dict[int, list[Storage]]:
    """Return, by the index of an action, the tensors that are freed after it.

    `survivors` outlive the block; `arrivals` are alive when the block starts. A tensor that another
    stream reads is freed after the compute stream has waited for that stream. A temporary of an
    operator that is recomputed twice lives twice under one name.
    """
    return grouped(_ends(actions, survivors, arrivals))


def free_action(storages: list[Storage]) -> Action:
    if len(storages) > 1:
        storages.sort(key=attrgetter("order"))
    return Action(kind=FREE, stream=COMPUTE, frees=tuple(storages))


def _ends(
    actions: Sequence[Action], survivors: Set[Storage], arrivals: Set[Storage]
) -> list[tuple[int, Storage]]:
    """(index of the action after which it is freed, storage) for every lifetime that ends here."""
    waited, begun = _waits(actions)
    end = len(actions) - 1
    last: dict[Storage, int] = {}
    earlier: list[tuple[int, Storage]] = []
    born = set(arrivals)
    for index, action in enumerate(actions):
        allocs, reads = action.allocs, action.reads
        if allocs or reads:
            if action.stream != COMPUTE:
                safe = waited[index]
            else:  # A collective that overlaps the kernel may get memory that is freed here.
                begin = action.exchange.begin
                safe = begun.get(begin, index) if begin else index
            for alloc in allocs:
                storage = alloc.storage
                if storage in born and storage in last:
                    earlier.append((last[storage], storage))
                born.add(storage)
                last[storage] = safe
            for storage in reads:
                if last.get(storage, -1) < safe:
                    last[storage] = safe
        if action.frees:
            born.difference_update(action.frees)
    return [*earlier, *((last.get(left, end), left) for left in born - survivors)]


def _waits(actions: Sequence[Action]) -> tuple[list[int], dict[Event, int]]:
    """(table, after). `table`: for each action of another stream, the index at which compute has
    waited for its event or for that of a later action of its stream; the last index if it does not
    wait. `after`: for each event for which another stream waits, the index after that wait."""
    end = len(actions) - 1
    on_compute: dict[Event, int] = {}
    elsewhere: dict[Event, int] = {}
    soonest: dict[str, int] = {}
    table = [end] * len(actions)
    for index in range(end, -1, -1):
        action = actions[index]
        stream = action.stream
        if stream == COMPUTE:
            if action.wait is not None:
                on_compute.setdefault(action.wait, index)
            continue
        if action.wait is not None:
            elsewhere.setdefault(action.wait, index + 1)
        waited = on_compute.get(action.event, end) if action.event else end
        if waited < soonest.get(stream, end):
            soonest[stream] = waited
        table[index] = soonest.get(stream, end)
    return table, elsewhere
