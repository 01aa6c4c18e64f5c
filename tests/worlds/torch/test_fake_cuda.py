"""The executor's CUDA path on fake tensors: operators, devices, streams, memory.  No GPU."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch
from msgspec.structs import replace
from torch import Tensor

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.ledger import live_bytes
from rematbench.worlds.torch import operators_attention, storages
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.streams import CudaStreams
from tests.worlds.torch import cases, grid
from tests.worlds.torch.cases import TINY_GPT
from tests.worlds.torch.fake_cuda import DEVICE, OVERLAP, run
from tests.worlds.torch.recorder import Event, recording
from tests.worlds.torch.test_faults import edited

FAST = (
    *(("one", "offload-slots"), ("tp2", "windows"), ("cp2", "rows")),
    ("tp2-ulysses2", "offload"),
)
MORE = (
    *(("one", plan) for plan in ("offload", "offload-layers", "rows")),
    ("dp2", "full"),
    *(("tp2", plan) for plan in ("keep", "mini-dropped")),
    *(("tp2-no-sp", "mini"), ("pp2", "offload")),
    *(("tp2-cp2", "skeletal"), ("pp2-vpp2", "offload-slots")),
)


def check(case: Case, patch: pytest.MonkeyPatch) -> None:
    """No fault on any stage, and the ledger's bytes after every action."""
    for stage in range(case.problem.layout.pp):
        recorder, executor = run(case, stage, patch)
        assert recorder.faults == []
        assert recorder.operators > 1000
        actions = lower(case.plan, case.problem).ranks[stage].actions()
        assert executor.bytes_after == list(live_bytes(actions))


@pytest.mark.parametrize(
    ("layout", "plan"), [*FAST, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)]
)
def test_streams_and_memory_are_ordered_and_the_host_never_waits(
    layout: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(cases.case(layout, plan, precision="bf16"), monkeypatch)


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(each, marks=pytest.mark.full) for each in ("tp2", "pp2-vpp2"))]
)
def test_collectives_beside_kernels(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(cases.case(layout, "windows", precision="bf16", system_changes=OVERLAP), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_other_precisions_and_the_gpt_variant(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(cases.case("cp2", "full", precision=precision), monkeypatch)
    check(cases.case("one", "mini", precision=precision, model=TINY_GPT), monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("changes", [{}, OVERLAP, OVERLAP | {"tp_overlap": "backward"}])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_every_plan_on_every_layout(
    layout: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan in cases.PLANS:
        check(cases.case(layout, plan, precision="bf16", system_changes=changes), monkeypatch)
    for case in grid.method_cases(layout) if not changes else ():
        check(case, monkeypatch)


# -- what the recorder must find --------------------------------------------------------------


def faults(layout: str, plan: str, patch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    case = cases.case(layout, plan, precision="bf16")
    return run(Case(**{**vars(case), **changes}), 0, patch)[0].faults


def test_steps_that_do_not_wait_for_their_batch_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaStreams, "begin", lambda streams: None)
    assert any("does not wait for default" in fault for fault in faults("one", "keep", monkeypatch))


def test_a_step_that_does_not_end_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaStreams, "flush", lambda streams: None)
    assert any("zero_ on default" in fault for fault in faults("one", "keep", monkeypatch))


def test_receives_whose_memory_compute_still_uses_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CudaStreams, "lend", lambda streams, stream, tensor: None)
    assert any("message" in fault for fault in faults("pp2", "keep", monkeypatch))


def test_a_message_whose_handle_outlives_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's handle holds what it sends."""
    monkeypatch.setattr(CudaStreams, "under_way", lambda streams, channel, work: work)
    with pytest.raises(AssertionError):
        check(cases.case("pp2", "keep", precision="bf16"), monkeypatch)


@pytest.mark.parametrize("stream", ["compute", "tp", "d2h", "h2d"])
def test_a_stream_that_waits_for_nothing_is_found(
    stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(action: Action) -> list[Action]:
        waits = action.kind is Kind.WAIT and action.stream == stream
        return [replace(action, kind=Kind.EVENT, wait="") if waits else action]

    whole = cases.case("tp2", "offload-layers", precision="bf16")
    assert faults("tp2", "offload-layers", monkeypatch, program=edited(whole, without).program)


def test_scratch_of_a_collective_from_computes_pool_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let go of as soon as it is issued, it would be compute's again at once."""

    def scratch(streams: CudaStreams, current: Tensor) -> None:
        with streams.room():
            taken = torch.empty(64, device=DEVICE)
        with streams.on("tp"):
            taken.fill_(1.0)
        del taken
        with streams.on("compute"):
            torch.zeros(64, device=DEVICE)

    with recording(monkeypatch) as recorder:
        scratch(CudaStreams(DEVICE), torch.empty(1, device=DEVICE))
    assert any("memory that s2 may still use" in fault for fault in recorder.faults)


def test_a_blocking_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_index(slices: Tensor, order: list[int]) -> Tensor:
        index = torch.empty(len(order), dtype=torch.int64).to(DEVICE)
        return slices.index_select(1, index)

    monkeypatch.setattr(operators_attention, "_in_order", by_index)
    found = faults("cp2", "keep", monkeypatch)
    assert "aten::_to_copy holds up the host" in found


# -- the host pool ----------------------------------------------------------------------------


def reused(patch: pytest.MonkeyPatch, *, wait: bool) -> list[str]:
    """A reload reads a pinned block on h2d; compute waits for it and gives the block back; a copy
    of something older, which waits for compute no more, gets it."""
    with recording(patch) as recorder:
        streams, pool = CudaStreams(DEVICE), storages.HostPool(DEVICE)
        here = torch.zeros(8, dtype=torch.uint8, device=DEVICE)
        streams.begin()
        block = pool.take(("a", 0, 0), 8)
        with streams.on("d2h"):
            block.data.copy_(here, non_blocking=True)
        streams.wait("h2d", streams.mark("d2h"))
        with streams.on("h2d"):
            torch.empty_like(here).copy_(block.data, non_blocking=True)
        streams.wait("compute", streams.mark("h2d"))
        pool.give(("a", 0, 0), streams.mark("compute"))
        again = pool.take(("b", 0, 0), 8)
        assert again.data is block.data
        assert again.free_at is not None
        if wait:
            streams.wait("d2h", again.free_at)
        with streams.on("d2h"):
            again.data.copy_(here, non_blocking=True)
    assert pool.pinned_bytes == 8
    return recorder.faults


def test_a_pinned_block_is_written_again_after_its_last_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert reused(monkeypatch, wait=True) == []
    assert any("does not wait for" in fault for fault in reused(monkeypatch, wait=False))


def test_the_executor_waits_for_a_reused_block(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, object]] = []
    wait = CudaStreams.wait

    def noted(streams: CudaStreams, stream: str, mark: Any) -> None:
        waits.append((stream, mark))
        wait(streams, stream, mark)

    monkeypatch.setattr(CudaStreams, "wait", noted)
    _, executor = run(cases.case("one", "offload", precision="bf16"), 0, monkeypatch)
    given = {id(block.free_at) for block in executor.movers.host.spare}
    assert {stream for stream, _ in waits} >= {"d2h", "h2d", "compute"}
    copies = sum(a.kind is Kind.D2H for _, a, _, _ in executor.actions)
    reused_blocks = 2 * copies - len(given)
    asked = sum(1 for stream, mark in waits if stream == "d2h" and isinstance(mark.event, Event))
    assert asked >= reused_blocks > 0
