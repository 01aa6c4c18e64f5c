"""Draws the whole weights of a model in threads, before they are used."""

import os
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod

import torch
from torch import Tensor

from rematbench.worlds.torch.parameters import ParameterSpec, full_weight

MAX_THREADS = 16
READY_BYTES = 4 << 30
"""Bytes of weights that may be drawn before their use; a larger weight is drawn alone."""


def drawing_threads(device: torch.device) -> int:
    """The number of threads that draw weights. With GPUs, each rank gets its share of this
    process's CPUs. Otherwise it is one thread, because all ranks share the memory and
    `rank_processes.initialization_bytes` counts one draw per rank."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    share = len(os.sched_getaffinity(0)) // gpus if gpus else 1
    return max(1, min(MAX_THREADS, share))


class Draws:
    def __init__(self, specs: Iterable[ParameterSpec], seed: int, threads: int) -> None:
        self._left = deque(specs)
        self._seed, self._threads = seed, threads
        self._pool = ThreadPoolExecutor(threads)
        self._ready: deque[tuple[ParameterSpec, Future[Tensor]]] = deque()
        self._begin()

    def _begin(self) -> None:
        """Start draws while threads and memory allow; end the threads after the last draw."""
        room = READY_BYTES - sum(_nbytes(spec) for spec, _ in self._ready)
        while self._left and len(self._ready) < self._threads:
            room -= _nbytes(self._left[0])
            if self._ready and room < 0:
                return
            spec = self._left.popleft()
            drawn = self._pool.submit(full_weight, spec, self._seed)
            self._ready.append((spec, drawn))
        if not self._left:
            self._pool.shutdown(wait=False)

    def take(self, spec: ParameterSpec) -> Tensor:
        """The next parameter, whole and in float64; ValueError if this is not `spec`."""
        first, drawn = self._ready.popleft()
        if first.name != spec.name:
            raise ValueError(f"{spec.name} is taken before {first.name}")
        full = drawn.result()
        self._begin()
        return full


def _nbytes(spec: ParameterSpec) -> int:
    return prod(spec.shape) * torch.float64.itemsize
