"""Total peaks in bf16, two processes: states, activations and what lives inside operators."""

from functools import cache

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

from rematbench.discover import discover
from rematbench.layout import Layout
from rematbench.plan import Plan
from rematbench.suite import make_problem
from rematbench.torch.case import Case, Result
from rematbench.worlds.measure import measured_ranks
from tests.torch import laws

LAYOUTS = {
    "tp2": Layout(tp=2, global_batch=4, micro_batch=2),
    "pp2": Layout(pp=2, global_batch=4, micro_batch=2),
    "cp2": Layout(cp=2, global_batch=4, micro_batch=2),
    "dp2": Layout(dp=2, zero_stage=1, global_batch=4, micro_batch=2),
}
METHODS = ("keep_all", "full_recompute", "mst")
"""mst: the peak is where gradients of weights and norms are made, not at the loss."""


def case(layout: str, method: str) -> Case:
    problem = make_problem(
        model="tiny-llama",
        cluster="this-machine",
        system="rematbench",
        layout=LAYOUTS[layout],
        seq_len=256,
    )
    plan = discover().resolve(method).plan(problem)
    assert isinstance(plan, Plan)
    return Case(name=f"{layout} {method}", problem=problem, plan=plan, steps=1)


CASES = [case(layout, method) for layout in LAYOUTS for method in METHODS]


@cache
def results() -> dict[str, tuple[Case, Result]]:
    return laws.launch(CASES)


@pytest.mark.parametrize("name", [case.name for case in CASES])
def test_total_peaks_are_within_two_per_cent(name: str) -> None:
    found, result = results()[name]
    assert result.status == "ok", result.reason
    ranks = measured_ranks(found.problem, found.plan, result.ranks, 1)
    assert [rank.differing_actions for rank in ranks] == [0, 0]
    assert all(abs(rank.peak_error) <= 0.02 for rank in ranks)
