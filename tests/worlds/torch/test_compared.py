"""What two runs are said to differ by: rounding of a gradient that is zero is not a difference."""

import pytest
import torch
from msgspec.structs import replace

from rematbench.worlds.run_records import compared, norm_error, without_gradient
from rematbench.worlds.torch.case import Result
from tests.worlds.torch import cases
from tests.worlds.torch.laws import run_here

GPT = replace(cases.TINY_GPT, tied_embeddings=True)


def run(plan: str) -> Result:
    return run_here(cases.case("one", plan, precision="fp32", model=GPT))


def test_a_key_bias_that_only_rounds_does_not_make_a_split_lossy() -> None:
    problem = cases.tiny("one", precision="fp32", model=GPT)
    own, keep = run("mini"), run("keep")
    zero = without_gradient(problem.workload.model)
    assert zero == {"layers.0.k.bias", "layers.1.k.bias"}
    largest = max(float(g.norm()) for g in keep.gradients[0].values())
    assert all(float(keep.gradients[0][name].norm()) < 1e-6 * largest for name in zero)
    found = compared(problem, own, keep, "keep_all")
    assert found.lossless
    assert 0.0 < found.gradient_error <= 1e-5
    assert norm_error(own.gradients[-1], keep.gradients[-1]) > 1e-5


def test_a_key_bias_counts_where_keys_are_rotated_and_other_biases_do() -> None:
    assert without_gradient(replace(GPT, position="rope")) == frozenset()
    assert without_gradient(cases.TINY) == frozenset()
    want = {"layers.0.q.bias": torch.ones(4), "layers.0.k.bias": torch.full((4,), 1e-9)}
    got = {"layers.0.q.bias": torch.ones(4), "layers.0.k.bias": torch.ones(4)}
    zero = without_gradient(replace(GPT, num_layers=1))
    assert norm_error(got, want, zero) == 0.0
    got["layers.0.q.bias"] = torch.full((4,), 1.1)
    assert norm_error(got, want, zero) == pytest.approx(0.1)
