"""Fast meta tensors: outputs of an operator depend on shapes only, so each distinct call runs once.

A meta tensor is a fake tensor without a subclass: sizes, strides, dtype, and a storage that has a
size and an identity but no memory. Torch derives most outputs in Python, at 50 to 300 us an
operator, and a step repeats a few hundred distinct calls thousands of times. So this mode remembers
the outputs of each call and makes the outputs of equal calls directly. It remembers only operators
that return new storages and write none of their inputs; views and in-place operators always run.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rematbench.worlds.torch.mode import Mode

Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Sizes, strides and dtype: the facts from which an output can be made."""


def form(tensor: Tensor) -> Form:
    """The facts of a tensor that decide an operator's outputs."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def is_fresh(operator: Any) -> bool:
    """Whether an operator is one of torch's that returns new storages and writes no input."""
    if operator.namespace != "aten":  # collectives answer with handles, not tensors
        return False
    schema = operator._schema
    every = (*schema.arguments, *schema.returns)
    return bool(schema.returns) and all(item.alias_info is None for item in every)


class MetaMode(Mode):
    """Runs operators on meta tensors; each distinct call runs once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fresh: dict[Any, bool] = {}
        self._known: dict[Any, tuple[bool, tuple[Form, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator, or make the outputs that an equal call returned."""
        fresh = self._fresh.get(func)
        if fresh is None:
            fresh = self._fresh[func] = is_fresh(func)
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
    """Whether an item is a meta tensor that fills its storage: then its form suffices."""
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
