"""Attention's operators on CUDA, on fake tensors and stand-ins: signatures, shapes, padding."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rematbench.inputs.system import AttentionBackend
from rematbench.worlds.torch import attention_backends
from rematbench.worlds.torch.arithmetic import wide
from tests.worlds.torch.recorder import Plainly

DEVICE = torch.device("cuda", 0)


def heads(count: int, rows: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    flat = torch.zeros(2 * rows, count * head_dim, dtype=dtype, device=DEVICE)
    return flat.view(2, rows, count, head_dim).transpose(1, 2)


@pytest.mark.parametrize("slices", [(0,), (0, 3), (1, 2)])
@pytest.mark.parametrize("head_dim", [16, 12])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kernel", ["fa2", "cudnn"])
def test_attention_operators_take_what_they_are_given(
    kernel: AttentionBackend, dtype: torch.dtype, head_dim: int, slices: tuple[int, ...]
) -> None:
    rows, keys = 40, 40 if slices == (0,) else 80
    with FakeTensorMode(), Plainly():
        q, grad = (heads(4, rows, head_dim, dtype) for _ in range(2))
        k, v = (heads(2, keys, head_dim, dtype) for _ in range(2))
        out, lse = attention_backends.attend(q, k, v, slices, kernel)
        found = attention_backends.attend_backward(grad, q, k, v, out, lse, slices, kernel)
    assert (lse.shape, lse.dtype) == ((2, 4, rows), wide(dtype))
    assert [(x.shape, x.dtype, x.device) for x in (out, *found)] == [
        (x.shape, x.dtype, DEVICE) for x in (q, q, k, v)
    ]


@pytest.mark.parametrize(
    ("dtype", "head_dim", "kernel", "row"),
    [
        (torch.bfloat16, 128, "fa2", "cuda"),
        (torch.bfloat16, 128, "fa3", "cuda"),
        (torch.bfloat16, 128, "cudnn", "cudnn"),
        (torch.bfloat16, 256, "cudnn", "cuda"),
        (torch.bfloat16, 12, "cudnn", "exact"),
        (torch.bfloat16, 264, "fa2", "exact"),
        (torch.float32, 64, "cudnn", "efficient"),
        (torch.float32, 6, "fa2", "exact"),
        (torch.float64, 64, "cudnn", "exact"),
    ],
)
def test_which_operator_a_gpu_uses(
    dtype: torch.dtype, head_dim: int, kernel: AttentionBackend, row: str
) -> None:
    with FakeTensorMode():
        x = torch.empty(1, 1, 8, head_dim, dtype=dtype, device=DEVICE)
        assert attention_backends.backend(x, x.shape[-1], kernel) == row


def test_cudnn_saves_what_flash_saves() -> None:
    with FakeTensorMode(), Plainly():
        q = heads(4, 40, 16, torch.bfloat16)
        flash, cudnn = (attention_backends.flash(q, q, q, True, one) for one in ("fa2", "cudnn"))
    assert [(x.shape, x.dtype) for x in flash] == [(x.shape, x.dtype) for x in cudnn]


def test_fa3_without_its_package_is_named() -> None:
    with pytest.raises(ImportError, match="flash_attn"):
        attention_backends.choose_flash("fa3")
    attention_backends.choose_flash("fa2")


def test_equal_lengths_are_told_by_no_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flash backward takes any lengths, even none at all in a tensor, for unequal ones."""
    seen: list[Any] = []
    aten = torch.ops.aten
    backward = aten._scaled_dot_product_flash_attention_backward

    def noted(*args: Any) -> Any:
        seen.extend(args[6:8])
        return backward(*args)

    monkeypatch.setattr(aten, "_scaled_dot_product_flash_attention_backward", noted)
    with FakeTensorMode(), Plainly():
        q = heads(4, 40, 16, torch.bfloat16)
        forward = aten._scaled_dot_product_flash_attention(q, q, q, 0.0, True)
        attention_backends.flash_backward(q, q, q, q, forward[0], forward[1], True)
    assert set(seen) == set(forward[2:4]) == {None}


def drawn() -> list[Tensor]:
    """Queries, keys, values and a gradient: four heads, two KV heads, 40 rows."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(2, count, 40, 16, dtype=torch.float64, generator=generator)
        for count in (4, 2, 2, 4)
    ]


class OnStandIns:
    """An operator of attention that plain products stand in for, with the conditions of torch's
    kernel in `forward` and `backward`."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str, forward: Any, backward: Any) -> None:
        self.patch, self.name = patch, name
        operator = f"_scaled_dot_product_{name}_attention"
        patch.setattr(torch.ops.aten, operator, forward)
        patch.setattr(torch.ops.aten, f"{operator}_backward", backward)

    def equals_plain_products(self) -> None:
        q, k, v, grad = drawn()
        found = []
        for row in ("exact", self.name):
            self.patch.setattr(attention_backends, "backend", lambda *_, row=row: row)
            out, lse = attention_backends.attend(q, k, v, (0,), "cudnn")
            back = attention_backends.attend_backward(grad, q, k, v, out, lse, (0,), "cudnn")
            found.append((out, lse, *back))
        for a, b in zip(*found, strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, atol=1e-12)


def plainly(call: Any, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_backends, "backend", lambda *_: "exact")
        return call(*args)


def test_the_efficient_operator_gets_its_padding_and_equal_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, p: float, c: bool) -> Any:
        assert k.shape[1] == q.shape[1]
        out, found = plainly(attention_backends.flash, q, k, v, c)
        return out, torch.nn.functional.pad(found, (0, 24), value=float("inf")), None, None

    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, *rest: Any) -> Any:
        out, lse, _, _, _, mask, causal = rest
        assert (lse.shape[2] % 32, mask[3]) == (0, False)
        assert torch.isinf(lse[:, :, 40:]).all()
        exact = attention_backends.flash_backward
        return *plainly(exact, g, q, k, v, out, lse[:, :, :40], causal), None

    OnStandIns(monkeypatch, "efficient", forward, backward).equals_plain_products()


def test_cudnn_gets_lse_as_one_column_and_the_heads_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward(q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, p: float, c: bool) -> Any:
        assert (k.shape[1], lse, p) == (2, True, 0.0)
        out, found = plainly(attention_backends.flash, q, k, v, c)
        return out, found[..., None]

    def backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *rest: Any) -> Any:
        lse, _, _, _, _, _, rows, keys, p, causal = rest
        assert (lse.shape, rows, keys, p) == ((2, 4, 40, 1), 40, 40, 0.0)
        exact = attention_backends.flash_backward
        return plainly(exact, g, q, k, v, out, lse.squeeze(-1), causal)

    OnStandIns(monkeypatch, "cudnn", forward, backward).equals_plain_products()
