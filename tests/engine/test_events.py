"""The trace is valid JSON of the format, and its durations are the simulation's."""

import json
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import STREAMS
from rematbench.engine.simulate.op_level import simulate
from rematbench.evaluate.evaluation import evaluate_program
from rematbench.evaluate.perfetto import WAIT_THREAD, exposed_waits, timeline_events, write_timeline
from tests.problems import BALANCED, half, problem, transfers
from tests.program_text import parse_program


@pytest.fixture(scope="module")
def run() -> Any:
    given = problem(pp=2, vpp=2, tp=2, global_batch=4)
    plan = transfers(given.base_plan.with_rules(BALANCED, half()), reload_slots=2)
    program = lower(plan, given)
    evaluation = evaluate_program(given, plan, program, record=True)
    return SimpleNamespace(title="a step", evaluation=evaluation)


@pytest.fixture(scope="module")
def trace(run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    write_timeline(run.title, run.evaluation, path)
    assert [p.name for p in path.parent.iterdir()] == ["trace.json"]
    return json.loads(path.read_text())


def test_every_event_has_what_the_format_asks_for(trace: dict[str, Any]) -> None:
    needs = {"X": {"ts", "dur", "name"}, "C": {"ts", "name", "args"}, "M": {"name", "args"}}
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == set(needs)
    for event in events:
        assert needs[event["ph"]] | {"pid", "tid"} <= set(event)
    assert trace["otherData"]["title"] == "a step"
    threads = [event for event in events if event["name"] == "thread_name"]
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in threads}
    assert [names[1, i] for i in range(len(STREAMS))] == list(STREAMS)
    assert names[0, WAIT_THREAD] == "exposed waits"


def test_durations_sum_to_the_busy_seconds_of_every_stream(run: Any, trace: dict[str, Any]) -> None:
    total: dict[tuple[int, int], float] = defaultdict(float)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            total[event["pid"], event["tid"]] += event["dur"] * 1e-6
    simulation = run.evaluation.simulation
    for rank in (0, 1):
        for thread, stream in enumerate(STREAMS):
            assert total[rank, thread] == pytest.approx(simulation.busy_s(rank, stream), rel=1e-6)


def test_compute_and_its_waits_fill_the_time_until_its_last_kernel(
    run: Any, trace: dict[str, Any]
) -> None:
    for rank in (0, 1):
        mine = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == rank]
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in mine if e["tid"] in (0, WAIT_THREAD)
        )  # fmt: skip
        assert spans[0][0] == 0
        for (_, end), (start, _) in pairwise(spans):
            assert start == pytest.approx(end, abs=1e-4)
        compute = [i for i in run.evaluation.simulation.intervals if i.stream == "compute"]
        last = max(i.end_s for i in compute if i.rank == rank)
        assert spans[-1][1] == pytest.approx(last * 1e6)


def test_the_counter_starts_and_ends_with_the_states_alone(run: Any, trace: dict[str, Any]) -> None:
    for rank in (0, 1):
        counters = [e["args"] for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == rank]
        held = run.evaluation.ranks[rank]
        assert counters[-1]["activations"] == 0
        assert {c["states"] for c in counters} == {held.parameter + held.gradient + held.optimizer}
        assert {c["staging"] for c in counters} == {held.pools}
        assert max(c["activations"] for c in counters) > 0


def test_a_wait_is_named_after_what_it_waits_for() -> None:
    program = parse_program(
        "rank 0\nblock F\n"
        "F0.0 compute L0.a a=L0.x:8 e=e0 n=1\n"
        "WAIT0.0 d2h - w=e0\n"
        "D2H0.0 d2h L0.x r=L0.x a=L0.x@host:8 e=e1 n=4\n"
        "F0.0 compute L0.b n=2\n"
        "WAIT0.0 compute - w=e1\n"
        "F0.0 compute L0.c n=1\n"
        "FREE0.0 compute - f=L0.x,L0.x@host\n"
    )
    items = simulate(program, lambda action, rank: float(action.nbytes), record=True).intervals
    (wait,) = exposed_waits(0, items, {})
    assert wait["name"] == "waits for D2H0.0 (d2h)"
    assert (wait["ts"], wait["dur"]) == (3e6, 2e6)


def test_a_step_that_was_not_recorded_is_refused(run: Any) -> None:
    given = problem()
    evaluation = evaluate_program(given, given.base_plan, lower(given.base_plan, given))
    with pytest.raises(ValueError, match="record=True"):
        list(timeline_events(evaluation))
