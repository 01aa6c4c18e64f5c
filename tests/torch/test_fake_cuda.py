"""The executor's CUDA path on fake tensors: operators, devices, streams, memory.  No GPU."""

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch
from torch import Tensor

from rematbench.ledger import live_bytes
from rematbench.lower import lower
from rematbench.torch import trace
from rematbench.torch.batch import MicroBatch
from rematbench.torch.case import Case
from rematbench.torch.executor import Executor
from rematbench.torch.groups import Groups
from rematbench.torch.model import RankModel
from rematbench.torch.tracker import Tracker
from tests.torch import cases
from tests.torch.recorder import Recorder, recording

DEVICE = torch.device("cuda", 0)


def batches(model: RankModel) -> list[MicroBatch]:
    ids = torch.zeros(model.shapes.tokens, dtype=torch.int64, device=DEVICE)
    return [MicroBatch(ids, ids, 1.0) for _ in range(model.problem.layout.num_micro_batches)]


def run(case: Case, stage: int, patch: pytest.MonkeyPatch) -> tuple[Recorder, Executor]:
    """Two steps of a stage's first rank."""
    problem, lay = case.problem, case.problem.layout
    rank = trace.rank_at(lay, problem.system.rank_order, stage)
    program = (case.program or lower(case.plan, problem)).ranks[stage]
    with trace.fake_job(rank, lay.gpus), recording(patch) as recorder:
        groups = Groups(lay, problem.system.rank_order, rank)
        model = RankModel(problem, case.plan, groups.place, DEVICE, seed=0)
        executor = Executor(program, model, groups, tracker=Tracker(DEVICE))
        model.batches = batches(model)
        recorder.watching = True
        for _ in range(2):
            executor.issue_step()
    return recorder, executor


@pytest.mark.parametrize("plan", cases.PLANS)
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_no_race(layout: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases.case(layout, plan, precision="bf16")
    for stage in range(case.problem.layout.pp):
        recorder, executor = run(case, stage, monkeypatch)
        assert recorder.faults == []
        actions = lower(case.plan, case.problem).ranks[stage].actions()
        assert executor.bytes_after == list(live_bytes(actions))
