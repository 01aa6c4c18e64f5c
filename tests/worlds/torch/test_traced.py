"""The traced world: fake tensors hold the bytes that real ones hold."""

import pytest
import torch

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.worlds.torch import arithmetic, dispatch, worker
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.rank_model import NotExecutable
from rematbench.worlds.torch.single_rank import trace_rank
from tests.worlds.torch import cases, grid
from tests.worlds.torch.cases import TINY_GPT

LAYOUTS = ("tp2", "cp2", "pp4-vpp2")
MORE = ("pp2", "ulysses2", "dp2", "tp2-pp2", "tp2-ulysses2")


def real(case: Case) -> tuple[list[tuple[int, int]], int, int]:
    found = worker.run_case(Case(**{**vars(case), "steps": 1}), 0, torch.device("cpu"), {})
    return found.bytes_after, found.peak_bytes, found.state_bytes


def fake(case: Case, stage: int = 0) -> tuple[list[tuple[int, int]], int, int]:
    found = trace_rank(case.problem, case.plan, stage)
    return found.bytes_after, found.peak_bytes, found.state_bytes


@pytest.fixture
def _as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of a CPU, where a trace has a GPU's fused kernels."""
    monkeypatch.setattr(arithmetic, "fused", lambda x: False)


@pytest.mark.usefixtures("_as_on_a_cpu")
@pytest.mark.parametrize("plan", cases.PLANS)
def test_fake_bytes_equal_real_ones_inside_operators_too(plan: str) -> None:
    """After every action, states, and the peak with what lives inside operators."""
    case = cases.case("one", plan)
    assert fake(case) == real(case)


@pytest.mark.usefixtures("_as_on_a_cpu")
@pytest.mark.parametrize("case", grid.method_cases("one"), ids=lambda case: case.name)
def test_fake_bytes_of_methods_equal_real_ones(case: Case) -> None:
    assert fake(case) == real(case)


@pytest.mark.usefixtures("_as_on_a_cpu")
def test_fake_bytes_of_the_gpt_variant_equal_real_ones() -> None:
    case = cases.case("one", "full", model=TINY_GPT)
    assert fake(case) == real(case)


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)]
)
def test_any_stage_of_any_layout_has_its_ledgers_bytes(layout: str) -> None:
    for case in [*grid.raw_cases(layout, "offload"), *grid.method_cases(layout, ("memo", "mst"))]:
        program = lower(case.plan, case.problem)
        for stage, rank in enumerate(program.ranks):
            assert fake(case, stage)[0] == list(live_bytes(rank.actions())), (case.name, stage)


def test_a_tensor_that_outlives_its_action_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation of the traced law: somebody keeps a copy that no action knows."""
    kept = []
    rms_norm = arithmetic.rms_norm

    def hoarding(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        kept.append(x.clone())
        return rms_norm(x, weight)

    case = cases.case("one", "keep")
    (rank,) = lower(case.plan, case.problem).ranks
    monkeypatch.setattr(arithmetic, "rms_norm", hoarding)
    assert fake(case)[0] != list(live_bytes(rank.actions()))


def test_remembered_shapes_tell_apart_what_differs() -> None:
    """Strides, dtypes, keywords and the type of a number are part of a call."""
    with torch.device("meta"), dispatch.MetaMode():
        x = torch.empty(4, 6)
        for _ in range(2):  # made, then remembered
            assert (x + 1).dtype == torch.float32
            assert (x.t() + 1).stride() == (1, 6)
            assert torch.empty(4, 6, dtype=torch.int64).add(1).dtype == torch.int64
            assert torch.empty(4, 6, dtype=torch.int64).add(1.0).dtype == torch.float32
            assert x.sum(0, keepdim=True).shape == (1, 6)
            assert x.sum(0).shape == (6,)
        y = x.clone()
        assert y.untyped_storage()._cdata != x.clone().untyped_storage()._cdata


def test_what_is_not_executable_is_not_traced() -> None:
    case = cases.case("one", "keep", attention="unfused")
    assert fake(case) == real(case)
    with pytest.raises(NotExecutable, match="fp16"):
        trace_rank(cases.tiny("one", "fp16"), case.plan)
