"""Prove a program sound before anyone runs it: life of tensors, races between streams, deadlock.

Every stream carries a vector clock: how far it is known to be behind each other stream.  A tensor
may be read on a stream only if that stream has waited for its producer (its start, where a
collective and a kernel run beside each other, piece by piece); it may be freed (its memory reused
by the compute stream) only when compute has waited for every reader.

Parameters, gradients and optimizer states stay where they are and have no names in actions: the
order of those who use them is not proven here, but held to the runtime's own storages by tests.
"""

from rematbench.action import HOST, STREAM_INDEX, STREAMS, Action, Kind, tenant
from rematbench.program import Program, RankProgram
from rematbench.simulate import is_local, simulate

Key = tuple[str, int, int]
VectorClock = list[int]
COMPUTE = STREAM_INDEX["compute"]
REUSING = frozenset(STREAM_INDEX[name] for name in ("tp", "cp", "h2d"))
"""Streams whose tensors take memory that compute freed; gathers and receives have their own."""


class CheckError(ValueError):
    """A program breaks a rule; the message names rank, action and tensor."""


def check(program: Program) -> None:
    """Raise CheckError on the first violation; DeadlockError if ranks wait for ever."""
    for rank in program.ranks:
        _RankCheck(rank).run()
    simulate(program, lambda action, rank: 1.0)


class _RankCheck:
    """State of one rank's walk."""

    def __init__(self, rank: RankProgram) -> None:
        self.rank = rank
        self.clocks: list[VectorClock] = [[0] * len(STREAMS) for _ in STREAMS]
        self.events: dict[Key, VectorClock] = {}
        self.local: dict[str, VectorClock] = {}
        self.made: dict[Key, tuple[int, int, int]] = {}  # stream, ticks of its start and end
        self.touched: dict[Key, list[tuple[int, int]]] = {}
        self.slots: dict[str, set[Key]] = {}
        self.freed_at = 0  # tick of compute's last use of anything freed
        self.where = ""

    def run(self) -> None:
        for index, micro_batch, chunk in self.rank.steps:
            self.local = {}
            block = self.rank.blocks[index]
            for action in block.actions:
                self.where = (
                    f"rank {self.rank.rank} {block.label}{micro_batch}.{chunk} "
                    f"{action.kind.value} {action.part}.{action.op}"
                )
                self._step(action, micro_batch, chunk)
        if self.made:
            name, micro_batch, chunk = next(iter(self.made))
            raise CheckError(
                f"rank {self.rank.rank}: {name} of {micro_batch}.{chunk} is never freed"
            )

    def _step(self, action: Action, micro_batch: int, chunk: int) -> None:
        stream = STREAM_INDEX[action.stream]
        clock = self.clocks[stream]
        if action.wait:
            self._merge(clock, action.wait, micro_batch, chunk)
        if action.begin:  # a tick of its own, so that only who waited for it knows of it
            clock[stream] += 1
            self.local[action.begin] = clock.copy()
        clock[stream] += 1
        for name in action.reads:
            self._read((name, micro_batch, chunk), stream, clock, action)
        for alloc in action.allocs:
            key = (alloc.name, micro_batch, chunk)
            self._alloc(key, stream, clock, alloc.slot)
            begun = clock[stream] - (1 if action.begin else 0)
            self.made[key] = (stream, begun, clock[stream])
        for name in action.frees:
            self._free((name, micro_batch, chunk))
        if action.event:
            self._record(action.event, micro_batch, chunk, clock)

    def _merge(self, clock: VectorClock, event: str, micro_batch: int, chunk: int) -> None:
        seen = self.local.get(event) or self.events.get((event, micro_batch, chunk))
        if seen is None:
            raise CheckError(f"{self.where}: waits for {event!r}, which nothing has recorded")
        for index, value in enumerate(seen):
            clock[index] = max(clock[index], value)

    def _record(self, event: str, micro_batch: int, chunk: int, clock: VectorClock) -> None:
        if is_local(event):
            self.local[event] = clock.copy()
        else:
            self.events[(event, micro_batch, chunk)] = clock.copy()

    def _read(self, key: Key, stream: int, clock: VectorClock, action: Action) -> None:
        if key not in self.made:
            raise CheckError(f"{self.where}: reads {key[0]}, which is not alive")
        producer, begun, at = self.made[key]
        pipelined = action.comm is not None or bool(action.beside)
        if clock[producer] < (begun if pipelined else at):
            raise CheckError(
                f"{self.where}: reads {key[0]} before {STREAMS[producer]} is known to have made it"
            )
        self.touched[key].append((stream, clock[stream]))

    def _alloc(self, key: Key, stream: int, clock: VectorClock, slot: str) -> None:
        if key in self.made:
            raise CheckError(f"{self.where}: allocates {key[0]}, which is alive")
        if slot:
            held = {k for k in self.slots.get(slot, set()) if k in self.made}
            mine = (*key[1:], tenant(key[0], slot))
            strangers = [k for k in held if (*k[1:], tenant(k[0], slot)) != mine]
            if strangers:
                raise CheckError(f"{self.where}: slot {slot} still holds {strangers[0][0]}")
            self.slots[slot] = held | {key}
        if stream in REUSING and clock[COMPUTE] < self.freed_at:
            raise CheckError(
                f"{self.where}: allocates {key[0]} where compute may still use what it frees"
            )
        self.touched[key] = [(stream, clock[stream])]

    def _free(self, key: Key) -> None:
        if key not in self.made:
            raise CheckError(f"{self.where}: frees {key[0]}, which is not alive")
        behind = self.clocks[COMPUTE]
        for stream, at in self.touched[key]:
            if stream == COMPUTE:
                self.freed_at = max(self.freed_at, at)
            if stream != COMPUTE and behind[stream] < at:
                raise CheckError(
                    f"{self.where}: frees {key[0]} while {STREAMS[stream]} may still use it"
                )
        del self.made[key]
        del self.touched[key]


def host_tensors(program: Program) -> set[str]:
    """Names of everything that ever lives on the host (for tests and tables)."""
    return {
        alloc.name
        for rank in program.ranks
        for block in rank.blocks
        for action in block.actions
        if action.kind is Kind.D2H
        for alloc in action.allocs
        if alloc.name.endswith(HOST)
    }
