"""Live bytes of a step without states, counted by the project's own tracker of storages."""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

from rematbench.worlds.torch.dispatch import Tracker


class Meter(Tracker):
    """A tracker that also records the host's peak, and counts offloaded storages as host bytes.
    Offloaded are storages that a function wrapped by `host` returns, storages of tensors for which
    `is_host` returns true, and, if the device is a GPU, all storages on the CPU."""

    counting: ClassVar["Meter | None"] = None

    def __init__(
        self, is_host: Callable[[Tensor], bool] | None = None, device: torch.device | None = None
    ) -> None:
        super().__init__(device)
        self.host_peak_bytes = 0
        self._host_test = is_host
        self._looking_away = False

    def states(self, tensors: Iterable[Tensor]) -> int:
        """Stop counting these storages; return their bytes on the device."""
        return self.homes(tensors)[0]

    def homes(self, tensors: Iterable[Tensor]) -> tuple[int, int]:
        """Stop counting these storages; return their bytes on (device, host)."""
        kept = {t.untyped_storage()._cdata: t for t in tensors}
        self.exclude(kept.values())
        sizes = [0, 0]
        for tensor in kept.values():
            sizes[self._is_host(tensor)] += tensor.untyped_storage().nbytes()
        return sizes[0], sizes[1]

    def __enter__(self) -> Self:
        """Start counting; a storage that is resized in place is counted with its new size."""
        plain = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = plain(storage, size)
            self.update_size(storage)
            return result

        self._plain_resize = plain
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        Meter.counting = self
        return self

    def __exit__(self, *raised: Any) -> None:
        Meter.counting = None
        torch.UntypedStorage.resize_ = self._plain_resize  # type: ignore[method-assign]
        super().__exit__(*raised)  # type: ignore[no-untyped-call]

    def without(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A function that calls `call` without counting the storages made inside it. Collectives
        make copies on some backends (gloo's reduce-scatter does, NCCL's does not)."""

        def called(*args: Any, **kwargs: Any) -> Any:
            before, self._looking_away = self._looking_away, True
            try:
                return call(*args, **kwargs)
            finally:
                self._looking_away = before

        return called

    def _register(self, storage: torch.UntypedStorage, *, host: bool = False) -> None:
        if not self._looking_away:
            super()._register(storage, host=host)
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def _is_host(self, tensor: Tensor) -> bool:
        offloaded = self._host_test is not None and self._host_test(tensor)
        return offloaded or super()._is_host(tensor)

    def host(self, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """A function that calls `make` and counts its results as host memory."""

        def made(*args: Any, **kwargs: Any) -> Tensor:
            with self.on_host():
                return make(*args, **kwargs)

        return made


def as_kernel(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `call` and counts only its results, not its temporaries, because on a
    GPU a compiler turns `call` into a single kernel."""

    @wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        meter = Meter.counting
        if meter is None:
            return call(*args, **kwargs)
        result = meter.without(call)(*args, **kwargs)
        for item in tree_iter(result):
            if isinstance(item, Tensor):
                meter.register(item)
        return result

    return called
