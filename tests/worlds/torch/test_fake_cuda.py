"""The executor's CUDA path on fake tensors: operators, devices, streams, memory.  No GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.ledger import live_bytes
from rematbench.inputs.system import AttentionBackend
from rematbench.worlds.torch import attention_backends, operators
from rematbench.worlds.torch.arithmetic import wide
from rematbench.worlds.torch.case import Case
from rematbench.worlds.torch.rank_processes import execute_cases
from rematbench.worlds.torch.streams import CudaStreams
from tests.worlds.torch import cases, grid, laws
from tests.worlds.torch.cases import TINY_GPT
from tests.worlds.torch.fake_cuda import DEVICE, OVERLAP, run
from tests.worlds.torch.recorder import Plainly

FAST = (
    *(("one", "offload-slots"), ("tp2", "windows"), ("cp2", "rows")),
    ("tp2-ulysses2", "offload"),
    ("dp2-zero3", "windows"),
    ("tp2-dp2-ep2", "keep"),
)
MORE = (
    *(("one", plan) for plan in ("offload", "offload-layers", "rows")),
    ("dp2", "full"),
    *((layout, "offload-layers") for layout in ("dp2-zero2", "cp2-zero3", "tp2-dp2-zero3")),
    *(("tp2", plan) for plan in ("keep", "mini-dropped")),
    *(("tp2-no-sp", "mini"), ("pp2", "offload")),
    *(("tp2-cp2", "skeletal"), ("pp2-vpp2", "offload-slots")),
    *(("ep2", plan) for plan in ("full", "expert-rows", "expert-parts")),
)


def check(case: Case, patch: pytest.MonkeyPatch) -> None:
    """No fault on any stage, and the ledger's bytes after every action."""
    for stage in range(case.problem.layout.pp):
        recorder, executor = run(case, stage, patch)
        assert recorder.faults == []
        assert recorder.operators > 1000
        actions = lower(case.plan, case.problem).ranks[stage].actions()
        assert executor.bytes_after == list(live_bytes(actions))


@pytest.mark.parametrize(
    ("layout", "plan"), [*FAST, *(pytest.param(*each, marks=pytest.mark.full) for each in MORE)]
)
def test_streams_and_memory_are_ordered_and_the_host_never_waits(
    layout: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(cases.case(layout, plan, precision="bf16"), monkeypatch)


@pytest.mark.parametrize(
    "layout", ["dp2", *(pytest.param(each, marks=pytest.mark.full) for each in ("tp2", "pp2-vpp2"))]
)
def test_collectives_beside_kernels(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(cases.case(layout, "windows", precision="bf16", system_changes=OVERLAP), monkeypatch)


@pytest.mark.full
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_other_precisions_and_the_gpt_variant(
    precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(cases.case("cp2", "full", precision=precision), monkeypatch)
    check(cases.case("one", "mini", precision=precision, model=TINY_GPT), monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("changes", [{}, OVERLAP, OVERLAP | {"tp_overlap": "backward"}])
@pytest.mark.parametrize("layout", cases.LAYOUTS)
def test_every_plan_on_every_layout(
    layout: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for plan in cases.PLANS:
        check(cases.case(layout, plan, precision="bf16", system_changes=changes), monkeypatch)
    for case in grid.method_cases(layout) if not changes else ():
        check(case, monkeypatch)


# -- what the recorder must find --------------------------------------------------------------


def faults(layout: str, plan: str, patch: pytest.MonkeyPatch, **changes: Any) -> list[str]:
    case = cases.case(layout, plan, precision="bf16")
    return run(Case(**{**vars(case), **changes}), 0, patch)[0].faults


def test_a_message_whose_handle_outlives_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's handle holds what it sends."""
    monkeypatch.setattr(CudaStreams, "pending", lambda streams, channel, work: work)
    with pytest.raises(AssertionError):
        check(cases.case("pp2", "keep", precision="bf16"), monkeypatch)


def test_a_blocking_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_index(slices: Tensor, order: list[int]) -> Tensor:
        index = torch.empty(len(order), dtype=torch.int64).to(DEVICE)
        return slices.index_select(1, index)

    monkeypatch.setattr(operators, "_in_order", by_index)
    found = faults("cp2", "keep", monkeypatch)
    assert "aten::_to_copy holds up the host" in found


# -- the host pool ----------------------------------------------------------------------------


# -- attention's operators on CUDA, on fake tensors and stand-ins: signatures, shapes, padding -----


FIRST = torch.device("cuda", 0)


def heads(count: int, rows: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    flat = torch.zeros(2 * rows, count * head_dim, dtype=dtype, device=FIRST)
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
        (x.shape, x.dtype, FIRST) for x in (q, q, k, v)
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
        x = torch.empty(1, 1, 8, head_dim, dtype=dtype, device=FIRST)
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


# -- the laws on real GPUs, where there are any: bytes, gradients, bits, in float64 and bf16 -------


GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
LAYOUTS = ("one", "tp2", "pp2", "pp2-vpp2", "cp2", "dp2", "ulysses2", "tp2-pp2", "pp4-vpp2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_plan_keeps_the_laws(layout: str) -> None:
    every = [grid.on_gpus(case) for case in grid.raw_cases(layout)]
    if every[0].world_size > GPUS:
        pytest.skip(f"needs {every[0].world_size} GPUs, torch sees {GPUS}")
    for case, result in zip(every, execute_cases(every, timeout_s=120.0), strict=True):
        grid.check_twin(case, result)
        grid.check_gradients(case, result)
        assert all(rank.step_s and rank.allocated_bytes for rank in result.ranks)


@pytest.mark.skipif(GPUS < 1, reason="torch sees no GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_splits_no_product_gives_keeps_bits(precision: cases.Precision) -> None:
    every = [
        grid.on_gpus(cases.case("one", plan, precision=precision))
        for plan in ("keep", *cases.SAME_NUMBERS, "keep")
    ]
    keep, *others = execute_cases(every, timeout_s=120.0)
    for case, result in zip(every[1:], others, strict=True):
        assert (result.status, laws.bytes_differ(case, result)) == ("ok", [])
        assert laws.same_bits(result, keep)
