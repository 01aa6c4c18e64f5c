"""What a GPU's step is timed against computes the same; the timings run (on a CPU: no numbers)."""

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.lowering.lower import lower
from rematbench.torch import beside
from rematbench.torch.batch import make_batch, micro_batches
from rematbench.torch.executor import Executor
from rematbench.torch.groups import Groups
from rematbench.torch.model import NotExecutable, RankModel
from rematbench.torch.parameters import AdamW
from rematbench.torch.plain import PlainLoop
from tests.torch import cases
from tests.torch.cases import TINY_GPT

CPU = torch.device("cpu")


def made(case: cases.Case) -> RankModel:
    lay = case.problem.layout
    groups = Groups(lay, case.problem.system.rank_order, 0)
    model = RankModel(case.problem, case.plan, groups.place, CPU, case.seed)
    batch = make_batch(case.problem.workload, lay.global_batch, case.seed, 0, 0.1)
    model.batches = micro_batches(batch, lay, groups.place, CPU)
    return model


def test_the_hand_written_loop_computes_what_the_executor_does() -> None:
    case = cases.case("one", "keep")
    own, other = made(case), made(case)
    groups = Groups(case.problem.layout, case.problem.system.rank_order, 0)
    rule = AdamW(lr=1e-3)
    executor = Executor(lower(case.plan, case.problem).ranks[0], own, groups, optimizer=rule)
    loop = PlainLoop(other, rule)
    for _ in range(2):
        assert float(loop.step()) == pytest.approx(executor.run_step(), rel=1e-12)
        for name, parameter in own.parameters.items():
            error = (parameter.grad_flat - other.parameters[name].grad_flat).norm()
            assert float(error) <= 1e-10 * float(parameter.grad_flat.norm())


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(NotExecutable, match="Llama blocks"):
        PlainLoop(made(cases.case("one", "keep", model=TINY_GPT)), AdamW())


def test_every_timing_runs() -> None:
    case = cases.case("one", "keep", precision="bf16")
    steps = beside.step_times(case.problem, case.plan, CPU, rounds=2)
    assert [len(x) for x in (steps.executor_s, steps.by_hand_s, steps.issue_s)] == [2, 2, 2]
    assert steps.ratio > 0.0
    copies = beside.copy_times(CPU, size=64, nbytes=1 << 16, rounds=2)
    assert min(copies.d2h_s, copies.h2d_s, copies.compute_s, copies.together_s) > 0.0
    assert copies.products >= 1
    assert copies.slowdown > 0.0
