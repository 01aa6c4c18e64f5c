"""Live bytes of a step by phase, with and without parameter gradients."""

from collections.abc import Iterable
from typing import Any, Literal

import torch
from msgspec import Struct
from torch import Tensor

from baselines.common.meter import Meter

Phase = Literal["forward", "loss", "loss_backward", "layers_backward"]
PHASES: tuple[Phase, ...] = ("forward", "loss", "loss_backward", "layers_backward")


class Peak(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The peaks of a phase in bytes: of activations, and of activations and parameter gradients
    together. `end_bytes` are the activations alive at the end of the phase."""

    phase: Phase
    activation_bytes: int
    with_gradients_bytes: int
    end_bytes: int


class Phases(Meter):  # type: ignore[no-untyped-call]
    """A meter that records every allocation and release of a storage. It learns that a storage is a
    parameter's gradient only when autograd delivers the gradient (`gradients`)."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Phase = "forward"
        self._events: list[tuple[Phase, int, int]] = []
        self._births: dict[int, int] = {}
        self._gradients: set[int] = set()

    def gradients(self, tensors: Iterable[Tensor]) -> None:
        """Record that these live storages are gradients, from their allocation on."""
        self._gradients |= {self._births[t.untyped_storage()._cdata] for t in tensors}

    def peaks(self) -> tuple[Peak, ...]:
        found = []
        live = whole = 0
        for phase in PHASES:
            top, top_whole = live, whole
            for _, birth, nbytes in (e for e in self._events if e[0] == phase):
                whole += nbytes
                live += 0 if birth in self._gradients else nbytes
                top, top_whole = max(top, live), max(top_whole, whole)
            found.append(
                Peak(
                    phase=phase,
                    activation_bytes=top,
                    with_gradients_bytes=top_whole,
                    end_bytes=live,
                )
            )
        return tuple(found)

    def _register(self, storage: torch.UntypedStorage, *, host: bool = False) -> None:
        known = storage._cdata in self._known
        super()._register(storage, host=host)
        if not known and storage._cdata in self._known:
            self._births[storage._cdata] = len(self._events)
            self._events.append((self.phase, len(self._events), storage.nbytes()))

    def _remove(self, key: int) -> None:
        if key in self._known:
            birth = self._births.pop(key)
            self._events.append((self.phase, birth, -self._events[birth][2]))
        super()._remove(key)

    def update_size(self, storage: torch.UntypedStorage) -> None:
        """Fail: Transformers resizes no storage in a step, and this meter could not count it."""
        raise AssertionError(f"a storage was resized to {storage.nbytes()} bytes")


def watch_ends(model: Any, meter: Phases) -> None:
    """Make hooks on the output projection set the phase: `loss` starts when the projection has run,
    and `layers_backward` when the projection's input has a gradient."""

    def run(_: Any, args: tuple[Tensor, ...], __: Tensor) -> None:
        meter.phase = "loss"
        mark = args[0].register_hook
        mark(lambda _: setattr(meter, "phase", "layers_backward"))  # type: ignore[no-untyped-call]

    model.get_output_embeddings().register_forward_hook(run)
