"""Decides where a block frees its tensors: after the last reader, on the compute stream."""

from collections.abc import Sequence, Set

from rematbench.engine.program.action import COMPUTE, Action, Kind, by_number

FREE, WAIT = Kind.FREE, Kind.WAIT  # locals, because a lookup in an Enum is slow


def frees_by_action(
    actions: Sequence[Action], survivors: Set[str], arrivals: Set[str]
) -> dict[int, list[str]]:
    """Return the tensors that are freed after an action, by the action's index.

    `survivors` outlive the block; `arrivals` are alive when the block starts.  A tensor that
    another stream reads is freed after the compute stream has waited for that stream.  A temporary
    of an operator that is recomputed twice has two lifetimes under one name.
    """
    found: dict[int, list[str]] = {}
    for at, name in _ends(actions, survivors, arrivals):
        found.setdefault(at, []).append(name)
    return found


def free_action(names: list[str]) -> Action:
    """Return the FREE of the given tensors."""
    if len(names) > 1:
        names.sort(key=by_number)
    return Action(kind=FREE, stream=COMPUTE, frees=tuple(names))


def _ends(
    actions: Sequence[Action], survivors: Set[str], arrivals: Set[str]
) -> list[tuple[int, str]]:
    """(index of the action after which a tensor is freed, its name) of every lifetime that ends in
    the block."""
    waited, begun = _waits(actions)
    end = len(actions) - 1
    last: dict[str, int] = {}
    earlier: list[tuple[int, str]] = []
    born = set(arrivals)
    for index, action in enumerate(actions):
        allocs, reads = action.allocs, action.reads
        if allocs or reads:
            if action.stream != COMPUTE:
                safe = waited[index]
            else:  # not before the collective that overlaps the kernel has allocated its output
                safe = begun.get(action.begin, index) if action.begin else index
            for alloc in allocs:
                name = alloc.name
                if name in born and name in last:
                    earlier.append((last[name], name))
                born.add(name)
                last[name] = safe
            for name in reads:
                if last.get(name, -1) < safe:
                    last[name] = safe
        if action.frees:
            born.difference_update(action.frees)
    return [*earlier, *((last.get(name, end), name) for name in born - survivors)]


def _waits(actions: Sequence[Action]) -> tuple[list[int], dict[str, int]]:
    """(table, after): for each action outside compute, the index at which compute has waited for it
    (by its event, or by the event of a later action of the same stream), else the last index; and
    for each event that a stream outside compute waits for, the index after the wait."""
    end = len(actions) - 1
    on_compute: dict[str, int] = {}
    elsewhere: dict[str, int] = {}
    soonest: dict[str, int] = {}
    table = [end] * len(actions)
    for index in range(end, -1, -1):
        action = actions[index]
        stream = action.stream
        if stream == COMPUTE:
            if action.kind is WAIT:
                on_compute.setdefault(action.wait, index)
            continue
        if action.kind is WAIT:
            elsewhere.setdefault(action.wait, index + 1)
        waited = on_compute.get(action.event, end) if action.event else end
        if waited < soonest.get(stream, end):
            soonest[stream] = waited
        table[index] = soonest.get(stream, end)
    return table, elsewhere
