"""Stand-ins for features that Megatron-core needs and a machine without CUDA lacks. A record names
the parts.

A run with any part is "megatron-core + CPU shim", never stock Megatron-core; on a GPU without
TransformerEngine only *te* is installed ("megatron-core without TransformerEngine"). No part
changes arithmetic: the parts redirect devices, generators, streams and type names, and define names
that only TransformerEngine has.

| part | what it redirects |
|---|---|
| dev | device="cuda", .cuda(), torch.cuda.current_device, pin_memory |
| rng | torch.cuda's and Megatron's random state -> the CPU generator (traced: no state) |
| stream | streams, events and ranges -> synchronous no-ops |
| type | Tensor.type() of CPU tensors -> the CUDA type strings that the optimizer compares with |
| compile | torch.compile -> eager; only the bytes of a function's results count, because on a GPU
torch.compile makes one kernel of the function |
| dropout | F.dropout -> native_dropout, which keeps a byte mask as CUDA's kernel does |
| norm | F.rms_norm -> one function that saves its input and 1/rms, as CUDA's kernel does |
| flash | traced, with dropout: scaled_dot_product_attention -> the same without dropout, because a
CPU computes attention with dropout by several operators; CUDA's kernel saves no mask (only two
integers of its generator's state) |
| settle | collectives return when gloo's threads have released their tensors, so that bytes are
exact |
| te | names that only TransformerEngine has and that Megatron-core uses unconditionally |
"""

import contextlib
import importlib
import sys
from collections.abc import Callable
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from baselines.common.meter import as_kernel
from baselines.common.norm import rms_norm
from rematbench.worlds.torch.groups import run_and_release

CPU = torch.device("cpu")


def causal_mask(size: int) -> torch.Tensor:
    """Megatron-core's default causal mask on a CPU; each call makes a new tensor, as in
    Megatron-core."""
    return torch.triu(torch.ones(size, size), diagonal=1).bool()


def _is_cuda(device: object) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class CpuDevice(TorchFunctionMode):
    """Makes functions that create CUDA tensors or pinned memory create plain CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if _is_cuda(given.get("device")):
            given["device"] = CPU
        if given.get("pin_memory"):
            given["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(CPU if _is_cuda(a) else a for a in args)
        return func(*args, **given)


def _dev() -> None:
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.is_available = lambda: False
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    softmax: Any = importlib.import_module("megatron.core.fusions.fused_softmax")
    softmax.get_default_causal_mask = causal_mask
    CpuDevice().__enter__()  # type: ignore[no-untyped-call]


def _rng(real: bool) -> None:
    tp_random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    get: Callable[..., Any] = lambda *_, **__: torch.get_rng_state()  # noqa: E731
    put: Callable[..., Any] = lambda state, *_, **__: torch.set_rng_state(state)  # noqa: E731
    if not real:  # fake tensors draw nothing, so there is no state to keep
        get, put = (lambda *_, **__: None), (lambda *_, **__: None)
        tp_random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
        tp_random.CudaRNGStatesTracker.add = lambda *_, **__: None
        torch.get_rng_state = get  # type: ignore[assignment]  # no caller uses the result
        torch.set_rng_state = put
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = put
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    tp_random._get_cuda_rng_state = get
    tp_random._set_cuda_rng_state = put


class _Stream:
    """A stream or an event, whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        names = ("wait_stream", "wait_event", "record", "wait", "synchronize", "record_event")
        if name not in names:
            raise AttributeError(name)
        return lambda *_, **__: _Stream() if name == "record_event" else None


def _stream() -> None:
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = _Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.current_stream = cuda.default_stream = lambda *_: _Stream()
    cuda.synchronize = lambda *_: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    torch.Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]


_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
    torch.float16: "torch.cuda.HalfTensor",
}


def _type() -> None:
    plain = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not args and not kwargs and self.dtype in _NAMES:
            return _NAMES[self.dtype]
        return plain(self, *args, **kwargs)

    torch.Tensor.type = named  # type: ignore[method-assign,assignment]


def _dropout() -> None:
    def dropout(
        x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not training or p == 0.0:
            return x
        return torch.native_dropout(x, p, True)[0]

    F.dropout = torch.nn.functional.dropout = dropout  # type: ignore[assignment]


def _norm() -> None:
    def normed(x: torch.Tensor, _: Any, weight: torch.Tensor, eps: float) -> Any:
        return rms_norm(x, weight, eps)

    F.rms_norm = torch.nn.functional.rms_norm = normed  # type: ignore[assignment]


def _flash() -> None:
    plain: Any = F.scaled_dot_product_attention

    def attention(*tensors: torch.Tensor, dropout_p: float = 0.0, **options: Any) -> Any:
        return plain(*tensors, **options)

    F.scaled_dot_product_attention = attention  # type: ignore[assignment]


class _NoFp8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


def _te() -> None:
    """Define names that Megatron-core 0.16 uses without testing HAVE_TE."""
    attention: Any = importlib.import_module("megatron.core.transformer.attention")
    if attention.set_save_original_input is None:
        attention.set_save_original_input = lambda module: None
    extension: Any = importlib.import_module("megatron.core.extensions.transformer_engine")
    if (
        getattr(extension, "cpu_offload", None) is None
    ):  # Megatron-core's offloading sets CPUOffloadEnabled
        extension.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
    moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe_utils, "te_general_gemm"):  # the fp32 router looks it up
        moe_utils.te_general_gemm = None
    tp_random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    latent: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    latent.HAVE_TE = extension.HAVE_TE  # extension has stand-ins for its classes
    if not hasattr(tp_random, "FP8GlobalStateManager"):  # it is looked up even with fp8 off
        tp_random.FP8GlobalStateManager = _NoFp8
        tp_random.activation_recompute_forward = lambda **_: contextlib.nullcontext()
        tp_random.fp8_autocast = lambda **_: contextlib.nullcontext()


class _Done:
    def wait(self, *_: Any) -> bool:
        return True


def _at_once(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*tensors: torch.Tensor, async_op: bool = False, **options: Any) -> Any:
        group: Any = options.get("group") or dist.group.WORLD
        # There is nothing to wait for if Megatron-core only records the call, to coalesce it.
        noted = group in dist.distributed_c10d._world.pg_coalesce_state
        if noted or dist.get_backend(group) == "fake":
            return plain(*tensors, async_op=async_op, **options)
        run_and_release(partial(plain, **options), *tensors)
        return _Done() if async_op else None

    return call


@cache
def install_missing_names() -> tuple[str, ...]:
    """On a GPU without TransformerEngine, define only the names that are missing there."""
    importlib.import_module("megatron.core.models.gpt")
    _te()
    return ("te",)


@cache
def preload() -> None:
    """Install the parts that must precede the import of Megatron-core, then import it. Packages of
    CUDA kernels are hidden, even if they are installed."""
    for name in ("transformer_engine", "apex"):
        sys.modules[name] = None  # type: ignore[assignment]  # this makes the import fail
    torch.compile = lambda model=None, **_: as_kernel(model) if model is not None else as_kernel  # type: ignore[assignment]
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
        setattr(dist, name, _at_once(getattr(dist, name)))
    importlib.import_module("megatron.core.models.gpt")


def install(*, real: bool) -> tuple[str, ...]:
    """Install every part; return the names of the parts for a record."""
    preload()
    _dev()
    _rng(real)
    _stream()
    _type()
    _dropout()
    _norm()
    if not real:  # executed runs refuse dropout
        _flash()
    _te()
    return ("dev", "rng", "stream", "type", "compile", "dropout", "norm", "settle", "te")
