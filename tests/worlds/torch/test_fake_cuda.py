"""The executor's CUDA path on fake tensors: operators, devices, streams, memory.  No GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.worlds.torch import operators
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.streams import CudaStreams
from tests.worlds.torch import cases, grid
from tests.worlds.torch.cases import TINY_GPT
from tests.worlds.torch.fake_cuda import DEVICE, OVERLAP, run

FAST = (
    *(("one", "offload-slots"), ("tp2", "windows"), ("cp2", "rows")),
    ("tp2-ulysses2", "offload"),
    ("dp2-zero3", "windows"),
    ("tp2-dp2-ep2", "keep"),
)
MORE = (
    *(("one", plan) for plan in ("offload", "offload-layers", "rows")),
    ("dp2", "full"),
    *((layout, "offload-layers") for layout in ("dp2-zero2", "cp2-zero3", "tp2-dp2-zero3")),
    *(("tp2", plan) for plan in ("keep", "mini-dropped")),
    *(("tp2-no-sp", "mini"), ("pp2", "offload")),
    *(("tp2-cp2", "skeletal"), ("pp2-vpp2", "offload-slots")),
    *(("ep2", plan) for plan in ("full", "expert-rows", "expert-parts")),
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


def test_a_message_whose_handle_outlives_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's handle holds what it sends."""
    monkeypatch.setattr(CudaStreams, "pending", lambda streams, channel, work: work)
    with pytest.raises(AssertionError):
        check(cases.case("pp2", "keep", precision="bf16"), monkeypatch)


def test_a_blocking_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_index(slices: Tensor, order: list[int]) -> Tensor:
        index = torch.empty(len(order), dtype=torch.int64).to(DEVICE)
        return slices.index_select(1, index)

    monkeypatch.setattr(operators, "_in_order", by_index)
    found = faults("cp2", "keep", monkeypatch)
    assert "aten::_to_copy holds up the host" in found


# -- the host pool ----------------------------------------------------------------------------
