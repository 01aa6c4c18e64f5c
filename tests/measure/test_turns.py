"""Turns share one model's weights and compute what an executor does; rates of a tiny layer."""

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.costs.operators.kernels import Gemm
from rematbench.engine.lowering.lower import lower
from rematbench.host.gpu_state import GpuState
from rematbench.measure.parts.rates import gap, measure_rates
from rematbench.measure.records import Rate, read_lines
from rematbench.measure.torch import repeats, turns
from rematbench.measure.torch.probe_calls import (
    Place,
    Probe,
    attention_probes,
    layer_probes,
    sustained,
)
from rematbench.measure.torch.probe_rates import LONG_FLOP, Rates
from rematbench.paper.tables.gpu_rates import rates_table
from rematbench.worlds.records.record import Provenance
from rematbench.worlds.torch.batch import make_batch, micro_batches
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.rank_model import RankModel
from tests.campaigns import suite_text, tiny
from tests.worlds.torch import cases

CPU = torch.device("cpu")


def test_turns_train_one_model_and_compute_what_an_executor_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "TIMED_S", 0.0)  # one timed step
    plans = [cases.case("one", name).plan for name in ("keep", "full")]
    problem = cases.case("one", "keep").problem
    by_turns = turns.Turns(CPU, GpuState)
    for plan in plans:
        status, reason, seen = by_turns.turn(problem, plan)
        assert (status, reason, len(seen["step_s"])) == ("ok", "", 1)
    groups = Groups(problem.layout, problem.system.parallel.rank_order, 0)
    model = RankModel(problem, plans[0], groups.place, CPU, turns.SEED)
    batch = make_batch(problem.workload, problem.layout.global_batch, turns.SEED, 0)
    model.batches = micro_batches(batch, problem.layout, groups.place, CPU)
    for plan in plans:  # a turn: a warm-up and a step, by an optimizer that begins
        alone = Executor(lower(plan, problem).ranks[0], model, groups, optimizer=turns.RULE)
        alone.run_step()
        alone.run_step()
    for name, parameter in model.parameters.items():
        assert torch.equal(parameter.flat, by_turns.parameters[name].flat), name


def test_a_turn_that_fails_says_why_and_the_next_one_runs() -> None:
    problem, plan = (cases.case("one", "keep").problem, cases.case("one", "keep").plan)
    by_turns = turns.Turns(CPU, GpuState)
    broken = cases.case("pp2", "keep").plan
    status, reason, seen = by_turns.turn(problem, broken)
    assert (status, bool(reason), seen) == ("failed", True, {})
    assert by_turns.turn(problem, plan)[0] == "ok"


def test_probes_are_the_kernels_of_the_operator_tables() -> None:
    problem = cases.case("one", "keep", precision="bf16").problem
    place = Place("tiny", problem, CPU)
    found = list(layer_probes(place, compiled=True))
    gemms = [probe for probe in found if probe.what == "gemm"]
    tables = (problem.layer(0), problem.head)
    wanted = [
        (kernel.m, kernel.n, kernel.k, direction)
        for table in tables
        for op in table.ops
        for direction in ("forward", "backward_input", "backward_weight")
        for kernel in getattr(op, direction)
        if isinstance(kernel, Gemm)
    ]
    sizes = [(*(int(p.shape[key]) for key in "mnk"), p.shape["direction"]) for p in gemms]
    assert sizes == wanted
    for (m, n, k, direction), probe in zip(wanted, gemms, strict=True):
        assert probe.work == 2.0 * m * n * k
        assert probe.predicted_s == problem.cost.kernel_s(Gemm(m, n, k), direction)  # type: ignore[arg-type]
        made: Any = probe.make()()
        if direction != "backward_weight":  # which adds into a buffer
            assert tuple(made.shape) == (m, n)
    rest = [probe for probe in found if probe.what != "gemm" and not probe.compiled]
    assert {(p.what, p.implementation, p.shape["pass"]) for p in rest} == {
        (what, word, way)
        for what, words in (("norm", ("torch", "eager")), ("cross_entropy", ("eager",)))
        for word in words
        for way in ("forward", "backward")
    }
    for probe in rest:
        probe.make()()
    assert sum(probe.compiled for probe in found) == 4
    runs = [p for p in attention_probes(place) if p.implementation in ("flash", "math")]
    shapes = {p.what: p.make()() for p in runs if p.implementation == "flash"}
    kind = problem.workload.model
    assert shapes["attention_forward"].shape[1] == kind.num_heads  # type: ignore[attr-defined]
    assert shapes["attention_backward"][1].shape[1] == kind.num_kv_heads  # type: ignore[index]


def test_a_turns_weights_are_drawn_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host took half a minute of a GPU's time for 2.8 billion weights."""
    asked: list[bool] = []
    made = turns.RankModel

    def noted(*given: Any, **known: Any) -> RankModel:
        asked.append(known["device_weights"])
        return made(*given, **known)

    monkeypatch.setattr(turns, "RankModel", noted)
    case = cases.case("one", "keep")
    turns.Turns(CPU, GpuState).executor(case.problem, case.plan)
    assert asked == [True]


def test_sustained_probes_are_those_of_flop_once_more() -> None:
    problem = cases.case("one", "keep", precision="bf16").problem
    every = list(layer_probes(Place("tiny", problem, CPU), compiled=True))
    found = list(sustained(every, 1.5))
    assert len(found) == sum(p.what == "gemm" for p in every)
    assert {(p.for_s, p.shape["for_s"]) for p in found} == {(1.5, "1.5")}
    assert not any("for_s" in p.shape for p in every)


def test_long_calls_come_last_and_what_heats_the_device_before_them() -> None:
    asked = [
        probe(work=2 * LONG_FLOP, unit="flop"),
        probe(work=1.0, unit="flop", for_s=1.0),
        probe(compiled=True),
        probe(work=1.0, unit="flop"),
    ]
    found = [timed.probe for timed in Rates(CPU, time.monotonic() + 60).run(asked, seed=1)]
    assert found == asked[::-1]


def probe(**fields: Any) -> Probe:
    known: dict[str, Any] = {"what": "gemm", "implementation": "torch", "shape": {}}
    return Probe(**known | {"make": lambda: lambda: None} | fields)


def test_what_does_not_run_loses_nothing_of_the_rest() -> None:
    def broken() -> None:
        raise RuntimeError("No viable backend for this. A hint.")

    asked = [
        probe(make=lambda: broken),
        probe(make=lambda: 1 / 0),
        probe(room_bytes=1 << 60),
        probe(compiled=True, work=8.0, predicted_s=2.0),
    ]
    found = list(Rates(CPU, time.monotonic() + 60).run(asked, seed=1))
    assert found[-1].status == "ok"  # what is compiled comes last
    assert (found[-1].probe, len(found[-1].seconds) > 0) == (asked[-1], True)
    reasons = sorted((rate.status, rate.reason) for rate in found[:-1])
    assert reasons[0][0] == "failed"
    assert "ZeroDivisionError" in reasons[0][1]
    assert [status for status, _ in reasons[1:]] == ["skipped", "skipped"]
    assert not any("A hint" in reason for _, reason in reasons)
    late = Rates(CPU, time.monotonic() - 1)
    assert [timed.reason for timed in late.run(asked[-1:], 1)] == ["no time was left"]


def test_repeats_end_when_they_are_steady_or_the_time_is_over() -> None:
    later = time.monotonic() + 60
    steady = iter([9.0, *[1.0] * 100])  # the first warms up
    assert repeats.repeated(lambda: next(steady), later) == [1.0] * repeats.MIN_REPEATS
    wild = iter(float(n % 7 + 1) for n in range(1000))
    assert len(repeats.repeated(lambda: next(wild), later)) == repeats.MAX_REPEATS
    assert len(repeats.repeated(lambda: 1.0, time.monotonic() - 1)) == 1
    assert repeats.spread_of([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


def test_the_gap_is_what_bytes_do_not_explain() -> None:
    known: dict[str, Any] = {"what": "elementwise", "implementation": "", "dtype": "", "shape": {}}
    known |= {"status": "ok", "n": 9, "unit": "bytes"}
    known |= {"provenance": Provenance(rematbench="", python="", platform="", written="")}
    pair = [Rate(**known, work=w, median_s=2e-6 + w / 1e12) for w in (2e8, 1e8)]
    found = gap(pair, 1e-6)
    assert found is not None
    assert (found.median_s, found.predicted_s) == (pytest.approx(2e-6), 1e-6)
    assert gap(pair[:1], 1e-6) is None


def test_rates_of_a_suite_are_a_line_each_and_a_table(tmp_path: Path) -> None:
    problem = tiny("tiny", model="tiny-llama-deep", gpus=1, seq_len=16, global_batch=1)
    sizes = {"attention_lengths": [16], "copy_bytes": [4096], "copy_gemm": 16}
    path, out = tmp_path / "rates.yaml", tmp_path / "rates.jsonl"
    path.write_text(suite_text([problem], compiled=False, **sizes))
    measure_rates(path, out, "cpu", 30.0)
    lines = read_lines(out, Rate)
    assert {line.what for line in lines} == {
        *("gemm", "attention_forward", "attention_backward", "norm", "cross_entropy", "gap"),
        *("elementwise", "host_issue", "overlap", "pinned_allocation"),
        *("memcpy_d2h", "memcpy_h2d", "memcpy_bidirectional"),
    }
    assert all(line.median_s and line.n for line in lines if line.status == "ok")
    assert {line.implementation for line in lines if line.status != "ok"} <= {"cudnn", "efficient"}
    assert "times mean nothing" in rates_table(lines).markdown()
