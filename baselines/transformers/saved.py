"""The storages that autograd keeps, by operator, in the order in which they were first kept.

A kept tensor is named by three things: the module whose forward runs when autograd keeps the tensor
(without the layer's number), the function of Transformers that called torch, and the torch function
that was called.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, resolve_name

LAYER = re.compile(r"(?<=layers)\.\d+")
ROPE = "apply_rotary_pos_emb"
CHECKPOINT = "checkpoint"
_called: list[str] = []
"""The names of the torch functions that are running; the innermost is the last."""


class SavedTensor(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One storage that autograd keeps, named by the operator that kept it first and by its number
    among that operator's storages (`index`). Shape and dtype are those of the kept tensor, bytes
    those of the storage. `layers`: the number of layers that keep an equal storage."""

    module: str
    function: str
    operator: str
    index: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    layers: int = 1


@contextmanager
def operator(name: str) -> Iterator[None]:
    """A context in which kept tensors are named after this operator."""
    _called.append(name)
    try:
        yield
    finally:
        _called.pop()


class _Names(TorchFunctionMode):
    """Puts the name of the torch function that runs into `_called`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _called:
            return func(*args, **(kwargs or {}))
        name = resolve_name(func) or getattr(func, "__name__", str(func))
        with operator(name.rpartition(".")[2].strip("_")):
            return func(*args, **(kwargs or {}))


class Recorder:
    """A context that collects the storages that autograd keeps, except storages of `states`."""

    def __init__(self, model: nn.Module, states: Iterable[Tensor]) -> None:
        self._states = {t.untyped_storage()._cdata for t in states}
        self._found: dict[int, SavedTensor] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._modules: list[str] = []
        self._counts: Counter[tuple[str, str, str]] = Counter()
        self._model = model
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._model.named_modules():
            enters = module.register_forward_pre_hook(lambda *_, p=name: self._modules.append(p))
            leaves = module.register_forward_hook(self._left, always_call=True)
            for handle in (enters, leaves):
                self._exit.callback(handle.remove)
        self._exit.enter_context(_Names())
        self._exit.enter_context(saved_tensors_hooks(self._keep, lambda held: held))
        return self

    def __exit__(self, *raised: object) -> None:
        self._exit.close()

    def _left(self, *_: Any) -> None:
        self._modules.pop()

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._states and key not in self._found:
            self._alive.append(storage)  # while it is alive, no other storage gets its id
            place = self._modules[-1] if self._modules else ""
            function = _function()
            called = _called[-1] if _called else ""
            if not called and "checkpoint" in function:
                function, called = "", CHECKPOINT
            which = place, function, called
            self._found[key] = SavedTensor(
                module=LAYER.sub("", place),
                function=function,
                operator=called,
                index=self._counts[which],
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                nbytes=storage.nbytes(),
            )
            self._counts[which] += 1
        return tensor

    @property
    def alive_bytes(self) -> int:
        return sum(kept.nbytes for kept in self._found.values())

    def release(self) -> list[SavedTensor]:
        """Release the storages; return the kept entries, with equal entries of layers merged."""
        self._alive.clear()
        counts: dict[SavedTensor, int] = {}
        for kept in self._found.values():
            counts[kept] = counts.get(kept, 0) + 1
        return [replace(kept, layers=count) for kept, count in counts.items()]


def _function() -> str:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("transformers."):
            return frame.f_code.co_qualname
        frame = frame.f_back  # type: ignore[assignment]
    return ""
