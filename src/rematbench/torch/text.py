"""Real text that every machine has, for convergence runs: the standard library's sources."""

import hashlib
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from rematbench.torch.batch import Batch


def standard_library(limit_bytes: int) -> tuple[Tensor, str]:
    """Bytes of the standard library's top-level modules in order of name, and a hash of the text.
    There are `limit_bytes` bytes at most."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = bytearray()
    for path in sorted(folder.glob("*.py")):
        found += path.read_bytes()
        if len(found) >= limit_bytes:
            break
    text = bytes(found[:limit_bytes])
    return torch.frombuffer(bytearray(text), dtype=torch.uint8), hashlib.sha256(text).hexdigest()


def text_batch(text: Tensor, shape: tuple[int, int], seed: int, step: int) -> Batch:
    """The sequences of a step at random places of the text, the same for every layout."""
    sequences, seq_len = shape
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    starts = torch.randint(len(text) - seq_len - 1, (sequences,), generator=generator)
    rows = torch.stack([text[start : start + seq_len + 1] for start in starts.tolist()]).long()
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].clone())
