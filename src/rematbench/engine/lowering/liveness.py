"""Where the tensors of a block are freed: after their last readers, on the compute stream."""

from collections.abc import Sequence, Set

from rematbench.engine.program.action import COMPUTE, Action, Kind, by_number

FREE, WAIT = Kind.FREE, Kind.WAIT  # looking up an Enum's member takes as long as the rest of a line


def freed(
    actions: Sequence[Action], survivors: Set[str], arrivals: Set[str]
) -> dict[int, list[str]]:
    """The tensors that are freed after an action, by the action's index.

    `survivors` outlive the block; `arrivals` are alive when the block starts.  A tensor read by
    another stream is freed where the compute stream has waited for that stream.  A temporary of an
    operator that is recomputed twice has two lifetimes under one name.
    """
    found: dict[int, list[str]] = {}
    for at, name in _ends(actions, survivors, arrivals):
        found.setdefault(at, []).append(name)
    return found


def free(names: list[str]) -> Action:
    """The FREE of some tensors."""
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
            else:  # not before a collective beside the kernel has allocated its output
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
    """For each action of another stream, the index where compute has waited for it: for its own
    event or for the event of a later action of that stream (a stream runs in order); the last index
    if nowhere.  And by event that another stream waits for, the index after the wait."""
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
