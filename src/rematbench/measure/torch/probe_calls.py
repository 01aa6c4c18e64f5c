"""The calls whose rates are measured, from the operator tables: products, attention, norms, losses.

A probe has the call's words (as in kernels.csv), its work, the cost model's prediction, and a
function that makes the inputs and returns the call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from msgspec.structs import replace as change
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rematbench.costs.bind_kernels import Direction
from rematbench.costs.operators.kernels import Attention, Gemm, Named
from rematbench.costs.operators.ops import Op
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.system import AttentionBackend
from rematbench.measure.torch.repeats import Call
from rematbench.problem import Problem
from rematbench.worlds.torch import arithmetic
from rematbench.worlds.torch.attention_backends import repeat
from rematbench.worlds.torch.rank_model import DTYPES

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward_input", "backward_weight")
Backend = AttentionBackend | Literal[""]
BACKENDS: dict[str, tuple[SDPBackend, Backend]] = {
    "flash": (SDPBackend.FLASH_ATTENTION, "fa2"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "cudnn"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, ""),
    "math": (SDPBackend.MATH, ""),
}
"""torch's attention backends, and the attention kernel of config/kernels that each one runs."""
SHARING = ("flash", "cudnn")
"""Backends that read a KV head for several query heads; the others get copies of it."""
SCORE_BYTES = 12
"""Bytes that the math backend holds for a pair of a query and a key, forward and backward (bf16
and fp32 scores, probabilities, their gradient): its memory is checked before the call."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """One call to time.  `per`: how many pieces of work one call has; `room_bytes`: device bytes
    that it needs in addition to its inputs, if many; `for_s`: seconds that the device repeats the
    call without a pause (0: until the seconds are steady, as in a short benchmark)."""

    what: str
    implementation: str
    shape: dict[str, str]
    make: Callable[[], Call]
    dtype: str = "bf16"
    work: float = 0.0
    unit: Literal["flop", "bytes", ""] = ""
    predicted_s: float | None = None
    clock: Literal["events", "host"] = "events"
    per: int = 1
    room_bytes: int = 0
    compiled: bool = False
    for_s: float = 0.0


class Place(NamedTuple):
    """A problem, its name in a probe's words, and the device."""

    name: str
    problem: Problem
    device: torch.device

    def random(self, *shape: int) -> Tensor:
        """Normal numbers in the problem's dtype."""
        dtype = DTYPES[self.problem.workload.precision]
        return torch.randn(shape, device=self.device, dtype=dtype)

    def seconds(self, kernel: Any, direction: Direction, backend: Backend = "") -> float | None:
        """Return the cost model's seconds of a kernel, with an attention backend instead of the
        stack's backend.  None if config/kernels has no rates for it."""
        try:
            problem = replace(self.problem, backend=backend) if backend else self.problem
            return problem.cost.kernel_s(kernel, direction)
        except RateError:
            return None


def layer_probes(place: Place, *, compiled: bool) -> Iterator[Probe]:
    """Products, norms and the loss of one layer and the head, in every direction."""
    precision = place.problem.workload.precision
    for table in (place.problem.layer(0), place.problem.head):
        for op in table.ops:
            for probe in _of_op(place, op, compiled):
                yield replace(probe, dtype=precision)


def _of_op(place: Place, op: Op, compiled: bool) -> Iterator[Probe]:
    for direction in DIRECTIONS:
        for kernel in getattr(op, direction):
            if isinstance(kernel, Gemm):
                yield _gemm(place, op, kernel, direction)
            elif isinstance(kernel, Named) and kernel.operator == "norm":
                yield from _norms(place, op, kernel, direction, compiled)
    if op.name == "loss":
        yield from _losses(place, op, compiled)


def _gemm(place: Place, op: Op, kernel: Gemm, direction: Direction) -> Probe:
    """A product as the executor calls it; weight gradients are added to a wide buffer."""
    m, n, k = kernel.m, kernel.n, kernel.k

    def forward() -> Call:
        x, weight = place.random(m, k), place.random(n, k)
        return lambda: arithmetic.linear(x, weight)

    def backward_input() -> Call:
        grad, weight = place.random(m, k), place.random(k, n)
        return lambda: grad @ weight

    def backward_weight() -> Call:
        grad, x = place.random(k, n), place.random(k, m)
        total = torch.zeros(n, m, device=place.device, dtype=arithmetic.wide(x.dtype))
        return lambda: arithmetic.add_weight_gradient(total, grad, x)

    makers = (forward, backward_input, backward_weight)
    sums = " (fp32 sums)" if direction == "backward_weight" else ""
    return Probe(
        what="gemm",
        implementation=f"torch{sums}",
        shape=_shape(m=m, n=n, k=k, model=place.name, op=op.name, direction=direction),
        make=dict(zip(DIRECTIONS, makers, strict=True))[direction],
        work=2.0 * m * n * k,
        unit="flop",
        predicted_s=place.seconds(kernel, direction),
    )


def _shape(**sizes: int | str) -> dict[str, str]:
    return {key: str(size) for key, size in sizes.items()}


def _written_out(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm in torch operators, with fp32 statistics."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + arithmetic.NORM_EPS)
    return weight * y.to(x.dtype)


def _fused(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, arithmetic.NORM_EPS)


def _entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), labels)


def _backward(graph: Callable[[], Tensor], inputs: Sequence[Tensor]) -> Call:
    """A call of the backward of a graph that is kept."""
    out = graph()
    grad = torch.ones_like(out)
    return lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)


def _passes(run: Callable[[], Tensor], inputs: list[Tensor], *, forward: bool) -> Call:
    """The forward without a graph, or the backward alone."""
    for tensor in inputs:
        tensor.requires_grad_()
    if forward:
        return torch.no_grad()(run)
    return _backward(run, inputs)


def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.compile of a function, whose backward may run several times."""
    from torch._functorch import config  # noqa: PLC0415  # imports torch's compiler

    config.donated_buffer = False  # type: ignore[attr-defined,unused-ignore]
    made: Callable[..., Tensor] = torch.compile(function, dynamic=False)
    return made


def _norms(
    place: Place, op: Op, kernel: Named, direction: Direction, compiled: bool
) -> Iterator[Probe]:
    """RMSNorm as torch's operator, written out in torch operators, and compiled."""
    kind, forward = place.problem.workload.model, direction == "forward"
    if kind.norm != "rmsnorm" or op.name != "attn_norm":  # the others are the same kernel
        return
    rows, hidden = kernel.elements // kind.hidden, kind.hidden
    ways = {"torch": _fused, "eager": _written_out, "compiled": _written_out}
    for word, function in ways.items():
        if word == "compiled" and not compiled:
            continue

        def make(word: str = word, function: Callable[..., Tensor] = function) -> Call:
            run = _compiled(function) if word == "compiled" else function
            x, weight = place.random(rows, hidden), place.random(hidden)
            return _passes(lambda: run(x, weight), [x, weight], forward=forward)

        size = _shape(type="rms_norm", rows=rows, hidden=hidden, model=place.name, op=op.name)
        yield Probe(
            what="norm",
            implementation=word,
            shape=size | {"pass": "forward" if forward else "backward"},
            make=make,
            work=(2.0 if forward else 3.0) * kernel.elements * kernel.element_bytes,
            unit="bytes",
            predicted_s=place.seconds(change(kernel, implementation=word), direction),
            compiled=word == "compiled",
        )


def _losses(place: Place, op: Op, compiled: bool) -> Iterator[Probe]:
    """Cross-entropy of fp32 copies of the logits, eager and compiled; the cost model knows the
    stack's alone, which is eager."""
    shape = place.problem.head.activations["logits"]
    rows = shape.rows
    vocab = shape.row_bytes // place.problem.workload.element_bytes
    for word in ("eager", *(("compiled",) if compiled else ())):
        for direction in DIRECTIONS[:2]:
            forward = direction == "forward"

            def make(word: str = word, forward: bool = forward) -> Call:
                run = _compiled(_entropy) if word == "compiled" else _entropy
                logits = place.random(rows, vocab)
                labels = torch.randint(vocab, (rows,), device=place.device)
                return _passes(lambda: run(logits, labels), [logits], forward=forward)

            known = word == "eager"
            yield Probe(
                what="cross_entropy",
                implementation=word,
                shape=_shape(rows=rows, vocab=vocab, tp=1, model=place.name)
                | {"pass": "forward" if forward else "backward"},
                make=make,
                work=(1.0 if forward else 2.0) * shape.nbytes,
                unit="bytes",
                predicted_s=place.problem.cost.op_s(op, direction) if known else None,
                compiled=word == "compiled",
            )


def attention_probes(place: Place) -> Iterator[Probe]:
    """Causal attention of the problem's length, both passes, with each of torch's backends."""
    found = (k for op in place.problem.layer(0).ops for k in op.forward)
    kernel = next(k for k in found if isinstance(k, Attention))
    b, h, kv, s, d = kernel.batch, kernel.heads, kernel.kv_heads, kernel.q_rows, kernel.head_dim
    for word, (_, rates) in BACKENDS.items():
        for direction in DIRECTIONS[:2]:
            forward = direction == "forward"

            def make(word: str = word, forward: bool = forward) -> Call:
                return _attention(place, (b, h, kv, s, d), word, forward=forward)

            yield Probe(
                what="attention_forward" if forward else "attention_backward",
                implementation=word,
                dtype=place.problem.workload.precision,
                shape=_shape(b=b, h=h, kv=kv, s=s, d=d, causal=1, model=place.name),
                make=make,
                work=(1.0 if forward else 2.5) * 4.0 * b * h * d * (s * s / 2),
                unit="flop",
                predicted_s=place.seconds(kernel, direction, rates) if rates else None,
                room_bytes=SCORE_BYTES * b * h * s * s if word == "math" else 0,
            )


def sustained(probes: Iterable[Probe], for_s: float) -> Iterator[Probe]:
    """The probes whose work is FLOP, each for a long time without a pause.  A GPU at its power
    limit lowers its clock within a second, so that a step runs at these rates and not at the rates
    of a short benchmark."""
    for probe in probes:
        if probe.unit == "flop" and not probe.compiled:
            yield replace(probe, shape=probe.shape | {"for_s": f"{for_s:g}"}, for_s=for_s)


def _attention(
    place: Place, sizes: tuple[int, int, int, int, int], word: str, *, forward: bool
) -> Call:
    b, h, kv, s, d = sizes
    shared = word in SHARING
    q, k, v = place.random(b, h, s, d), place.random(b, kv, s, d), place.random(b, kv, s, d)
    if not shared:
        k, v = repeat(k, h), repeat(v, h)

    def run() -> Tensor:
        with sdpa_kernel(BACKENDS[word][0]):
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=shared and h != kv
            )

    return _passes(run, [q, k, v], forward=forward)
