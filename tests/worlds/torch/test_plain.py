"""The step written by hand computes the same as the executor's, with each of torch's own means."""

from typing import Any

import pytest
import torch

from rematbench.engine.lowering.lower import lower
from rematbench.measure.records import Means
from rematbench.measure.torch.plain_step import PlainLoop
from rematbench.worlds.torch.batch import make_batch, micro_batches
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups
from rematbench.worlds.torch.parameters import AdamW
from rematbench.worlds.torch.rank_model import NotExecutable, RankModel
from tests.worlds.torch import cases
from tests.worlds.torch.cases import TINY_GPT

CPU = torch.device("cpu")


def made(case: cases.Case) -> RankModel:
    lay = case.problem.layout
    groups = Groups(lay, case.problem.system.parallel.rank_order, 0)
    model = RankModel(case.problem, case.plan, groups.place, CPU, case.seed)
    batch = make_batch(case.problem.workload, lay.global_batch, case.seed, 0, 0.1)
    model.batches = micro_batches(batch, lay, groups.place, CPU)
    return model


def issued(loop: PlainLoop) -> float:
    loop.issue_step()
    return float(loop.loss)


def test_the_hand_written_loop_computes_what_the_executor_does() -> None:
    case = cases.case("one", "keep")
    own, other = made(case), made(case)
    groups = Groups(case.problem.layout, case.problem.system.parallel.rank_order, 0)
    rule = AdamW(lr=1e-3)
    executor = Executor(lower(case.plan, case.problem).ranks[0], own, groups, optimizer=rule)
    loop = PlainLoop(other, rule)
    for _ in range(2):
        assert issued(loop) == pytest.approx(executor.run_step(), rel=1e-12)
        for name, parameter in own.parameters.items():
            error = (parameter.grad_flat - other.parameters[name].grad_flat).norm()
            assert float(error) <= 1e-10 * float(parameter.grad_flat.norm())


@pytest.mark.parametrize("means", ["checkpoint", "save_on_cpu", "checkpoint+save_on_cpu"])
def test_torchs_own_means_change_what_is_saved_and_no_gradient(
    means: Means, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = cases.case("one", "keep")
    plain, other = made(case), made(case)
    runs = []
    layer = PlainLoop._layer

    def counted(self: PlainLoop, *given: Any) -> torch.Tensor:
        runs.append(self.means)
        return layer(self, *given)

    monkeypatch.setattr(PlainLoop, "_layer", counted)
    loops = PlainLoop(plain, AdamW()), PlainLoop(other, AdamW(), means)
    assert issued(loops[0]) == issued(loops[1])
    for name, parameter in plain.parameters.items():
        assert torch.equal(parameter.grad_flat, other.parameters[name].grad_flat), name
    twice = 2 if "checkpoint" in means else 1
    assert runs.count(means) == twice * runs.count("nothing") > 0


def test_saved_on_the_cpu_is_all_that_a_layer_saves() -> None:
    case = cases.case("one", "keep")
    packed = {}
    for means in ("save_on_cpu", "checkpoint+save_on_cpu"):
        loop = PlainLoop(made(case), AdamW(), means)  # type: ignore[arg-type]
        calls: list[int] = []
        packed[means] = calls
        where = loop._where_saved

        def noted(where: Any = where, calls: list[int] = calls) -> Any:
            hooks = where()
            pack = hooks.pack_hook
            hooks.pack_hook = lambda tensor: calls.append(tensor.nbytes) or pack(tensor)
            return hooks

        loop._where_saved = noted  # type: ignore[method-assign]
        loop.issue_step()
    lay, work = case.problem.layout, case.problem.workload
    inputs = work.model.num_layers * lay.num_micro_batches
    assert len(packed["checkpoint+save_on_cpu"]) == inputs  # a layer's input, and nothing else
    assert sum(packed["save_on_cpu"]) > 10 * sum(packed["checkpoint+save_on_cpu"])


def test_other_models_are_refused_by_name() -> None:
    with pytest.raises(NotExecutable, match="Llama blocks"):
        PlainLoop(made(cases.case("one", "keep", model=TINY_GPT)), AdamW())
