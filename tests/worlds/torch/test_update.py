"""The update of a parameter: linear where steps are compared, torch's kernel on GPUs."""

from pathlib import Path

import pytest
import torch

from rematbench.worlds.executed import How, _case, run_cells
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import cells
from rematbench.worlds.torch import parameters
from rematbench.worlds.torch.parameters import LINEAR, AdamW, Owner, ParameterSpec
from tests.campaigns import suite_text, tiny

CPU = torch.device("cpu")


def test_an_update_with_a_large_epsilon_is_linear_in_the_gradient() -> None:
    """The first update of AdamW is a sign: rounding of a gradient near zero moves a weight by two
    learning rates.  Gradients of the second step differed by 4e-3 on an H200 in fp32."""

    def moved(rule: AdamW, gradient: float) -> float:
        spec = ParameterSpec("x", (1,))
        made = parameters.build(spec, Owner(0, 1, 0, 1), 7, torch.float32, CPU)
        made.master.zero_()
        made.grad_flat.fill_(gradient)
        made.update(rule, 1)
        return float(made.master)

    assert moved(AdamW(), 1e-7) - moved(AdamW(), -1e-7) == pytest.approx(-2e-2, rel=0.2)
    assert moved(LINEAR, 1e-7) - moved(LINEAR, -1e-7) == pytest.approx(-2e-7, rel=1e-3)
    assert moved(LINEAR, 2e-3) == pytest.approx(2 * moved(LINEAR, 1e-3), rel=2e-3)


def test_what_is_compared_over_steps_has_linear_updates_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    sizes = {"model": "tiny-llama-deep", "gpus": 1, "seq_len": 32, "global_batch": 2}
    path.write_text(suite_text([tiny("one", precision="fp32", **sizes)]))
    found = cells(load_suite(path), [], ["one.mst"])
    how = How(steps=2, linear=True)
    assert _case(found[0], how).optimizer is LINEAR
    assert _case(found[0], How()).optimizer == AdamW()
    for given in (how, How(steps=2)):
        ((_, record),) = run_cells(found, 60.0, given)
        assert record.measured is not None
        assert record.measured.linear_updates is given.linear


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32, torch.float64])
def test_torchs_kernel_makes_the_update_that_is_written_out(
    precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs and their traces take the kernel, CPUs the operators."""

    def trained(*, kernel: bool) -> parameters.Parameter:
        monkeypatch.setattr(parameters, "fused", lambda tensor: kernel)
        spec, draw = ParameterSpec("x", (64, 32)), torch.Generator().manual_seed(1)
        made = parameters.build(spec, Owner(0, 1, 0, 1), 7, precision, CPU)
        for step in range(1, 5):
            noise = torch.randn(made.grad_flat.shape, generator=draw, dtype=torch.float64)
            made.grad_flat.copy_(noise * 1e-3)
            made.update(AdamW(), step)
        return made

    ours, torchs = trained(kernel=False), trained(kernel=True)
    bound = 1e-6 if precision is not torch.float64 else 1e-14
    for one, other in zip(ours._state(), torchs._state(), strict=True):
        assert float((one - other).norm()) <= bound * float(one.norm())
    assert torch.equal(torchs.flat, torchs.master.to(precision))
