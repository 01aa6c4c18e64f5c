"""Separate host and device memory on a CPU, where torch has only one memory.

DeepSpeed asks its accelerator for the name of its device, and uses "cpu" for the host. Here the
device is "cpu:0", and streams and events are always complete, so that DeepSpeed takes the code
paths of a GPU. A fake tensor keeps the device's name: moving it makes a copy, and an operator with
operands in both memories is an error. A real tensor loses the name, so `Places` records where its
storage is.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from deepspeed.accelerator.real_accelerator import set_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor
from torch.utils._pytree import tree_iter

from rematbench.worlds.torch.dispatch import DispatchMode

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
SHIM = ("places", "streams")
"""The names of the shim's parts in a record. places: the device is cpu:0 and the host is cpu;
streams: streams are always complete."""


def moves(configuration: dict[str, Any]) -> bool:
    zero = configuration.get("zero_optimization", {})
    homes = [
        zero.get(f"offload_{kind}", {}).get("device", "none") for kind in ("optimizer", "param")
    ]
    checkpointing_ = configuration.get("activation_checkpointing", {})
    return "cpu" in homes or bool(checkpointing_.get("cpu_checkpointing"))


class _Stream:
    """A stream or an event, whose work is always complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        """Always True: no work is pending."""
        return True

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Do nothing: there is no work to wait for."""

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *_: Any) -> Self:
        """The event, which is the stream itself."""
        return self


class Accelerator(CPU_Accelerator):  # type: ignore[misc]  # deepspeed has no types
    """A device that is separate from the host, on the same CPU."""

    Stream = Event = _Stream

    def device_name(self, device_index: int | None = None) -> str:
        return str(DEVICE)

    def current_device_name(self) -> str:
        return str(DEVICE)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device == DEVICE

    def is_synchronized_device(self) -> bool:
        """False, as for a GPU, which runs concurrently with its host."""
        return False

    def use_host_timers(self) -> bool:
        """True: there are no device timers."""
        return True

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> _Stream:
        return _Stream()

    default_stream = current_stream


@contextlib.contextmanager
def separate_places(*, real: bool) -> Iterator[Callable[[Tensor], bool]]:
    """A context in which host and device memory are separate. It yields a function that tells
    whether a tensor is on the host."""
    plain, record_stream, tensor = get_accelerator(), Tensor.record_stream, torch.tensor
    set_accelerator(Accelerator())
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    checkpointing._cpu_offload_engine = None  # the engine is bound to an accelerator's streams
    try:
        if real:
            with Places() as places:
                yield places.host
        else:
            torch.tensor = _there
            yield lambda tensor: tensor.device == HOST
    finally:
        torch.tensor = tensor
        checkpointing._cpu_offload_engine = None
        Tensor.record_stream = record_stream  # type: ignore[method-assign]
        set_accelerator(plain)


_tensor = torch.tensor


def _there(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor under fake tensors. Without `device` the result is on the host, with its
    value."""
    made = _tensor(*args, **kwargs)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)


FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "full", "full_like", "ones", "ones_like",
    "rand", "randint", "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_to = Tensor.to


class Places(DispatchMode):
    """Records which live storages of real tensors are on the host.

    A new tensor is on the device that Python code names (no name means the host), or else on the
    device of its operands. PyTorch's functions that read or change a tensor's device are replaced
    while this mode is active, because function modes have no effect inside a backward.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hosts: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._asked: torch.device | None = None
        self._plain: dict[str, Callable[..., Tensor]] = {}

    def host(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is on the host."""
        return tensor.untyped_storage()._cdata in self._hosts

    def place(self, tensor: Tensor) -> torch.device:
        return HOST if self.host(tensor) else DEVICE

    def __enter__(self) -> Self:
        self._plain = {name: getattr(torch, name) for name in FACTORIES}
        for name, factory in self._plain.items():
            setattr(torch, name, self._making(factory))
        methods = {"to": self._moving(), "cpu": self._moving()}
        for name, method in {**methods, "device": property(self.place)}.items():
            setattr(Tensor, name, method)
        return super().__enter__()  # type: ignore[no-any-return,no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        for name in ("to", "cpu", "device"):
            delattr(Tensor, name)  # torch has them in a base class
        for name, factory in self._plain.items():
            setattr(torch, name, factory)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, whose operands must be in one memory; record where its results are."""
        result = func(*args, **(kwargs or {}))
        operands = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        if func is torch.ops.aten.lift_fresh.default:  # torch.tensor calls it on Python's values
            operands = []
        known = {tensor.untyped_storage()._cdata for tensor in operands}
        fresh = [made for made in tree_iter(result) if isinstance(made, Tensor)]
        fresh = [made for made in fresh if made.untyped_storage()._cdata not in known]
        if self._on_host(func, operands, (kwargs or {}).get("device")):
            for made in fresh:
                self._keep(made.untyped_storage())
        return result

    def _on_host(self, func: Any, operands: list[Tensor], named: torch.device | None) -> bool:
        if named == DEVICE:
            return False
        if self._asked is not None:
            return self._asked == HOST
        found = {self.host(tensor) for tensor in operands if tensor.dim() > 0}
        if len(found) > 1 and func is not torch.ops.aten.copy_.default:
            raise RuntimeError(f"{func} has operands on the host and on the device")
        return found == {True} or (not found and any(map(self.host, operands)))

    def _keep(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._hosts[key] = weakref.ref(storage, lambda _: self._hosts.pop(key, None))

    @contextlib.contextmanager
    def _in(self, place: torch.device | None) -> Iterator[None]:
        before, self._asked = self._asked, place
        try:
            yield
        finally:
            self._asked = before

    def _making(self, factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that calls `factory` and puts the tensor where the caller says."""

        def made(*args: Any, **kwargs: Any) -> Tensor:
            named = kwargs.get("device")
            like = any(isinstance(item, Tensor) for item in args)
            place = torch.device(named) if named is not None else None if like else HOST
            with self._in(place):
                return factory(*args, **kwargs)

        return made

    def _moving(self) -> Callable[..., Tensor]:
        """A replacement for `Tensor.to` and `Tensor.cpu`: it returns the tensor itself if the
        tensor is there already, else a copy."""

        def moved(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            copy = kwargs.pop("copy", False)
            asked = {name: kwargs[name] for name in ("device", "dtype") if name in kwargs}
            there, dtype, *_ = (
                torch._C._nn._parse_to(*args, **asked) if args or asked else (HOST, None)
            )
            apart = there is not None and there != self.place(tensor)
            with self._in(there if apart else None):
                result: Tensor = _to(tensor, dtype or tensor.dtype, copy=copy or apart)
            return result

        return moved
