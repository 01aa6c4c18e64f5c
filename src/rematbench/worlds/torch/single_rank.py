"""One rank of a job in one process: the traced world, and the first stage of a pipeline on a GPU.

A trace is the executor itself on fake (meta) tensors and a fake process group, for one rank of a
job of any size. Every operator, view, copy and collective is issued as in the executed world,
storages have sizes but no memory, and the same tracker counts them. Tensors have no values, so
there are no losses and no gradients.

The first stage runs on a GPU without its neighbours. Its sends do nothing. A receive is complete at
once, with numbers like those at the end of a layer, so that kernels and power are as in training.
Losses and gradients have no meaning.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rematbench.engine.lowering.lower import lower
from rematbench.inputs.layout import Layout
from rematbench.plan import VOCABULARY, Plan
from rematbench.problem import Problem
from rematbench.worlds.torch.batch import MicroBatch
from rematbench.worlds.torch.case import RankResult
from rematbench.worlds.torch.dispatch import MetaMode, Tracker
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Channel, Coordinates, Groups, coordinates
from rematbench.worlds.torch.rank_model import NotExecutable, RankModel, require_executable
from rematbench.worlds.torch.worker import empty_result, record_bytes


@contextmanager
def fake_job(rank: int, world_size: int) -> Iterator[None]:
    """A default process group that sends nothing; it is always destroyed at the end."""
    store = FakeStore()
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()


def stage_rank(layout: Layout, order: tuple[str, ...], stage: int) -> int:
    """The first rank of a pipeline stage; its peers in tp, cp and dp do the same work."""
    wanted = Coordinates(tp=0, cp=0, dp=0, pp=stage)
    return next(r for r in range(layout.gpus) if coordinates(r, layout, order) == wanted)


def trace_rank(problem: Problem, plan: Plan, stage: int = 0) -> RankResult:
    """Trace one optimizer step of a stage's first rank; return bytes after every action, and peaks.
    NotExecutable for a missing feature, ExecutionError for an action that cannot run."""
    require_executable(problem, plan)
    program = lower(plan, problem).ranks[stage]
    lay, order = problem.layout, problem.system.parallel.rank_order
    rank = stage_rank(lay, order, stage)
    device = torch.device("meta")
    with fake_job(rank, lay.gpus), device, MetaMode():
        experts, shares = problem.workload.model.experts is not None, plan.schedule in VOCABULARY
        groups = Groups(lay, order, rank, experts=experts, vocabulary=shares)
        model = RankModel(problem, plan, groups.place, device, seed=0)
        executor = Executor(program, model, groups, tracker=Tracker())
        result = empty_result(groups, executor)
        model.batches = _batches(model)
        executor.issue_step()
        record_bytes(executor, result)
    return result


def _batches(model: RankModel) -> list[MicroBatch]:
    """Micro-batches with the right number of tokens; fake tensors have no values."""
    lay, tokens = model.problem.layout, model.shapes.tokens
    scale = 1.0 / (lay.global_batch * model.problem.workload.seq_len)
    ids = torch.zeros(tokens, dtype=torch.int64)
    return [MicroBatch(ids, ids, scale, (ids, ids)) for _ in range(lay.num_micro_batches)]


class CompletedWork(dist.Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class FirstStageGroups(Groups):
    """The groups of the first rank of a pipeline, in a process without a process group."""

    def __init__(self, layout: Layout, order: tuple[str, ...]) -> None:
        """NotExecutable unless all other ranks are other stages, which exchange only messages."""
        if layout.gpus > layout.pp:
            raise NotExecutable("a single rank can run alone only with tp 1, cp 1 and dp 1")
        super().__init__(layout, order, 0)

    def _channels(self) -> dict[Channel, dist.ProcessGroup]:
        return {}

    def send(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        return CompletedWork()

    def receive(self, tensor: Tensor, stage: int, direction: str, tag: int) -> dist.Work:
        tensor.normal_()
        return CompletedWork()
