"""Repeated steps have the same bits, begin with the same weights, and a race shows."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.host.gpu_state import GpuState
from rematbench.measure.parts import repetitions
from rematbench.measure.parts.checks import Planned, findings
from rematbench.measure.records import Repeated, read_lines
from rematbench.measure.torch.repetitions import repeat, same_bits
from rematbench.measure.torch.turns import Turns
from rematbench.worlds.executed import How, _case, run_cells
from rematbench.worlds.records.cell import cells
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.torch import arithmetic, parameters
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.parameters import LINEAR, AdamW, Owner, ParameterSpec
from tests.campaigns import suite_text, tiny
from tests.worlds.torch import cases

CPU = torch.device("cpu")
TIMES = 4


def executor(plan: str = "keep") -> Executor:
    case = cases.case("one", plan)
    return Turns(CPU, GpuState).executor(case.problem, case.plan)


def test_repetitions_begin_with_the_same_weights_and_leave_them() -> None:
    one = executor()
    before = {name: p.flat.clone() for name, p in one.model.parameters.items()}
    found = repeat(one, TIMES)
    assert (found.repetitions, found.differing, found.worst) == (TIMES, 0, "")
    assert all(torch.equal(p.flat, before[name]) for name, p in one.model.parameters.items())
    assert all(not p.moment1.any() for p in one.model.parameters.values())
    other = repeat(executor("full"), TIMES)
    assert same_bits(found.first, other.first)
    assert any(gradient.any() for gradient in found.first.values())


def test_a_gradient_or_a_loss_that_changes_is_counted_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, steps = executor(), 0
    issue = one.issue_step

    def wrong() -> None:
        nonlocal steps
        steps += 1
        look = one.before_update

        def raced(found: list[Any]) -> None:
            if steps in (2, 4):  # a copy that comes too late
                next(p for p in found if p.spec.name == "layers.1.k.weight").grad_flat[3] += 1e-9
            look(found)

        one.before_update = raced
        issue()
        one.before_update = look
        if steps == 3:
            one.loss += 1.0

    monkeypatch.setattr(one, "issue_step", wrong)
    found = repeat(one, TIMES)
    assert (found.differing, found.worst) == (3, "layers.1.k.weight")
    nan = {"x": torch.tensor([float("nan")])}
    assert not same_bits(nan, nan)
    assert not same_bits(found.first, {})


@pytest.fixture
def as_before() -> Iterator[None]:
    """torch's settings of this process, which the part changes in its own."""
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.usefixtures("as_before")
def test_the_part_writes_a_line_for_each_cell_and_the_claim_is_over_all(tmp_path: Path) -> None:
    path, out = tmp_path / "suite.yaml", tmp_path / "repetitions.jsonl"
    sizes = {"model": "tiny-llama-deep", "gpus": 1, "seq_len": 32, "global_batch": 2}
    path.write_text(suite_text([tiny("lossless-fp32", precision="fp32", **sizes)]))
    names = ("lossless-fp32.memo", "lossless-fp32.mst", "lossless-fp32.keep_all")
    found = cells(load_suite(path), [], names)
    repetitions.measure_repetitions(found, out, "cpu", 60.0, repetitions=2)
    lines = {line.cell: line for line in read_lines(out, Repeated)}
    assert next(iter(lines)) == "lossless-fp32.keep_all.0"  # whose bits the others are held against
    assert lines["lossless-fp32.memo.0"].keep_all_bits
    assert not lines["lossless-fp32.mst.0"].keep_all_bits  # it splits sums
    claim = "a repeated step has the bits of the first"
    held = {finding.claim: finding for finding in findings(tmp_path)}
    assert held[claim].holds
    assert "mst.0 2 of 2, not keep_all's" in held[claim].text
    planned = Planned(repetitions=[*lines, "lossless-bf16.memo.0"])
    held = {finding.claim: finding for finding in findings(tmp_path, planned)}
    assert held[claim].holds is None
    assert "lossless-bf16.memo.0 missing" in held[claim].text
    late = tmp_path / "late.jsonl"
    repetitions.measure_repetitions(found, late, "cpu", -1.0)
    assert not late.exists()
    out.write_bytes(out.read_bytes().replace(b'"differing":0', b'"differing":1', 1))
    held = {finding.claim: finding for finding in findings(tmp_path)}
    assert held[claim].holds is False
    assert "keep_all.0 1 of 2;" in held[claim].text
    out.write_bytes(out.read_bytes().replace(b'"keep_all_bits":false', b'"keep_all_bits":null'))
    held = {finding.claim: finding for finding in findings(tmp_path)}
    assert "not keep_all's" not in held[claim].text  # not known


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


def test_weights_come_back_after_a_repetition_that_fails() -> None:
    one = executor()
    before = {name: p.flat.clone() for name, p in one.model.parameters.items()}
    issue, steps = one.issue_step, 0

    def broken() -> None:
        nonlocal steps
        steps += 1
        issue()
        if steps == 2:
            raise RuntimeError("no")

    one.issue_step = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        repeat(one, TIMES)
    assert all(torch.equal(p.flat, before[name]) for name, p in one.model.parameters.items())


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


def test_rope_is_undone_once_where_gradients_lie_in_one_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, undone, rope = executor(), [], arithmetic.rope

    def noted(x: torch.Tensor, *tables: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        undone.append(inverse)
        return rope(x, *tables, inverse=inverse)

    monkeypatch.setattr(arithmetic, "rope", noted)
    one.run_step()
    layers = one.model.kind.num_layers
    assert sum(undone) == 2 * layers * len(one.model.batches)  # of q and of k
