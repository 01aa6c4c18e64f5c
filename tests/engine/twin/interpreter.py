"""A reference interpreter: real bytes, from actions alone.  It knows no plan, no cost, no ledger.

Contents certify themselves: a tensor ends in a digest of what made it (operator and the digests it
read) and all other bytes follow from that digest, so a lost, moved or stale byte shows at the next
read, and a rebuilt tensor equals the forward's.  Compute runs at issue.  The other streams run as
late as their events allow, so that a missing WAIT reads garbage; or (EARLY) at issue too, so that
a slot that is filled too soon spoils what it held.
"""

import hashlib
from collections import defaultdict
from functools import lru_cache

from rematbench.costs.operators.experts import HELD as HELD_BY_CALLERS
from rematbench.engine.program.action import SHARD_UP, STATE_COPIES, Action, Alloc, Kind
from rematbench.engine.program.program import Program, RankProgram
from rematbench.engine.program.storage import (
    COPY,
    HELD,
    HOST,
    REBUILT,
    Event,
    Slot,
    Storage,
    stage_of,
)

DIGEST, SLOT_BYTES = 16, 1 << 20
LATE = frozenset({"compute"})
EARLY = frozenset({"compute", "tp", "cp", "dp", "d2h", "h2d"})
COPIES = (Kind.SPLIT, Kind.JOIN, Kind.D2H, Kind.H2D, Kind.SEND, Kind.RECV)
Key = tuple[Storage, int, int]
Message = tuple[str, int, int]
"""A message: its direction, and its micro-batch and stage (of tied embeddings its receiver)."""


class TwinError(AssertionError):
    """Bytes are not what they should be."""


@lru_cache(maxsize=1 << 14)
def contents(digest: bytes, nbytes: int) -> bytes:
    """The last `nbytes` bytes of the tensor with this digest."""
    return (hashlib.shake_256(digest).digest(nbytes)[::-1] + digest)[-nbytes:]


def identity(storage: Storage) -> Storage:
    """A tensor whether made by the forward or rebuilt (`#r` rows, `.r` copies)."""
    return storage.with_rows("") if storage.rows in (REBUILT, COPY) else storage


class Rank:
    """One rank's memory, queues and gradients' digests."""

    def __init__(
        self, program: RankProgram, pp: int, mail: dict[Message, bytes], at_issue: frozenset[str]
    ) -> None:
        self.number, self.pp, self.mail, self.at_issue = program.rank, pp, mail, at_issue
        self.actions = list(program.actions())
        self.position = 0
        self.memory: dict[Key, memoryview] = {}
        self.held: dict[tuple[Storage, int], Key] = {}  # what a chunk's micro-batches share
        self.device = self.host = self.peak = 0
        self.after: list[tuple[int, int]] = []  # (device, host) bytes after each action
        self.arenas: dict[Slot, tuple[memoryview, list[int]]] = {}
        self.owner: dict[Slot, tuple[int, int, str]] = {}
        self.tenants: dict[Slot, set[Key]] = defaultdict(set)
        self.in_slot: set[Key] = set()
        self.queues: dict[str, list[tuple[Action, int, int]]] = defaultdict(list)
        self.done: dict[str, int] = defaultdict(int)
        self.events: dict[tuple[Event, int, int], tuple[str, int]] = {}
        self.rows: dict[Key, int] = {}
        self.gradients: dict[tuple[str, ...], str] = {}
        self.moved = {kind: 0 for kind in Kind}  # bytes each kind of action wrote

    def advance(self) -> bool:
        """Issue actions until a message is missing (False) or all are done (True)."""
        while self.position < len(self.actions):
            action, mb, chunk = self.actions[self.position]
            message = action.wait.message if action.wait else ""
            if message and self.message(message, mb, chunk) is None:
                return False
            self.issue(action, mb, chunk)
            self.after.append((self.device, self.host))
            self.position += 1
        for stream in self.queues:
            self.run_until(stream, self.done[stream] + len(self.queues[stream]))
        if self.memory:
            raise TwinError(f"rank {self.number}: {len(self.memory)} tensors are never freed")
        return True

    def message(self, kind: str, mb: int, chunk: int) -> bytes | None:
        if kind in ("e", "tied"):
            return self.mail.get(("e", 0, self.number))
        stage = stage_of(kind.partition("%")[0], self.number, self.pp, receives=True)
        return self.mail.get((kind, mb, chunk * self.pp + stage))

    def issue(self, action: Action, mb: int, chunk: int) -> None:
        for alloc in action.allocs:
            self.allocate((alloc.storage, mb, chunk), alloc)
        self.peak = max(self.peak, self.device + action.scratch)
        self.queues[action.stream].append((action, mb, chunk))
        at = self.done[action.stream] + len(self.queues[action.stream])
        for event in filter(None, (action.exchange.begin, action.event)):
            self.events[event, mb, chunk] = (action.stream, at)
        if action.stream in self.at_issue or action.kind is Kind.SEND:
            self.run_until(action.stream, at)
        for freed in action.frees:
            self.free((freed, mb, chunk))

    def allocate(self, key: Key, alloc: Alloc) -> None:
        nbytes, slot = alloc.nbytes, alloc.slot
        if key in self.memory:
            raise TwinError(f"{key} is allocated twice")
        if key[0].place == HELD:
            self.held[key[0], key[2]] = key
        if not slot:
            self.memory[key] = memoryview(bytearray(b"\xdd") * nbytes)
            self.count(key, nbytes)
            return
        arena, used = self.arenas.setdefault(slot, (memoryview(bytearray(SLOT_BYTES)), [0, 0]))
        owner = (key[1], key[2], alloc.tenant)
        if self.owner.get(slot) != owner or not self.tenants[slot] & self.in_slot:
            self.owner[slot], used[0] = owner, 0
            self.tenants[slot] = set()
        self.tenants[slot].add(key)
        self.memory[key] = arena[used[0] : used[0] + nbytes]
        self.memory[key][:] = b"\xdd" * nbytes  # from now on, whoever held it reads garbage
        self.in_slot.add(key)
        used[0] += nbytes
        used[1] = max(used)

    def slot_bytes(self) -> int:
        """Room that the staging slots ever needed."""
        return sum(used[1] for _, used in self.arenas.values())

    def free(self, key: Key) -> None:
        for stream, queue in self.queues.items():
            for action, mb, chunk in queue:
                used = (*action.reads, *(alloc.storage for alloc in action.allocs))
                if key in [(storage, mb, chunk) for storage in used]:
                    raise TwinError(f"{key} is freed while {stream} has yet to use it")
        storage = self.get(key)
        if key not in self.in_slot:
            self.count(key, -len(storage))
        self.in_slot.discard(key)
        del self.memory[key]

    def count(self, key: Key, nbytes: int) -> None:
        if key[0].place == HOST:
            self.host += nbytes
        else:
            self.device += nbytes

    def get(self, key: Key) -> memoryview:
        if key not in self.memory:
            raise TwinError(f"{key} is not alive")
        return self.memory[key]

    def run_until(self, stream: str, at: int) -> None:
        while self.done[stream] < at:
            action, mb, chunk = self.queues[stream].pop(0)
            self.done[stream] += 1
            if action.wait:
                self.run_until(*self.events[action.wait, mb, chunk])
            if action.kind in COPIES and action.op not in STATE_COPIES:
                self.copy(action, mb, chunk)
            elif action.kind is Kind.ALLOC or action.reads or action.allocs:
                self.compute(action, mb, chunk)

    def copy(self, action: Action, mb: int, chunk: int) -> None:
        """Move bytes as they are."""
        data = b"".join(bytes(self.get((read, mb, chunk))) for read in action.reads)
        if action.kind is Kind.SEND:
            word = action.op.partition("%")[0]  # of a slice
            stage = chunk * self.pp + stage_of(word, self.number, self.pp, receives=False)
            tied = "e", 0, self.pp - 1 - self.number
            ahead = -1 if word[0] == "b" else 1
            self.mail[tied if word == "tied" else (action.op, mb, stage + ahead)] = data
            return
        if action.kind is Kind.RECV:
            data = self.message(action.op, mb, chunk) or b""
        for alloc in action.allocs:
            part, data = data[: alloc.nbytes], data[alloc.nbytes :]
            if len(part) != alloc.nbytes:
                raise TwinError(f"{action.kind.value} {alloc.storage}: {len(part)} bytes arrive")
            self.get((alloc.storage, mb, chunk))[:] = part
            self.moved[action.kind] += alloc.nbytes
        if data and action.kind is not Kind.SPLIT:
            raise TwinError(f"{action.kind.value} {action.op}: {len(data)} bytes are lost")

    def compute(self, action: Action, mb: int, chunk: int) -> None:
        """A kernel or collective: its outputs follow from its operator and the digests it reads.  A
        copy of weights makes what a gather of the same weights makes.  What a forward only keeps
        alive (HELD_BY_CALLERS) is looked at, and nothing follows from it."""
        every = [(read, self.read(action, (read, mb, chunk))) for read in action.reads]
        kept = HELD_BY_CALLERS if action.op == "unpermute" else ()
        digests = [digest for read, digest in every if read.tensor not in kept]
        op = "parameters" if action.op == SHARD_UP else action.op
        if action.kind is Kind.ALLOC:
            op = identity(action.allocs[0].storage).label
        what = hashlib.sha256(b"".join([action.part.encode(), op.encode(), *digests]))
        for alloc in action.allocs:
            tensor = identity(alloc.storage)
            digest = hashlib.sha256(what.digest() + str(tensor).encode()).digest()[:DIGEST]
            self.get((alloc.storage, mb, chunk))[:] = contents(digest, alloc.nbytes)
            self.rows.setdefault((tensor, mb, chunk), alloc.nbytes)  # the forward comes first
            self.moved[action.kind] += alloc.nbytes
        if action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            where = (str(mb), str(chunk), action.part, action.op, action.kind.value)
            key = (*where, *(str(read) for read in action.reads if read.piece is not None))
            self.gradients[key] = what.hexdigest()

    def read(self, action: Action, key: Key) -> bytes:
        """The digest of a tensor, after a look at every byte of it."""
        key = self.held.get((key[0], key[2]), key)
        data = bytes(self.get(key))
        digest = data[-DIGEST:]
        if data != contents(digest, len(data)):
            raise TwinError(f"{action.kind.value} {action.part}.{action.op}: {key} is corrupt")
        whole = self.rows.get((identity(key[0]), *key[1:]), len(data))
        if len(data) < int(whole * self.share(action, *key[1:])):
            raise TwinError(f"{action.part}.{action.op}: {key} holds {len(data)} of {whole} bytes")
        return digest

    def share(self, action: Action, mb: int, chunk: int) -> float:
        """The share of its rows an action needs: a kernel says it, a collective makes it."""
        if action.exchange.comm is None:
            return action.rows.fraction
        made = ((a.nbytes, self.rows.get((identity(a.storage), mb, chunk))) for a in action.allocs)
        return max((nbytes / whole for nbytes, whole in made if whole), default=0.0)


def interpret(program: Program, at_issue: frozenset[str] = LATE) -> list[Rank]:
    """Run all ranks to their end; TwinError on a wrong byte, a leak or a deadlock."""
    mail: dict[Message, bytes] = {}
    ranks = [Rank(rank, program.pp, mail, at_issue) for rank in program.ranks]
    waiting = ranks
    while waiting:
        before = [rank.position for rank in waiting]
        waiting = [rank for rank in waiting if not rank.advance()]
        if before == [rank.position for rank in waiting]:
            raise TwinError("deadlock: every rank waits for a message")
    return ranks
