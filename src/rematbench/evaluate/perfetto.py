"""The timeline of a simulated step as JSON for ui.perfetto.dev and chrome://tracing.

A process is a pipeline rank, and a thread is a stream of the rank.  One more thread shows exposed
waits: when the compute stream was idle, and for which action.  A counter shows device bytes over
time.  Format: Trace Event Format, Google, 2016 (complete events X, counters C, metadata M;
microseconds).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from rematbench.engine.program.action import STREAM_INDEX, STREAMS, Kind
from rematbench.engine.program.ledger import Interval, timeline
from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.host.files import write_atomically

Event = dict[str, Any]

WAITS = "exposed waits"
WAIT_THREAD = len(STREAMS)
RED = "terrible"
"""The reserved colour name that both viewers draw in red."""


def write_timeline(title: str, evaluation: PlanEvaluation, path: Path) -> None:
    """Write the timeline of a recorded evaluation.  The file appears whole or not at all."""
    document = {
        "traceEvents": list(timeline_events(evaluation)),
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "step_s": evaluation.step_s},
    }
    write_atomically(path, msgspec.json.encode(document))


def timeline_events(evaluation: PlanEvaluation) -> Iterator[Event]:
    """Return all timeline events of a recorded evaluation, by rank.  Raise ValueError if no
    intervals were recorded."""
    intervals = evaluation.simulation.intervals
    if not intervals:
        raise ValueError("the evaluation has no intervals: evaluate it with record=True")
    by_rank: list[list[Interval]] = [[] for _ in evaluation.ranks]
    for item in intervals:
        by_rank[item.rank].append(item)
    arrivals = {item.end_s: item for item in intervals if item.action.kind is Kind.SEND}
    for rank, items in enumerate(by_rank):
        yield from _names(rank)
        yield from (_slice(item) for item in items if item.end_s > item.start_s)
        yield from exposed_waits(rank, items, arrivals)
        yield from _memory(rank, items, evaluation)


def _names(rank: int) -> Iterator[Event]:
    yield _meta(rank, 0, "process_name", name=f"pipeline rank {rank}")
    yield _meta(rank, 0, "process_sort_index", sort_index=rank)
    for thread, name in enumerate((*STREAMS, WAITS)):
        yield _meta(rank, thread, "thread_name", name=name)
        yield _meta(rank, thread, "thread_sort_index", sort_index=thread)


def _meta(rank: int, thread: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": what, "args": args}


def _slice(item: Interval) -> Event:
    action = item.action
    operator = ".".join(word for word in (action.part, action.op) if word)
    event = _span(item.rank, STREAM_INDEX[item.stream], item.start_s, item.end_s)
    comm = action.exchange.comm
    moved = comm.nbytes if comm else action.nbytes
    args: Event = {"block": item.block}
    if moved:
        args["bytes"] = moved
    return event | {"name": f"{_label(item)} {operator}", "cat": item.stream, "args": args}


def _label(item: Interval) -> str:
    return f"{item.action.kind.value}{item.micro_batch}.{item.chunk}"


def _span(rank: int, thread: int, start_s: float, end_s: float) -> Event:
    return {
        "ph": "X",
        "pid": rank,
        "tid": thread,
        "ts": round(start_s * 1e6, 6),
        "dur": round((end_s - start_s) * 1e6, 6),
    }


def exposed_waits(
    rank: int, items: Iterable[Interval], arrivals: dict[float, Interval]
) -> Iterator[Event]:
    """Return events for the gaps in the compute stream.  A gap is named after the action at whose
    end compute resumed: an action on another stream of the rank, otherwise a message from another
    rank."""
    own = {i.end_s: i for i in items if i.stream != "compute" and i.end_s > i.start_s}
    now = 0.0
    for item in items:
        if item.stream != "compute":
            continue
        if item.start_s > now:
            cause = own.get(item.start_s) or arrivals.get(item.start_s)
            name = f"waits for {_label(cause)} ({cause.stream})" if cause else "waits"
            event = _span(rank, WAIT_THREAD, now, item.start_s)
            args = {"before": _label(item), "from_rank": cause.rank if cause else rank}
            yield event | {"name": name, "cat": "wait", "cname": RED, "args": args}
        now = max(now, item.end_s)


def _memory(rank: int, items: list[Interval], evaluation: PlanEvaluation) -> Iterator[Event]:
    """Counter events of device bytes (states, staging, activations), one for each time at which
    they change."""
    held = evaluation.ranks[rank]
    resident = held.parameter + held.gradient + held.optimizer
    at_time = dict(timeline(items, rank))
    for at, live in at_time.items():
        yield {
            "ph": "C",
            "pid": rank,
            "tid": 0,
            "name": "device bytes",
            "ts": round(at * 1e6, 6),
            "args": {"states": resident, "staging": held.pools, "activations": live},
        }
