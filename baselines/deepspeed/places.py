"""Host and device memory told apart on a CPU, where for torch they are one.

DeepSpeed asks its accelerator for the name of its device and says "cpu" for the host.  Here the
device is "cpu:0", and streams and events are such as have happened already, so that DeepSpeed goes
the ways that it goes on a GPU.  A fake tensor keeps that name by itself: moving one copies it, and
an operator on both is an error.  A real one forgets it, so its storage is followed (`Places`).
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

from rematbench.torch.mode import Mode

DEVICE, HOST = torch.device("cpu", 0), torch.device("cpu")
SHIM = ("places", "streams")
"""What a record names: the device is cpu:0 beside the host's cpu; streams that are never behind."""


def moves(configuration: dict[str, Any]) -> bool:
    """Whether a configuration keeps anything on the host."""
    zero = configuration.get("zero_optimization", {})
    homes = [
        zero.get(f"offload_{kind}", {}).get("device", "none") for kind in ("optimizer", "param")
    ]
    checkpointing_ = configuration.get("activation_checkpointing", {})
    return "cpu" in homes or bool(checkpointing_.get("cpu_checkpointing"))


class _Stream:
    """A stream, or an event, on which everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def query(self) -> bool:
        """Nothing is left to do."""
        return True

    def _nothing(self, *_: Any, **__: Any) -> None:
        """Nothing to wait for."""

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, *_: Any) -> Self:
        """The event is the stream."""
        return self


class Accelerator(CPU_Accelerator):  # type: ignore[misc]  # deepspeed has no types
    """A device beside the host, on the same CPU."""

    Stream = Event = _Stream

    def device_name(self, device_index: int | None = None) -> str:
        """One device a process."""
        return str(DEVICE)

    def current_device_name(self) -> str:
        """The device."""
        return str(DEVICE)

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether a tensor is not on the host."""
        return tensor.device == DEVICE

    def is_synchronized_device(self) -> bool:
        """As a GPU, which runs beside its host."""
        return False

    def use_host_timers(self) -> bool:
        """There is nothing else to time with."""
        return True

    def stream(self, stream: Any) -> Any:
        """Streams are all the same."""
        return contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> _Stream:
        """Any stream."""
        return _Stream()

    default_stream = current_stream


@contextlib.contextmanager
def apart(*, real: bool) -> Iterator[Callable[[Tensor], bool]]:
    """Host and device apart while this lasts; gives the question whether a tensor is the host's."""
    plain, record_stream, tensor = get_accelerator(), Tensor.record_stream, torch.tensor
    set_accelerator(Accelerator())
    Tensor.record_stream = lambda *_: None  # type: ignore[method-assign]
    checkpointing._cpu_offload_engine = None  # it is bound to an accelerator's streams
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
    """torch.tensor among fake ones: its own knows its value, and stays on the host with it."""
    made = _tensor(*args, **kwargs)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)


FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "full", "full_like", "ones", "ones_like",
    "rand", "randint", "randn", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_to = Tensor.to


class Places(Mode):
    """Real tensors with a place each: which storages are the host's, while they live.

    A new tensor is where Python asked for it (a name of a device; none is the host), else where its
    operands are.  What PyTorch asks and moves by name is replaced while this is entered, because
    function modes do not reach into a backward.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hosts: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._asked: torch.device | None = None
        self._plain: dict[str, Callable[..., Tensor]] = {}

    def host(self, tensor: Tensor) -> bool:
        """Whether a tensor's storage is the host's."""
        return tensor.untyped_storage()._cdata in self._hosts

    def place(self, tensor: Tensor) -> torch.device:
        """What `tensor.device` is here."""
        return HOST if self.host(tensor) else DEVICE

    def __enter__(self) -> Self:
        """Follow storages from now on."""
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
        """Run the operator, on operands of one place; then say where its results are."""
        result = func(*args, **(kwargs or {}))
        operands = [item for item in tree_iter((args, kwargs)) if isinstance(item, Tensor)]
        if func is torch.ops.aten.lift_fresh.default:  # of torch.tensor, from Python's values
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
            raise RuntimeError(f"{func}: operands on the host and on the device")
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
        """`factory`, whose tensor is in the place that its caller names."""

        def made(*args: Any, **kwargs: Any) -> Tensor:
            named = kwargs.get("device")
            like = any(isinstance(item, Tensor) for item in args)
            place = torch.device(named) if named is not None else None if like else HOST
            with self._in(place):
                return factory(*args, **kwargs)

        return made

    def _moving(self) -> Callable[..., Tensor]:
        """`Tensor.to` or `Tensor.cpu`: the tensor where it is already, else a copy there."""

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
