"""Op-level simulation: from actions and their costs to times.  It reads no plan, method or fate.

Streams are in-order queues.  An action starts when its stream is free and its host has issued it.
A WAIT holds its stream until an event.  Sends are buffered: a send ends one transfer after it
starts, whether or not the receiver has posted, so a RECV costs nothing and its event is the
message's arrival.  The host is another clock of a rank.  It issues the rank's actions in order,
runs ahead of the device, and waits for the device only if the stack requires it.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from msgspec import Struct

from rematbench.engine.program.action import STREAM_INDEX, STREAMS, Action, Kind
from rematbench.engine.program.ledger import Interval
from rematbench.engine.program.program import Block, Program, RankProgram
from rematbench.engine.program.storage import OF_VOCABULARY, Event, stage_of

TIMELESS = (Kind.FREE, Kind.ALLOC, Kind.RECV)
"""Kinds of actions that the simulation leaves out. The event of a RECV is the message's arrival."""

ORDERING = (Kind.WAIT, Kind.EVENT)
"""Kinds of actions that order streams but take no time themselves."""

Seconds = Callable[[Action, int], float]


class Timing(NamedTuple):
    """The seconds of an action on its stream, and the host's seconds to issue it. `held`: whether
    the host then waits until the action has ended."""

    seconds: float
    issue: float
    held: bool


NO_TIME = Timing(0.0, 0.0, held=False)


@runtime_checkable
class RankedSeconds(Protocol):
    """Costs of actions with the host's time, and a key for each rank. Ranks of equal costs have
    equal keys and share compiled blocks."""

    def __call__(self, action: Action, rank: int) -> float: ...

    def alike(self, rank: int) -> Hashable:
        """Return a key; it is equal for ranks on which every action takes the same time."""
        ...

    def timing(self, action: Action, rank: int) -> Timing: ...


def timings(seconds: Seconds) -> Callable[[Action, int], Timing]:
    """Return the function for timings of actions. With plain seconds, the host takes no time."""
    if isinstance(seconds, RankedSeconds):
        return seconds.timing
    return lambda action, rank: Timing(
        0.0 if action.kind in ORDERING else seconds(action, rank), 0.0, held=False
    )


Compiled = TypeVar("Compiled")
EventKey = tuple[Event, int, int]
MessageNumber = tuple[int, int]
"""(scale, offset): a message's number is scale x `pass_number` + offset."""

COMPUTE = STREAM_INDEX["compute"]
HOST = len(STREAMS)


class DeadlockError(RuntimeError):
    """No rank can continue.  The text names the message for which each rank waits."""


class Simulation(Struct, frozen=True, kw_only=True):
    """A simulated step: seconds of the step, the end of each rank, the busy seconds of each stream
    (by rank, then stream), and the intervals of all actions if they were recorded."""

    step_s: float
    rank_end_s: tuple[float, ...]
    stream_busy_s: tuple[tuple[float, ...], ...]
    intervals: tuple[Interval, ...] = ()

    def busy_s(self, rank: int, stream: str) -> float:
        return self.stream_busy_s[rank][STREAM_INDEX[stream]]


APART = 1 << 20
"""The difference of the pass numbers of two micro-batches: more than any pipeline has stages."""


SLICED = 1 << 13
"""The difference of the message numbers of two slices of a sequence."""


def pass_number(micro_batch: int, chunk: int, pp: int) -> int:
    """Return the number of a (micro-batch, chunk): the chunk's virtual stage on rank 0, plus APART
    for each micro-batch."""
    return micro_batch * APART + chunk * pp


class Clock:
    """The clocks of a rank: when each stream and the host are free, and when each event happened.
    `position`: the next step; `awaiting`: the message for which the rank waits.

    A message's number is twice the number of its pass and stage, plus 1 for backward messages.
    Messages of tied embeddings have negative numbers, by sender; `embedding`: the two ranks that
    exchange them.
    """

    def __init__(self, rank: int, pp: int, embedding: tuple[int, int]) -> None:
        self.rank, self.pp, self.embedding = rank, pp, embedding
        self.free = [0.0] * (HOST + 1)
        self.events: dict[EventKey, float] = {}
        self.position = 0
        self.awaiting: int | None = None

    def incoming(self, event: Event) -> MessageNumber:
        if event.message == "e":
            return 0, -1 - (sum(self.embedding) - self.rank)
        if event.message[0] in OF_VOCABULARY:
            sender = int(event.message[1:] or self.pp - 1)
            return self._of_vocabulary(event.message[0], sender, self.rank)
        word, _, number = event.message.partition("%")
        stage = stage_of(word, self.rank, self.pp, receives=True)
        return 2, 2 * stage + (word[0] == "b") + SLICED * int(number or 0)

    def outgoing(self, op: str) -> MessageNumber:
        """Return the message of a SEND: to the next (forward) or previous (backward) stage or, for
        a tied embedding, to the other rank that has the embedding."""
        if op == "tied":
            return 0, -1 - self.rank
        if op[0] in OF_VOCABULARY:
            return self._of_vocabulary(op[0], self.rank, int(op[1:]))
        word, _, number = op.partition("%")
        stage = stage_of(word, self.rank, self.pp, receives=False)
        return (2, 2 * stage + (2 if word[0] == "f" else -1) + SLICED * int(number or 0))

    def _of_vocabulary(self, kind: str, sender: int, receiver: int) -> MessageNumber:
        pairs = OF_VOCABULARY.index(kind) * self.pp + sender
        return 2, APART + pairs * self.pp + receiver


def _named(message: int) -> tuple[str, int, int]:
    """(direction, micro-batch, stage) of a message; ("e", sender, 0) for a tied embedding's."""
    if message < 0:
        return ("e", -1 - message, 0)
    return ("fb"[message % 2], *divmod(message // 2, APART))


class Timed(NamedTuple):
    """A compiled action: its stream, its timing, and its events `wait`, `begin` and `event`.
    `shared`: whether other blocks may wait for `event`. `send`: the direction of a message."""

    stream: int
    timing: Timing
    wait: Event | None
    begin: Event | None
    event: Event | None
    shared: bool
    send: str
    action: Action


class TimedBlock(NamedTuple):
    """A compiled block: its timed actions, the events of messages for which it waits, and the
    seconds for which it keeps each stream busy."""

    items: tuple[Timed, ...]
    receives: tuple[Event, ...]
    busy_s: tuple[float, ...]
    label: str


def compile_block(block: Block, rank: int, seconds: Seconds, record: bool = False) -> TimedBlock:
    """Compile a block into its actions with their timings. With `record`, actions that only
    allocate or free are kept as items of the compute stream that take no time."""
    timing = timings(seconds)
    items = []
    busy = [0.0] * len(STREAMS)
    for action in block.actions:
        if action.kind in TIMELESS:
            if record:
                items.append(Timed(COMPUTE, NO_TIME, None, None, None, False, "", action))
            continue
        stream, taken = STREAM_INDEX[action.stream], timing(action, rank)
        busy[stream] += taken.seconds
        event, begin = action.event, action.exchange.begin
        shared = event is not None and not event.is_local
        send = action.op if action.kind is Kind.SEND else ""
        items.append(Timed(stream, taken, action.wait, begin, event, shared, send, action))
    receives = tuple(item.wait for item in items if item.wait is not None and item.wait.message)
    return TimedBlock(tuple(items), receives, tuple(busy), block.label)


def compile_program(
    program: Program, seconds: Seconds, compile_one: Callable[[Block, int], Compiled]
) -> list[list[Compiled]]:
    """Compile every rank's blocks with `compile_one` (block, rank).  Ranks of equal costs share the
    compiled object of a shared block."""
    known: dict[tuple[int, Hashable], Compiled] = {}
    code: list[list[Compiled]] = []
    for rank in program.ranks:
        kind = seconds.alike(rank.rank) if isinstance(seconds, RankedSeconds) else rank.rank
        code.append([])
        for block in rank.blocks:
            key = (id(block), kind)
            if key not in known:
                known[key] = compile_one(block, rank.rank)
            code[-1].append(known[key])
    return code


# Why: docs/decisions/engine.md, Does a send wait for its receiver?
def simulate(program: Program, seconds: Seconds, *, record: bool = False) -> Simulation:
    """Simulate a program at the op level.  Raise DeadlockError if ranks wait for each other
    forever.  `record` keeps the intervals."""
    clocks = [Clock(r.rank, program.pp, program.embedding) for r in program.ranks]
    code = compile_program(
        program, seconds, lambda b, rank: compile_block(b, rank, seconds, record)
    )
    messages: dict[int, float] = {}
    intervals: list[Interval] | None = [] if record else None

    def advance(rank: RankProgram, clock: Clock) -> bool:
        return _advance(rank, clock, code[rank.rank], messages, intervals)

    drive(program, clocks, messages, advance)
    return simulation(program, clocks, code, intervals or ())


class Busy(Protocol):
    @property
    def busy_s(self) -> tuple[float, ...]: ...


def simulation(
    program: Program,
    clocks: Sequence[Clock],
    code: Sequence[Sequence[Busy]],
    intervals: Iterable[Interval] = (),
) -> Simulation:
    """Return the simulation of a program whose ranks have run, from clocks and compiled blocks."""
    totals = []
    for rank in program.ranks:
        seconds = [0.0] * len(STREAMS)
        for block, count in zip(code[rank.rank], rank.runs, strict=True):
            for stream, busy_s in enumerate(block.busy_s):
                seconds[stream] += busy_s * count
        totals.append(tuple(seconds))
    ends = tuple(max(clock.free) for clock in clocks)
    return Simulation(
        step_s=max(ends), rank_end_s=ends, stream_busy_s=tuple(totals), intervals=tuple(intervals)
    )


def drive(
    program: Program,
    clocks: list[Clock],
    messages: dict[int, float],
    advance: Callable[[RankProgram, Clock], bool],
) -> None:
    """Run every rank until it needs a message that is not sent yet, and repeat until all ranks end.
    Raise DeadlockError if no rank can continue before that."""
    waiting: dict[int, int] = {}
    ready = list(reversed(range(program.pp)))
    done = 0
    while ready:
        rank = ready.pop()
        clock = clocks[rank]
        if advance(program.ranks[rank], clock):
            done += 1
        elif clock.awaiting is not None:
            waiting[clock.awaiting] = rank
        for key in [key for key in waiting if key in messages]:
            ready.append(waiting.pop(key))
    if done < program.pp:
        stuck = [f"rank {rank} waits for message {_named(key)}" for key, rank in waiting.items()]
        raise DeadlockError("; ".join(stuck))


def _advance(
    rank: RankProgram,
    clock: Clock,
    code: list[TimedBlock],
    messages: dict[int, float],
    intervals: list[Interval] | None,
) -> bool:
    """Run a rank's steps until the rank is done (True) or a message is missing (False)."""
    steps = rank.steps
    while clock.position < len(steps):
        index, micro_batch, chunk = steps[clock.position]
        block = code[index]
        arrived: dict[Event, float] = {}
        for event in block.receives:
            scale, offset = clock.incoming(event)
            key = scale * pass_number(micro_batch, chunk, clock.pp) + offset
            if key not in messages:
                clock.awaiting = key
                return False
            arrived[event] = messages[key]
        _run(block, clock, arrived, messages, micro_batch, chunk, intervals)
        clock.position += 1
    return True


def _run(
    block: TimedBlock,
    clock: Clock,
    local: dict[Event, float],
    messages: dict[int, float],
    micro_batch: int,
    chunk: int,
    intervals: list[Interval] | None,
) -> None:
    """Run one block. `local`: times of the block's events; at entry those of messages."""
    free, events = clock.free, clock.events
    for stream, (seconds, issue, held), wait, begin, event, shared, send, action in block.items:
        start = free[stream]
        if issue:
            free[HOST] += issue
            start = max(start, free[HOST])
        if wait:
            at = local[wait] if wait in local else events[(wait, micro_batch, chunk)]
            start = max(start, at)
        end = free[stream] = start + seconds
        if held:
            free[HOST] = max(free[HOST], end)
        if begin:
            local[begin] = start
        if event:
            local[event] = end
            if shared:
                events[(event, micro_batch, chunk)] = end
        if send:
            scale, offset = clock.outgoing(send)
            messages[scale * pass_number(micro_batch, chunk, clock.pp) + offset] = end
        if intervals is not None and action.kind not in ORDERING:
            intervals.append(
                Interval(
                    clock.rank, action.stream, start, end, block.label, action, micro_batch, chunk
                )
            )
