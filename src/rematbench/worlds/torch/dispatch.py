"""Dispatch modes of torch: the base class, the byte tracker, and fast meta tensors.

The tracker counts the live bytes of storages from their creation until torch frees them. It does
not depend on plans or actions. It sees the outputs of every torch operator and holds a weak
reference to each new storage; the callback of the reference subtracts the storage's bytes.

A meta tensor has sizes, strides, a dtype, and a storage that has a size and an identity but no
memory. Torch derives most outputs in Python, in 50 to 300 us per operator, and a step repeats a few
hundred distinct calls thousands of times. Outputs depend on shapes only, so MetaMode runs each
distinct call once and makes the outputs of equal calls directly. It caches only operators that
return new storages and do not write their inputs; views and in-place operators always run.
"""

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The base class of the dispatch modes here. At its first operator a plain TorchDispatchMode
    imports `torch._dynamo`, to exempt the mode from a compiler that this runtime never calls. The
    import costs two CPU seconds per rank."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Override the hook of `torch.utils._python_dispatch` that asks for this exemption."""
        return False


class Tracker(DispatchMode):
    """Counts the bytes of storages that are made while it is active.

    `exclude` leaves out storages of states (parameters, gradients, optimizer, inputs), also those
    that exist already. Storages made inside `on_host` count as host bytes. If the device is a GPU,
    so do storages on the CPU. If a pool keeps its blocks, only the bytes in use count
    (`count_host_bytes`).
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._apart = device is not None and device.type == "cuda"
        self._all_host = False
        self.device_bytes = 0
        self.host_bytes = 0
        self.device_peak_bytes = 0
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, tuple[int, bool]] = {}
        self._excluded: set[int] = set()
        self._outside: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._states: list[torch.UntypedStorage] = []

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never count the storages of these tensors. The tracker keeps them alive, so that no other
        storage gets their id."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._remove(key)
            if key not in self._excluded:
                self._excluded.add(key)
                self._states.append(storage)

    def forget(self, tensor: Tensor) -> None:
        """Stop counting a tensor's storage, because it belongs to the transport."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        self._remove(key)
        self._outside[key] = weakref.ref(storage, lambda _, key=key: self._outside.pop(key, None))  # type: ignore[misc]

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count storages made inside this context as host bytes. Without a GPU, a storage does not
        show whether it is for the host."""
        self._all_host = True
        try:
            yield
        finally:
            self._all_host = False

    def count_host_bytes(self, nbytes: int) -> None:
        """Add host bytes of an excluded pool that are now in use (negative: no longer in use)."""
        self.host_bytes += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, Tensor):
                self.register(item)
        return result

    def release_states(self) -> None:
        self._states.clear()
        self._excluded.clear()

    def update_size(self, storage: torch.UntypedStorage) -> None:
        """Count the change of a storage's size since the tracker saw the storage."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            return
        before, host = self._sizes[key]
        self._sizes[key] = (size, host)
        self._count(size - before, host=host)

    def register(self, tensor: Tensor) -> None:
        self._register(tensor.untyped_storage(), host=self._is_host(tensor))

    def _is_host(self, tensor: Tensor) -> bool:
        return self._all_host or (self._apart and tensor.device.type == "cpu")

    def _register(self, storage: torch.UntypedStorage, *, host: bool = False) -> None:
        key = storage._cdata
        if key in self._excluded or key in self._outside or key in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _, key=key: self._remove(key))  # type: ignore[misc]
        self._sizes[key] = (nbytes, host)
        self._count(nbytes, host=host)

    def _remove(self, key: int) -> None:
        if self._known.pop(key, None) is None:
            return
        nbytes, host = self._sizes.pop(key)
        self._count(-nbytes, host=host)

    def _count(self, nbytes: int, *, host: bool) -> None:
        if host:
            self.host_bytes += nbytes
            return
        self.device_bytes += nbytes
        self.device_peak_bytes = max(self.device_peak_bytes, self.device_bytes)


Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype: all that is needed to make an output on the meta device."""


def form(tensor: Tensor) -> Form:
    """The sizes, strides and dtype of a tensor, which determine an operator's outputs."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def returns_new_storages(operator: Any) -> bool:
    """Whether an operator belongs to torch, returns new storages and writes no input."""
    if operator.namespace != "aten":  # collectives return handles, not tensors
        return False
    schema = operator._schema
    every = (*schema.arguments, *schema.returns)
    return bool(schema.returns) and all(item.alias_info is None for item in every)


class MetaMode(DispatchMode):
    """Runs operators on meta tensors; each distinct call runs once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fresh: dict[Any, bool] = {}
        self._known: dict[Any, tuple[bool, tuple[Form, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fresh = self._fresh.get(func)
        if fresh is None:
            fresh = self._fresh[func] = returns_new_storages(func)
        if not fresh:
            return func(*args, **(kwargs or {}))
        key = (func, _key(args), _key(kwargs) if kwargs else None)
        known = self._known.get(key)
        if known is not None:
            single, forms = known
            made = [
                torch.empty_strided(shape, strides, dtype=dtype, device="meta")
                for shape, strides, dtype in forms
            ]
            return made[0] if single else tuple(made)
        result = func(*args, **(kwargs or {}))
        single = isinstance(result, Tensor)
        outputs = (result,) if single else tuple(result)
        if all(_plain(item) for item in outputs):
            self._known[key] = single, tuple(form(item) for item in outputs)
        return result


def _plain(item: Any) -> bool:
    """Whether an item is a meta tensor that fills its storage, so that its form determines it."""
    if not isinstance(item, Tensor) or item.device.type != "meta":
        return False
    return item.untyped_storage().nbytes() == item.numel() * item.element_size()


def _key(value: Any) -> Any:
    """A hashable key: a tensor's form, a number with its type (1 and 1.0 are distinct)."""
    if isinstance(value, Tensor):
        return form(value)
    if isinstance(value, tuple | list):
        return tuple(_key(item) for item in value)
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in value.items())
    return (type(value), value)
