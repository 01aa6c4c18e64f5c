"""A reference interpreter: real bytes, from actions alone.  It knows no plan, no cost, no ledger.

Contents certify themselves: a tensor ends in a digest of what made it (operator and the digests it
read) and all other bytes follow from that digest, so a lost, moved or stale byte shows at the next
read, and a rebuilt tensor equals the forward's.  Compute runs at issue.  The other streams run as
late as their events allow, so that a missing WAIT reads garbage; or (EARLY) at issue too, so that
a slot that is filled too soon spoils what it held.
"""

import hashlib
import re
from collections import defaultdict
from functools import lru_cache

from rematbench.engine.program.action import (
    HOST,
    SHARD_UP,
    STATE_COPIES,
    Action,
    Kind,
    is_held,
    tenant,
)
from rematbench.engine.program.program import Program, RankProgram

DIGEST, SLOT_BYTES = 16, 1 << 20
LATE = frozenset({"compute"})
EARLY = frozenset({"compute", "tp", "cp", "dp", "d2h", "h2d"})
COPIES = (Kind.SPLIT, Kind.JOIN, Kind.D2H, Kind.H2D, Kind.SEND, Kind.RECV)
Key = tuple[str, int, int]


class TwinError(AssertionError):
    """Bytes are not what they should be."""


@lru_cache(maxsize=1 << 14)
def contents(digest: bytes, nbytes: int) -> bytes:
    """The last `nbytes` bytes of the tensor with this digest."""
    return (hashlib.shake_256(digest).digest(nbytes)[::-1] + digest)[-nbytes:]


def identity(name: str) -> str:
    """A tensor's name whether made by the forward or rebuilt (`#r` rows, `.r` copies)."""
    return re.sub(r"(#r|\.r)(?=$|%)", "", name)


class Rank:
    """One rank's memory, queues and gradients' digests."""

    def __init__(
        self, program: RankProgram, pp: int, mail: dict[Key, bytes], at_issue: frozenset[str]
    ) -> None:
        self.number, self.pp, self.mail, self.at_issue = program.rank, pp, mail, at_issue
        self.actions = list(program.actions())
        self.position = 0
        self.memory: dict[Key, memoryview] = {}
        self.held: dict[tuple[str, int], Key] = {}  # what a chunk's micro-batches share
        self.device = self.host = self.peak = 0
        self.after: list[tuple[int, int]] = []  # (device, host) bytes after each action
        self.arenas: dict[str, tuple[memoryview, list[int]]] = {}
        self.owner: dict[str, tuple[int, int, str]] = {}
        self.tenants: dict[str, set[Key]] = defaultdict(set)
        self.in_slot: set[Key] = set()
        self.queues: dict[str, list[tuple[Action, int, int]]] = defaultdict(list)
        self.done: dict[str, int] = defaultdict(int)
        self.events: dict[Key, tuple[str, int]] = {}
        self.rows: dict[Key, int] = {}
        self.gradients: dict[tuple[str, ...], str] = {}
        self.moved = {kind: 0 for kind in Kind}  # bytes each kind of action wrote

    def advance(self) -> bool:
        """Issue actions until a message is missing (False) or all are done (True)."""
        while self.position < len(self.actions):
            action, mb, chunk = self.actions[self.position]
            if action.wait.startswith("recv_") and self.message(action.wait[-1], mb, chunk) is None:
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
        return self.mail.get((kind, mb, chunk * self.pp + self.number))

    def issue(self, action: Action, mb: int, chunk: int) -> None:
        for alloc in action.allocs:
            self.allocate((alloc.name, mb, chunk), alloc.nbytes, alloc.slot)
        self.peak = max(self.peak, self.device + action.scratch)
        self.queues[action.stream].append((action, mb, chunk))
        at = self.done[action.stream] + len(self.queues[action.stream])
        for event in filter(None, (action.begin, action.event)):
            self.events[event, mb, chunk] = (action.stream, at)
        if action.stream in self.at_issue or action.kind is Kind.SEND:
            self.run_until(action.stream, at)
        for name in action.frees:
            self.free((name, mb, chunk))

    def allocate(self, key: Key, nbytes: int, slot: str) -> None:
        if key in self.memory:
            raise TwinError(f"{key} is allocated twice")
        if is_held(key[0]):
            self.held[key[0], key[2]] = key
        if not slot:
            self.memory[key] = memoryview(bytearray(b"\xdd") * nbytes)
            self.count(key, nbytes)
            return
        arena, used = self.arenas.setdefault(slot, (memoryview(bytearray(SLOT_BYTES)), [0, 0]))
        owner = (key[1], key[2], tenant(key[0], slot))
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
                names = (*action.reads, *(alloc.name for alloc in action.allocs))
                if key in [(name, mb, chunk) for name in names]:
                    raise TwinError(f"{key} is freed while {stream} has yet to use it")
        storage = self.get(key)
        if key not in self.in_slot:
            self.count(key, -len(storage))
        self.in_slot.discard(key)
        del self.memory[key]

    def count(self, key: Key, nbytes: int) -> None:
        if key[0].endswith(HOST):
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
        data = b"".join(bytes(self.get((name, mb, chunk))) for name in action.reads)
        if action.kind is Kind.SEND:
            step = {"f": 1, "b": -1}.get(action.op)
            stage = chunk * self.pp + self.number
            key = (
                ("e", 0, self.pp - 1 - self.number)
                if step is None
                else (action.op, mb, stage + step)
            )
            self.mail[key] = data
            return
        if action.kind is Kind.RECV:
            data = self.message(action.op, mb, chunk) or b""
        for alloc in action.allocs:
            part, data = data[: alloc.nbytes], data[alloc.nbytes :]
            if len(part) != alloc.nbytes:
                raise TwinError(f"{action.kind.value} {alloc.name}: {len(part)} bytes arrive")
            self.get((alloc.name, mb, chunk))[:] = part
            self.moved[action.kind] += alloc.nbytes
        if data and action.kind is not Kind.SPLIT:
            raise TwinError(f"{action.kind.value} {action.op}: {len(data)} bytes are lost")

    def compute(self, action: Action, mb: int, chunk: int) -> None:
        """A kernel or collective: its outputs follow from its operator and the digests it reads.  A
        copy of weights makes what a gather of the same weights makes."""
        digests = [self.read(action, (name, mb, chunk)) for name in action.reads]
        op = "parameters" if action.op == SHARD_UP else identity(action.op)
        what = hashlib.sha256(b"".join([action.part.encode(), op.encode(), *digests]))
        for alloc in action.allocs:
            name = identity(alloc.name)
            digest = hashlib.sha256(what.digest() + name.encode()).digest()[:DIGEST]
            self.get((alloc.name, mb, chunk))[:] = contents(digest, alloc.nbytes)
            self.rows.setdefault((name, mb, chunk), alloc.nbytes)  # the forward comes first
            self.moved[action.kind] += alloc.nbytes
        if action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            where = (str(mb), str(chunk), action.part, action.op, action.kind.value)
            key = (*where, *(n for n in action.reads if "%" in n))
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
        if action.comm is None:
            return action.fraction
        made = ((a.nbytes, self.rows.get((identity(a.name), mb, chunk))) for a in action.allocs)
        return max((nbytes / whole for nbytes, whole in made if whole), default=0.0)


def interpret(program: Program, at_issue: frozenset[str] = LATE) -> list[Rank]:
    """Run all ranks to their end; TwinError on a wrong byte, a leak or a deadlock."""
    mail: dict[Key, bytes] = {}
    ranks = [Rank(rank, program.pp, mail, at_issue) for rank in program.ranks]
    waiting = ranks
    while waiting:
        before = [rank.position for rank in waiting]
        waiting = [rank for rank in waiting if not rank.advance()]
        if before == [rank.position for rank in waiting]:
            raise TwinError("deadlock: every rank waits for a message")
    return ranks
