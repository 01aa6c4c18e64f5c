"""Actions x costs -> times.  Knows streams, events and messages; knows no method and no fate.

Streams are in-order queues.  An action starts when its stream is free and its host has issued it; a
WAIT holds its stream until an event; sends are buffered (they end one transfer after they start,
whether or not the receiver has posted), so a RECV costs nothing and its event is the message's
arrival.  The host is one more clock of a rank: it issues the rank's list one after the other, runs
ahead of the device, and waits for it only where the stack says so.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol, runtime_checkable

from msgspec import Struct

from rematbench.program.action import STREAM_INDEX, STREAMS, Action, Kind, is_local
from rematbench.program.program import Block, Program, RankProgram

EventKey = tuple[str, int, int]
MessageKey = tuple[str, int, int]
Seconds = Callable[[Action, int], float]
"""(action, rank) -> seconds on its stream."""


@runtime_checkable
class RankedSeconds(Protocol):
    """Seconds that say for which ranks they are equal: such ranks share compiled blocks."""

    def __call__(self, action: Action, rank: int) -> float:
        """Seconds on the action's stream."""
        ...

    def alike(self, rank: int) -> Hashable:
        """Equal for ranks on which every action takes equally long."""
        ...

    def issue_s(self, action: Action, rank: int) -> float:
        """Seconds that the host takes to issue the action; 0 where it costs nothing."""
        ...

    def held(self, action: Action) -> bool:
        """Whether the host waits until the action has ended."""
        ...


COMPUTE = STREAM_INDEX["compute"]
HOST = len(STREAMS)
"""Where the host's clock stands among those of the streams: behind them."""
TIMELESS = (Kind.FREE, Kind.ALLOC, Kind.RECV)
"""Kinds that take no part in time (a RECV's event is the message's arrival)."""


STILL = (Kind.WAIT, Kind.EVENT)
"""Kinds that take no time of their own."""


class DeadlockError(RuntimeError):
    """No rank can go on; the message names each rank's awaited message."""


class Interval(NamedTuple):
    """One action on the timeline (seconds from the start of the step)."""

    rank: int
    stream: str
    start_s: float
    end_s: float
    block: str
    action: Action
    micro_batch: int
    chunk: int


class Simulation(Struct, frozen=True, kw_only=True):
    """When each rank is done and how long each stream works; intervals only when asked for."""

    step_s: float
    rank_end_s: tuple[float, ...]
    stream_busy_s: tuple[tuple[float, ...], ...]
    intervals: tuple[Interval, ...] = ()

    def busy_s(self, rank: int, stream: str) -> float:
        """Seconds a stream of a rank works."""
        return self.stream_busy_s[rank][STREAM_INDEX[stream]]


class Clock:
    """Time of one rank: when each stream and the host are free, when each event happened."""

    def __init__(self, rank: int, pp: int) -> None:
        self.rank, self.pp = rank, pp
        self.free = [0.0] * (HOST + 1)
        self.events: dict[EventKey, float] = {}
        self.position = 0
        self.awaiting: MessageKey | None = None

    def incoming(self, event: str, micro_batch: int, chunk: int) -> MessageKey:
        """The message whose arrival is a RECV's event."""
        if event == "recv_e":
            return ("e", self.pp - 1 - self.rank, 0)
        return (event[-1], micro_batch, chunk * self.pp + self.rank)

    def outgoing(self, op: str, micro_batch: int, chunk: int) -> MessageKey:
        """The message a SEND delivers: to the next (forward) or previous (backward) stage."""
        if op == "tied":
            return ("e", self.rank, 0)
        stage = chunk * self.pp + self.rank
        return (op, micro_batch, stage + 1 if op == "f" else stage - 1)


class Timed(NamedTuple):
    """A compiled action: its stream and seconds, those that its host takes to issue it and whether
    the host then waits for its end; `wait`, `begin` and `event` as in the action, `shared` whether
    another block may wait for the event, `send` the message's direction."""

    stream: int
    seconds: float
    issue: float
    held: bool
    wait: str
    begin: str
    event: str
    shared: bool
    send: str
    action: Action


class TimedBlock(NamedTuple):
    """A compiled block: its timed actions and the receives it waits for."""

    items: tuple[Timed, ...]
    receives: tuple[str, ...]
    label: str


def compile_block(block: Block, rank: int, seconds: Seconds, record: bool = False) -> TimedBlock:
    """Bind seconds to the actions that take part in time; a recording also keeps those that only
    make or free room, at the time compute has reached when they are issued."""
    host = seconds if isinstance(seconds, RankedSeconds) else None
    items = []
    for action in block.actions:
        if action.kind in TIMELESS:
            if record:
                items.append(Timed(COMPUTE, 0.0, 0.0, False, "", "", "", False, "", action))
            continue
        items.append(
            Timed(
                STREAM_INDEX[action.stream],
                0.0 if action.kind in STILL else seconds(action, rank),
                host.issue_s(action, rank) if host and action.kind not in STILL else 0.0,
                host is not None and host.held(action),
                action.wait,
                action.begin,
                action.event,
                bool(action.event) and not is_local(action.event),
                action.op if action.kind is Kind.SEND else "",
                action,
            )
        )
    receives = tuple(item.wait for item in items if item.wait.startswith("recv_"))
    return TimedBlock(tuple(items), receives, block.label)


def compile_program(
    program: Program, seconds: Seconds, record: bool = False
) -> list[list[TimedBlock]]:
    """Every rank's blocks with seconds bound; one object for a block on ranks that are alike."""
    known: dict[tuple[int, Hashable], TimedBlock] = {}
    code: list[list[TimedBlock]] = []
    for rank in program.ranks:
        kind = seconds.alike(rank.rank) if isinstance(seconds, RankedSeconds) else rank.rank
        code.append([])
        for block in rank.blocks:
            key = (id(block), kind)
            if key not in known:
                known[key] = compile_block(block, rank.rank, seconds, record)
            code[-1].append(known[key])
    return code


def simulate(program: Program, seconds: Seconds, *, record: bool = False) -> Simulation:
    """Op-level times of a program.  DeadlockError when ranks wait for each other for ever."""
    clocks = [Clock(r.rank, program.pp) for r in program.ranks]
    code = compile_program(program, seconds, record)
    messages: dict[MessageKey, float] = {}
    intervals: list[Interval] | None = [] if record else None

    def advance(rank: RankProgram, clock: Clock) -> bool:
        return _advance(rank, clock, code[rank.rank], messages, intervals)

    drive(program, clocks, messages, advance)
    return Simulation(
        step_s=max(max(clock.free) for clock in clocks),
        rank_end_s=tuple(max(clock.free) for clock in clocks),
        stream_busy_s=busy(program, code),
        intervals=tuple(intervals or ()),
    )


def busy(program: Program, code: list[list[TimedBlock]]) -> tuple[tuple[float, ...], ...]:
    """Working seconds of every stream of every rank."""
    totals = []
    for rank in program.ranks:
        seconds = [0.0] * len(STREAMS)
        for block, count in zip(code[rank.rank], rank.runs, strict=True):
            for item in block.items:
                seconds[item.stream] += item.seconds * count
        totals.append(tuple(seconds))
    return tuple(totals)


def drive(
    program: Program,
    clocks: list[Clock],
    messages: dict[MessageKey, float],
    advance: Callable[[RankProgram, Clock], bool],
) -> None:
    """Let every rank run until it needs a message that is not sent yet; repeat until all end."""
    waiting: dict[MessageKey, int] = {}
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
        stuck = [f"rank {rank} waits for message {key}" for key, rank in waiting.items()]
        raise DeadlockError("; ".join(stuck))


def _advance(
    rank: RankProgram,
    clock: Clock,
    code: list[TimedBlock],
    messages: dict[MessageKey, float],
    intervals: list[Interval] | None,
) -> bool:
    """Run steps until done (True) or a message is missing (False)."""
    steps = rank.steps
    while clock.position < len(steps):
        index, micro_batch, chunk = steps[clock.position]
        block = code[index]
        arrived: dict[str, float] = {}
        for event in block.receives:
            key = clock.incoming(event, micro_batch, chunk)
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
    local: dict[str, float],
    messages: dict[MessageKey, float],
    micro_batch: int,
    chunk: int,
    intervals: list[Interval] | None,
) -> None:
    """Issue one block; `local` holds event times inside it (receives are there already)."""
    free, events = clock.free, clock.events
    for stream, seconds, issue, held, wait, begin, event, shared, send, action in block.items:
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
            messages[clock.outgoing(send, micro_batch, chunk)] = end
        if intervals is not None and action.kind not in STILL:
            intervals.append(
                Interval(
                    clock.rank, action.stream, start, end, block.label, action, micro_batch, chunk
                )
            )
