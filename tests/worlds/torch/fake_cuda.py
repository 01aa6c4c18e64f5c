"""Run the executor on fake `cuda` tensors under the recorder."""

from typing import Any

import pytest
import torch

from rematbench.engine.lowering.lower import lower
from rematbench.plan import VOCABULARY
from rematbench.worlds.torch import parameters, single_rank
from rematbench.worlds.torch.batch import MicroBatch
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.dispatch import Tracker
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.rank_model import RankModel
from rematbench.worlds.torch.storages import Key, Memory, Value
from rematbench.worlds.torch.streams import UNORDERED, CudaStreams
from tests.worlds.torch.recorder import Recorder, recording

DEVICE = torch.device("cuda", 0)
OVERLAP: dict[str, Any] = {
    "tp_overlap": "gemm",
    "gemm_overlap_links": "all",
    "p2p_overlap": "always",
    "reduce_overlap": True,
    "gather_overlap": True,
}
"""A system whose collectives and messages run beside kernels."""
PUT = Memory.put


def executor_of(case: Case, stage: int, rank: int) -> Executor:
    """A rank's executor with its batches; what its steps do comes next."""
    problem, lay = case.problem, case.problem.layout
    program = (case.program or lower(case.plan, problem)).ranks[stage]
    experts = problem.workload.model.experts is not None
    order, shares = problem.system.parallel.rank_order, case.plan.schedule in VOCABULARY
    groups = Groups(lay, order, rank, experts=experts, vocabulary=shares)
    model = RankModel(problem, case.plan, groups.place, DEVICE, seed=0)
    executor = Executor(program, model, groups, tracker=Tracker(DEVICE))
    ids = torch.zeros(model.shapes.tokens, dtype=torch.int64, device=DEVICE)
    model.batches = [MicroBatch(ids, ids, 1.0)] * lay.num_micro_batches
    return executor


def unknown(spec: parameters.ParameterSpec, seed: int) -> torch.Tensor:
    """A weight whose values nobody reads."""
    return torch.empty(spec.shape, dtype=torch.float64)


def run(
    case: Case, stage: int, patch: pytest.MonkeyPatch, *, first: bool = False
) -> tuple[Recorder, Executor]:
    """Two steps of a stage's first rank (`first`: up to the first fault)."""
    patch.setattr(parameters, "full_weight", unknown)
    lay = case.problem.layout
    rank = single_rank.stage_rank(lay, case.problem.system.parallel.rank_order, stage)
    with single_rank.fake_job(rank, lay.gpus), recording(patch, first=first) as recorder:
        executor = executor_of(case, stage, rank)
        watch_pools(recorder, executor, patch)
        recorder.watching = True
        try:
            for _ in range(2):
                executor.issue_step()
        except Exception:
            if not recorder.faults:
                raise
    return recorder, executor


def watch_pools(recorder: Recorder, executor: Executor, patch: pytest.MonkeyPatch) -> None:
    """A storage that outlives its action in the pool of a stream of its own is a fault: what is
    freed there is of no use to compute (rematbench.worlds.torch.streams)."""
    assert isinstance(executor.streams, CudaStreams)
    streams = executor.streams.streams
    wrong = {s.name: n for n, s in streams.items() if n != "compute" and n not in UNORDERED}  # type: ignore[attr-defined]

    def noted(memory: Memory, key: Key, value: Value) -> None:
        PUT(memory, key, value)
        pool = recorder.used[value.data.untyped_storage()._cdata].pool
        if pool in wrong:
            recorder.fault(f"{key[0]} stays in the pool of {wrong[pool]}")

    patch.setattr(Memory, "put", noted)


def first_fault(case: Case, stage: int = 0) -> str:
    """What the recorder finds first in two steps; nothing if there is nothing."""
    with pytest.MonkeyPatch.context() as patch:
        found = run(case, stage, patch, first=True)[0].faults
    return found[0] if found else ""
