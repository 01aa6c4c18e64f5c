"""Total peaks in bf16, two processes: states, activations and what lives inside operators."""

from functools import cache
from itertools import product

import pytest

from rematbench.inputs.layout import Layout
from rematbench.worlds.run_records import measured_ranks
from rematbench.worlds.torch.case import Case, Result
from tests.problems import make_problem, plan_of
from tests.worlds.torch import laws

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
    plan = plan_of(problem, method)
    return Case(name=f"{layout} {method}", problem=problem, plan=plan, steps=1)


CASES = list(product(LAYOUTS, METHODS))


@cache
def results() -> dict[str, tuple[Case, Result]]:
    return laws.launch([case(*asked) for asked in CASES])


@pytest.mark.full
@pytest.mark.parametrize(("layout", "method"), CASES)
def test_total_peaks_are_within_two_per_cent(layout: str, method: str) -> None:
    found, result = results()[f"{layout} {method}"]
    assert result.status == "ok", result.reason
    ranks = measured_ranks(found.problem, found.plan, result.ranks, 1)
    assert [rank.differing_actions for rank in ranks] == [0, 0]
    assert all(abs(rank.peak_error) <= 0.02 for rank in ranks)
