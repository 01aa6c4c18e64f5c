"""The traced world: fake tensors hold the bytes that real ones hold."""

import importlib.util
import multiprocessing as mp
import resource
import time
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.evaluate.evaluation import program_bytes
from rematbench.evaluate.problems import make_problem
from rematbench.inputs.job import Job
from rematbench.inputs.load import load_cluster, load_model, load_system
from rematbench.plan import Plan
from rematbench.worlds import traced
from rematbench.worlds.records.record import read_record, write_record
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import cells
from rematbench.worlds.torch import arithmetic, dispatch, movers, worker
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.dispatch import DispatchMode, MetaMode, Tracker
from rematbench.worlds.torch.rank_model import NotExecutable
from rematbench.worlds.torch.single_rank import trace_rank
from tests.campaigns import suite_text, tiny
from tests.problems import all_methods
from tests.typed import Ran, typed
from tests.worlds.torch import cases, grid
from tests.worlds.torch.cases import TINY_GPT

LAYOUTS = ("tp2", "cp2", "pp2")
MORE = ("pp4-vpp2", "ulysses2", "dp2", "tp2-pp2", "tp2-ulysses2")


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


# -- methods of optimizer states traced at scale: 7B under ZeRO 3 on the node of published logs ----


SPEC = Job(
    model="llama-7b", cluster="h100-80gb-dos", system="rematbench", gpus=4, seq_len=2048,
    global_batch=4, zero_stage=3,
)  # fmt: skip
TEXTS = (
    "zero_offload",
    "optimizer_offload:share=0.5,visiting=0.5",
    "full_recompute+optimizer_offload:share=1,start=ready,clip=false",
)


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_the_ledgers(text: str) -> None:
    """After every action; the states that stay, but for the loss and what has no place in them."""
    loaded = {
        "model": load_model("llama-7b"),
        "cluster": load_cluster("h100-80gb-dos"),
        "system": load_system("rematbench"),
    }
    problem = make_problem(replace(SPEC, **loaded))
    plan = all_methods().resolve(text).plan(problem)
    assert isinstance(plan, Plan)
    program = lower(plan, problem)
    traced = trace_rank(problem, plan)
    assert traced.bytes_after == list(live_bytes(program.ranks[0].actions()))
    (rank,) = program_bytes(problem, plan, program)
    states = rank.parameter + rank.gradient + rank.optimizer
    assert abs(traced.state_bytes - states) < 1e-3 * states


# -- the tracker of live storages: device and host apart, also where both are a CPU's memory -------


def test_host_memory_never_counts_as_the_devices() -> None:
    tracker = Tracker()
    with tracker:
        here = torch.zeros(10, dtype=torch.uint8)
        with tracker.on_host():
            there = torch.empty(1000, dtype=torch.uint8)
        there[:10].copy_(here)
        again = torch.zeros(5, dtype=torch.uint8)
    assert (tracker.device_bytes, tracker.host_bytes) == (15, 1000)
    assert tracker.device_peak_bytes == 15
    del there, again
    assert (tracker.device_bytes, tracker.host_bytes) == (10, 0)


def test_what_a_copy_takes_on_the_device_is_not_hidden() -> None:
    """The mutation: the copy makes its source contiguous first, in device memory."""
    tracker = Tracker()
    with tracker:
        here = torch.zeros(10, 10, dtype=torch.uint8)
        with tracker.on_host():
            there = torch.empty(100, dtype=torch.uint8)
        there.copy_(here.t().contiguous().view(-1))
    assert tracker.device_peak_bytes == 200


@pytest.mark.parametrize("mode", [Tracker, MetaMode])
def test_no_operator_asks_for_torchs_compiler(mode: type[DispatchMode]) -> None:
    """Torch would wrap the method in one that imports it, at two CPU seconds a rank."""
    assert not hasattr(mode.__torch_dispatch__, "__wrapped__")


def walked(plan: str, patch: pytest.MonkeyPatch) -> tuple[list[int], list[int]]:
    """For each copy to the host in a step: live device bytes before it, and the device's peak while
    it ran."""
    case = cases.case("one", plan)
    before, peaks = [], []
    to_host = movers.Movers.to_host

    def noted(self: movers.Movers, *args: object) -> None:
        self.tracker.device_peak_bytes = self.tracker.device_bytes
        before.append(self.tracker.device_bytes)
        to_host(self, *args)  # type: ignore[arg-type]
        peaks.append(self.tracker.device_peak_bytes)

    patch.setattr(movers.Movers, "to_host", noted)
    trace_rank(case.problem, case.plan)
    return before, peaks


@pytest.mark.parametrize("plan", ["offload", "offload-layers", "skeletal"])
def test_a_copy_to_the_host_takes_no_device_memory(
    plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, peaks = walked(plan, monkeypatch)
    assert before
    assert peaks == before


# -- `rematbench verify` of a traced cell: as committed, different, or nothing traced; its cost ----


ROOT = Path(__file__).resolve().parents[3]
TRACED = ROOT / "config" / "traced.yaml"
RECORDS = sorted((ROOT / "results" / "measured" / "traced").glob("*.json"))
"""One of every cell (tests/worlds): their names, without planning them."""
SUITE = suite_text([tiny("small", gpus=4, seq_len=64, global_batch=4, tp=2, pp=2)])
CELL = "small.full_recompute.0"


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite, and beside it the record of one of its cells."""
    path = tmp_path_factory.mktemp("suite") / "suite.yaml"
    path.write_text(SUITE)
    (cell,) = cells(load_suite(path), [], [CELL])
    write_record(traced.run(cell), path.with_name(f"{CELL}.json"))
    return path


def verified(suite: Path, folder: Path) -> Ran:
    record = str(folder / f"{CELL}.json")
    return typed("verify", record, "--suite", str(suite), "--if-installed")


def test_a_cell_is_traced_to_the_same_record(suite: Path) -> None:
    said = verified(suite, suite.parent)
    assert (said.code, said.out) == (0, f"{CELL} (traced): every number equal\n")


def test_a_byte_of_difference_fails(suite: Path, tmp_path: Path) -> None:
    record = read_record(suite.with_name(f"{CELL}.json"))
    rank = replace(record.measured.ranks[0], state_bytes=record.measured.ranks[0].state_bytes + 1)
    changed = replace(record, measured=replace(record.measured, ranks=(rank,)))
    write_record(changed, tmp_path / f"{CELL}.json")
    said = verified(suite, tmp_path)
    assert said.code == 1
    assert "state_bytes" in said.out


def test_without_torch_the_line_says_so(suite: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = verified(suite, suite.parent)
    assert (said.code, said.out) == (0, f"{CELL}: not run again without torch\n")


@pytest.mark.soak
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_rank_at_paper_scale_takes_less_than_a_minute_and_4_gb(path: Path) -> None:
    """Of one core's time; in a process of its own, because memory only grows."""
    with mp.get_context("spawn").Pool(1) as pool:
        status, seconds, peak = pool.apply(_cost, (path.stem,))
    assert status == read_record(path).status
    assert seconds < 60
    assert peak < 4 << 30


def _cost(name: str) -> tuple[str, float, int]:
    (cell,) = cells(load_suite(TRACED), [], [name])
    start = time.process_time()
    status = traced.run(cell).status
    seconds = time.process_time() - start
    return status, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
