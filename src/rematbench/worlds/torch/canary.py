"""A node's canary: GEMMs and copies for a few seconds, to find a slow node before the run does.

A record has the rates, to compare the nodes of one allocation with each other. The rates are no
result: clocks, other jobs and a short loop distort them, and those of a CPU mean nothing.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor

COPY_BYTES = 256 << 20
SIZE = {"cuda": 8192, "cpu": 512}


def gpus_seen() -> tuple[str, int]:
    """The version of torch, and how many GPUs torch can use here."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return str(torch.__version__), count


def canary(seconds: float) -> list[dict[str, float | str]]:
    """GEMM FLOP/s and host copy bytes/s of every GPU here (or of the CPU), one GPU after another.
    The loops take about `seconds` in all: a third each for GEMMs, copies in and copies out."""
    _, count = gpus_seen()
    devices = [torch.device("cuda", number) for number in range(count)] or [torch.device("cpu")]
    share = seconds / len(devices) / 3
    return [_device(device, share) for device in devices]


def _device(device: torch.device, seconds: float) -> dict[str, float | str]:
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    size = SIZE[device.type]
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a = torch.randn(size, size, device=device, dtype=dtype)
    gemm_s = _rate(lambda: a @ a, device, seconds)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=on_gpu)
    here = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    in_s = _rate(lambda: here.copy_(there, non_blocking=True), device, seconds)
    out_s = _rate(lambda: there.copy_(here, non_blocking=True), device, seconds)
    return {
        "device": f"{name} {device.index or 0}",
        "gemm_flop_per_s": 2.0 * size**3 / gemm_s,
        "h2d_bytes_per_s": COPY_BYTES / in_s,
        "d2h_bytes_per_s": COPY_BYTES / out_s,
    }


def _rate(run: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    """Seconds of one call after a warm-up, averaged over about `seconds`."""
    run()
    _wait(device)
    start = time.perf_counter()
    calls = 0
    while calls == 0 or time.perf_counter() - start < seconds:
        for _ in range(4 if device.type == "cuda" else 1):
            run()
            calls += 1
        _wait(device)
    return (time.perf_counter() - start) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
