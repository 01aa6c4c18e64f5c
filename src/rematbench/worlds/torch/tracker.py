"""Live bytes of torch's storages, counted from their creation until torch frees them.

The tracker knows no plan and no action. A dispatch mode sees the outputs of every torch operator
and holds each new storage by a weak reference, whose callback subtracts the storage's bytes.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from rematbench.worlds.torch.mode import Mode


class Tracker(Mode):
    """Counts the storages that are made while it is active.

    `exclude`: storages that are states (parameters, gradients, optimizer, inputs), made before or
    inside; `on_host`: storages of the host pool, which count as host bytes. With a GPU as the
    device, storages on the CPU are host bytes; of a pool that keeps its blocks only the lent bytes
    count (`lend`).
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
        self._states: list[torch.UntypedStorage] = []

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Never count these storages; they are kept alive, so that no other storage gets their
        id."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._forget(key)
            if key not in self._excluded:
                self._excluded.add(key)
                self._states.append(storage)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Count storages made inside as host bytes, because device storages may be on the CPU
        too."""
        self._all_host = True
        try:
            yield
        finally:
            self._all_host = False

    def lend(self, nbytes: int) -> None:
        """Add host bytes of an excluded pool that are now in use (negative: no longer in use)."""
        self.host_bytes += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, then register the storages of its outputs."""
        result = func(*args, **(kwargs or {}))
        for item in tree_iter(result):
            if isinstance(item, Tensor):
                self.see(item)
        return result

    def forget(self) -> None:
        """Release the excluded storages."""
        self._states.clear()
        self._excluded.clear()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Count the change of a storage's size since the tracker saw the storage."""
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            return
        before, host = self._sizes[key]
        self._sizes[key] = (size, host)
        self._count(size - before, host=host)

    def see(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, if the storage is new."""
        self._see(tensor.untyped_storage(), host=self._is_host(tensor))

    def _is_host(self, tensor: Tensor) -> bool:
        """Whether the storage of a tensor counts as host bytes."""
        return self._all_host or (self._apart and tensor.device.type == "cpu")

    def _see(self, storage: torch.UntypedStorage, *, host: bool = False) -> None:
        key = storage._cdata
        if key in self._excluded or key in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        self._sizes[key] = (nbytes, host)
        self._count(nbytes, host=host)

    def _forget(self, key: int) -> None:
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
