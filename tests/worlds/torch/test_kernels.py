"""Kernels: what they give beside autograd, what a GPU's give beside a CPU's, what they hold."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import get_decompositions

from rematbench.host.gpu_state import GpuState
from rematbench.measure.torch.turns import Turns
from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.dispatch import Tracker
from tests.worlds.torch import cases

aten = torch.ops.aten
ROWS, COLUMNS = 24, 32


@pytest.fixture(autouse=True, scope="module")
def cpu_kernel() -> Iterator[None]:
    """torch has the backward of its fused RMSNorm on GPUs only, and its formula in Python."""
    op = aten._fused_rms_norm_backward
    (formula,) = get_decompositions([op.default]).values()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", formula, "CPU")
    yield
    library._destroy()


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_a_gpus_rms_norm_has_the_gradients_of_a_cpus() -> None:
    grad, x, weight = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS) + 1.0, drawn(COLUMNS)
    assert torch.allclose(
        aten._fused_rms_norm(x, x.shape[-1:], weight, arithmetic.NORM_EPS)[0],
        arithmetic.rms_norm(x, weight),
        rtol=1e-12,
    )
    fused, own = arithmetic.fused_rms_norm_backward(grad, x, weight), arithmetic.rms_norm_backward
    for one, other in zip(fused, own(grad, x, weight), strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


def test_a_gpus_layer_norm_has_the_gradients_of_a_cpus() -> None:
    grad, x, weight = drawn(ROWS, COLUMNS), drawn(ROWS, COLUMNS) + 1.0, drawn(COLUMNS)
    fused, own = (
        arithmetic.fused_layer_norm_backward(grad, x, weight),
        arithmetic.layer_norm_backward,
    )
    for one, other in zip(fused, own(grad, x, weight), strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


def test_rotations_are_undone_and_hold_two_wide_halves() -> None:
    x = drawn(ROWS, 4 * COLUMNS).to(torch.bfloat16)
    cos, sin = arithmetic.rope_tables(torch.arange(ROWS), COLUMNS, x.dtype)
    tracker = Tracker()
    tracker.exclude([x, cos, sin])
    with tracker:
        turned = arithmetic.rope(x, cos, sin)
    half = x.numel() // 2 * 4
    assert tracker.device_bytes == x.numel() * 2
    assert tracker.device_peak_bytes <= x.numel() * 2 + 2 * half + 4 * sin.numel()
    wide = drawn(ROWS, 4 * COLUMNS)
    tables = arithmetic.rope_tables(torch.arange(ROWS), COLUMNS, wide.dtype)
    there = arithmetic.rope(wide, *tables)
    assert torch.allclose(arithmetic.rope(there, *tables, inverse=True), wide, rtol=1e-12)
    assert not torch.allclose(there, wide)
    assert turned.dtype == x.dtype


@pytest.mark.parametrize("first", [0, 8])
def test_cross_entropy_has_autograds_gradient_and_no_wide_copy(first: int) -> None:
    logits, vocab = drawn(ROWS, COLUMNS), COLUMNS + first
    labels = torch.arange(ROWS) % vocab
    labels[3] = arithmetic.IGNORED
    whole = torch.cat([drawn(ROWS, first) * 0.5, logits], 1).requires_grad_()
    loss = F.cross_entropy(whole, labels, ignore_index=arithmetic.IGNORED, reduction="sum")
    (want,) = torch.autograd.grad(loss * 0.25, whole)
    probs = whole.detach().softmax(-1)[:, first:].contiguous()
    got = arithmetic.cross_entropy_backward(probs, labels, first, 0.25, probs.dtype)
    assert torch.allclose(got, want[:, first:], rtol=1e-10, atol=1e-14)
    wide = probs.float()
    tracker = Tracker()
    tracker.exclude([wide, labels])
    with tracker:
        arithmetic.cross_entropy_backward(wide, labels, first, 0.25, torch.bfloat16)
    assert tracker.device_peak_bytes < wide.numel() * 4


def test_a_whole_vocabulary_is_looked_up_as_its_shards_are() -> None:
    table, ids, grad = drawn(16, COLUMNS), torch.arange(ROWS) % 16, drawn(ROWS, COLUMNS)
    halves = [arithmetic.embed(ids, table[f : f + 8], f, whole=False) for f in (0, 8)]
    assert torch.equal(arithmetic.embed(ids, table, 0, whole=True), halves[0] + halves[1])
    whole, parts = torch.zeros_like(table), torch.zeros_like(table)
    arithmetic.embed_backward(whole, grad, ids, 0, whole=True)
    for first in (0, 8):
        arithmetic.embed_backward(parts[first : first + 8], grad, ids, first, whole=False)
    assert torch.equal(whole, parts)


def test_rope_is_undone_once_where_gradients_lie_in_one_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = cases.case("one", "keep")
    one = Turns(torch.device("cpu"), GpuState).executor(case.problem, case.plan)
    undone, rope = [], arithmetic.rope

    def noted(x: torch.Tensor, *tables: torch.Tensor, inverse: bool = False) -> torch.Tensor:
        undone.append(inverse)
        return rope(x, *tables, inverse=inverse)

    monkeypatch.setattr(arithmetic, "rope", noted)
    one.run_step()
    layers = one.model.kind.num_layers
    assert sum(undone) == 2 * layers * len(one.model.batches)  # of q and of k
