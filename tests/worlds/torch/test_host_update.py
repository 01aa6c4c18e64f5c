"""AdamW on states in host memory: on a thread of its own, and the same bits as on the device."""

import threading
from collections.abc import Iterable, Iterator

import pytest
import torch
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.plan import Plan
from rematbench.workload import Precision
from rematbench.worlds.torch import worker
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.parameters import Parameter
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.rank_processes import execute_cases
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.threads import ThreadStreams

STEPS = 3


def hosted(plan: Plan) -> Plan:
    """The plan with its optimizer in host memory."""
    kept = tuple(state for state in plan.states if state.kind != "optimizer")
    return replace(plan, states=(*kept, replace(plan.state("optimizer"), home="host")))


def pair(layout: str, plan: str, precision: Precision = "fp32") -> tuple[Case, Case]:
    """A raw plan as it is, and with its optimizer in host memory; both on the same batches."""
    whole = cases.case(layout, plan, precision=precision)
    moved = {"name": f"{whole.name} hosted", "plan": hosted(whole.plan)}
    return whole, Case(**{**vars(whole), **moved})


def weights(given: Case, delay_s: float = 0.0) -> Iterator[list[torch.Tensor]]:
    """All weights after each of some steps of a case with one rank."""
    device = torch.device("cpu")
    groups = worker._groups(given, 0, {})
    model = RankModel(given.problem, given.plan, groups.place, device, given.seed)
    streams = ThreadStreams(0, delay_s) if delay_s else None
    program = lower(given.plan, given.problem).ranks[0]
    executor = Executor(program, model, groups, optimizer=given.optimizer, streams=streams)
    for step in range(STEPS):
        worker._load(given, executor, step)
        executor.run_step()
        yield [parameter.flat.clone() for parameter in model.parameters.values()]


def same(whole: Iterable[list[torch.Tensor]], given: Iterable[list[torch.Tensor]]) -> list[bool]:
    """Whether all weights are equal bit by bit, after each step."""
    return [all(map(torch.equal, a, b)) for a, b in zip(whole, given, strict=True)]


def check_ranks(pairs: list[tuple[Case, Case]]) -> None:
    """Each pair has the same bits on several ranks, and the second the ledger's bytes."""
    results = execute_cases([case for pair in pairs for case in pair], timeout_s=240.0)
    for (_, case), whole, moved in zip(pairs, results[::2], results[1::2], strict=True):
        assert (whole.status, moved.status) == ("ok", "ok"), (whole.reason, moved.reason)
        assert laws.same_bits(whole, moved)
        assert laws.bytes_differ(case, moved) == []


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("plan", ["keep", "offload-layers"])
def test_the_same_weights_after_each_step(plan: str, precision: Precision) -> None:
    whole, given = pair("one", plan, precision)
    assert same(weights(whole), weights(given)) == [True] * STEPS


def test_the_same_weights_where_copies_are_late() -> None:
    whole, given = pair("one", "keep")
    assert same(weights(whole), weights(given, delay_s=0.01)) == [True] * STEPS


def test_updates_run_on_a_thread_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    update = Parameter.update

    def noted(self: Parameter, *given: object) -> None:
        seen.append(threading.current_thread().name)
        update(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Parameter, "update", noted)
    for case, own in zip(pair("one", "keep"), (False, True), strict=True):
        seen.clear()
        list(weights(case))
        assert {name.startswith("host_update") for name in seen} == {own}


def test_a_failure_on_the_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Parameter, *given: object) -> None:
        raise RuntimeError("no update")

    monkeypatch.setattr(Parameter, "update", fails)
    _, given = pair("one", "keep")
    with pytest.raises(Exception, match="no update"):
        next(weights(given))


def test_bytes_are_the_ledgers_and_states_leave_the_device() -> None:
    whole, given = pair("one", "keep")
    results = [laws.run_here(case) for case in (whole, given)]
    assert laws.same_bits(*results)
    assert laws.bytes_differ(given, results[1]) == []
    grid.check_gradients(given, results[1])
    on_device, left = (result.ranks[0].state_bytes for result in results)
    parameters = given.problem.workload.model.parameters
    assert on_device - left == 12 * parameters  # master, two moments


@pytest.mark.full
def test_sharded() -> None:
    check_ranks([pair(layout, "keep") for layout in ("dp2", "pp2")])
