"""Proves a program sound before it runs: lifetimes of tensors, races of streams, deadlocks.

Every stream has a vector clock: for each stream, the tick up to which that stream is known to have
run.  A stream may read a tensor only if it has waited for the end of the tensor's producer (or for
its start, if a collective and a kernel overlap piece by piece).  A tensor may be freed, so that
compute can reuse its memory, only after compute has waited for every reader.

Parameters and gradients are resident, and actions name only the unit (embedding, layer, head) that
they work on.  The unit suffices to order kernels, gathers, reductions and updates within a step.
Tests check optimizer states, and the tensors of a unit that actions touch, against the runtime's
storages.
"""

from msgspec import Struct

from rematbench.engine.program.action import STREAM_INDEX, STREAMS, Action, Alloc
from rematbench.engine.program.program import Program, RankProgram
from rematbench.engine.program.storage import HELD, Event, ModelPart, Slot, Storage
from rematbench.engine.simulate.op_level import simulate
from rematbench.evaluate.state_order import COMPUTE, StateCheck, VectorClock

Key = tuple[Storage, int, int]
REUSING = frozenset(STREAM_INDEX[name] for name in ("tp", "cp", "ep", "h2d"))
"""Streams whose tensors reuse memory that compute freed; dp and pp_recv have separate memory."""


class CheckError(ValueError):
    """A program that breaks a rule.  The message names rank, action and tensor."""


class Proof(Struct, frozen=True, kw_only=True):
    """The number of facts that `check` verified: actions of all ranks, storages allocated and
    freed, reads of storages, and waits for events."""

    ranks: int
    actions: int
    allocations: int
    reads: int
    waits: int


# Why: docs/decisions/evaluate.md, Does the simulator show races?
def check(program: Program) -> Proof:
    """Raise CheckError on the first violation, or DeadlockError if no rank can continue."""
    for rank in program.ranks:
        _RankCheck(rank).run()
    simulate(program, lambda action, rank: 1.0)
    found = [action for rank in program.ranks for action, _, _ in rank.actions()]
    return Proof(
        ranks=len(program.ranks),
        actions=len(found),
        allocations=sum(len(action.allocs) for action in found),
        reads=sum(len(action.reads) for action in found),
        waits=sum(bool(action.wait) for action in found),
    )


class _RankCheck:
    """The state of the walk over one rank's actions."""

    def __init__(self, rank: RankProgram) -> None:
        self.rank = rank
        self.clocks: list[VectorClock] = [[0] * len(STREAMS) for _ in STREAMS]
        self.events: dict[tuple[Event, int, int], VectorClock] = {}
        self.local: dict[Event, VectorClock] = {}
        self.made: dict[Key, tuple[int, int, int]] = {}  # stream, ticks of its start and end
        self.held: dict[tuple[Storage, int], Key] = {}  # a whole chunk shares these storages
        self.touched: dict[Key, list[tuple[int, int]]] = {}
        self.slots: dict[Slot, dict[Key, ModelPart]] = {}  # holds the tenants of each slot
        self.states = StateCheck(rank)
        self.freed_at = 0  # the tick at which compute last used a freed tensor
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
        if missing := self.states.pieces.missing(self.clocks[COMPUTE]):
            raise CheckError(f"rank {self.rank.rank}: {missing}")
        if self.made:
            storage, micro_batch, chunk = next(iter(self.made))
            raise CheckError(
                f"rank {self.rank.rank}: {storage} of {micro_batch}.{chunk} is never freed"
            )

    def _step(self, action: Action, micro_batch: int, chunk: int) -> None:
        stream = STREAM_INDEX[action.stream]
        clock = self.clocks[stream]
        if action.wait:
            self._merge(clock, action.wait, micro_batch, chunk)
        begin = action.exchange.begin
        if begin:  # A separate tick: a stream that waits for `begin` has not seen the end.
            clock[stream] += 1
            self.local[begin] = clock.copy()
        clock[stream] += 1
        for storage in action.reads:
            self._read((storage, micro_batch, chunk), stream, clock, action)
        for alloc in action.allocs:
            key = (alloc.storage, micro_batch, chunk)
            self._alloc(key, stream, clock, alloc)
            begun = clock[stream] - (1 if begin else 0)
            self.made[key] = (stream, begun, clock[stream])
        if wrong := self.states.fault(action, micro_batch, chunk, clock, self._alive):
            raise CheckError(f"{self.where}: {wrong}")
        for storage in action.frees:
            self._free((storage, micro_batch, chunk))
        if action.event:
            if action.event.is_local:
                self.local[action.event] = clock.copy()
            else:
                self.events[(action.event, micro_batch, chunk)] = clock.copy()

    def _alive(self, storage: Storage, micro_batch: int, chunk: int) -> bool:
        """Whether a storage of a (micro-batch, chunk), or of its chunk, is alive."""
        return self.held.get((storage, chunk), (storage, micro_batch, chunk)) in self.made

    def _merge(self, clock: VectorClock, event: Event, micro_batch: int, chunk: int) -> None:
        seen = self.local.get(event) or self.events.get((event, micro_batch, chunk))
        if seen is None:
            raise CheckError(f"{self.where}: waits for '{event}', but no action records it")
        for index, value in enumerate(seen):
            clock[index] = max(clock[index], value)

    def _read(self, key: Key, stream: int, clock: VectorClock, action: Action) -> None:
        key = self.held.get((key[0], key[2]), key)
        if key not in self.made:
            raise CheckError(f"{self.where}: reads {key[0]}, which is not allocated")
        producer, begun, at = self.made[key]
        pipelined = action.exchange.comm is not None or bool(action.exchange.overlaps)
        if clock[producer] < (begun if pipelined else at):
            raise CheckError(
                f"{self.where}: reads {key[0]} without waiting until {STREAMS[producer]} has "
                "written it"
            )
        self.touched[key].append((stream, clock[stream]))

    def _alloc(self, key: Key, stream: int, clock: VectorClock, alloc: Alloc) -> None:
        if key in self.made:
            raise CheckError(f"{self.where}: allocates {key[0]}, which is already allocated")
        if slot := alloc.slot:
            tenants = {k: who for k, who in self.slots.get(slot, {}).items() if k in self.made}
            mine = (*key[1:], alloc.tenant)
            if conflicts := [k for k, who in tenants.items() if (*k[1:], who) != mine]:
                raise CheckError(f"{self.where}: slot {slot} still holds {conflicts[0][0]}")
            self.slots[slot] = tenants | {key: alloc.tenant}
        if key[0].place == HELD:
            self.held[key[0], key[2]] = key
        if stream in REUSING and clock[COMPUTE] < self.freed_at:
            raise CheckError(
                f"{self.where}: allocates {key[0]} in memory that compute may still use"
            )
        self.touched[key] = [(stream, clock[stream])]

    def _free(self, key: Key) -> None:
        if key not in self.made:
            raise CheckError(f"{self.where}: frees {key[0]}, which is not allocated")
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
