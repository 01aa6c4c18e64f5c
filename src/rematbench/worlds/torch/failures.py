"""The status that an exception of a rank gives its job: out of memory, not a number, or failed."""

from typing import Literal

import torch

FULL = (
    "can't allocate memory",  # torch's CPU allocator
    "CUDA error: out of memory",  # the driver: pinned memory, a context
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",  # NCCL's buffers
)
"""Texts of RuntimeErrors that mean out of memory."""


class NotFinite(ArithmeticError):
    """A loss that is NaN or infinite."""


def failure(error: BaseException) -> tuple[Literal["oom", "nan", "failed"], str]:
    """The status and the reason of an error; an executor's error is judged by its cause."""
    cause = error.__cause__ or error
    full = any(words in str(cause) for words in FULL)
    reason = f"{type(error).__name__}: {error}"
    if full or isinstance(cause, (torch.OutOfMemoryError, MemoryError)):
        return "oom", reason
    return "nan" if isinstance(error, NotFinite) else "failed", reason
