"""The device of a rank on its host, the CPUs beside it, its pinned memory."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from rematbench.host.cpus import cpu_set


def prepare(kind: str) -> None:
    """Settings that CUDA reads once, when a process first uses it.  As many hardware queues as
    there can be: streams that share one wait for each other, and a kernel that waits for a peer
    must hold up none.  And cuBLAS workspaces of one size for each stream, without which it may
    give other bits every time.  On a CPU no AMX: its bf16 products round otherwise for another
    number of rows, by more than the gradient law grants a plan that splits them."""
    if kind == "cpu":
        os.putenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    else:
        os.putenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


EXACT_ABOVE = "pinned_max_cached_size_mb"


def allocator_settings() -> str:
    """What was last said to torch's allocators, by the environment or by a call; empty where torch
    does not tell."""
    try:
        told = torch.cuda.memory._snapshot()["allocator_settings"]
    except (AttributeError, KeyError):
        return ""
    return str(told.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def pin_exactly() -> None:
    """Large pinned blocks in the size that is asked for, where torch can: otherwise it takes the
    next power of two, and the host lends up to twice what is offloaded.  Such a block is given back
    when it is freed, so this is for a pool that keeps its own.  What was set is said again, since
    torch forgets what a call does not say."""
    setting = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    given = allocator_settings() if setting is not None else ""
    if setting is None or EXACT_ABOVE in given:
        return
    with contextlib.suppress(RuntimeError, ValueError):  # a torch that does not know it
        setting(",".join(word for word in (given, f"{EXACT_ABOVE}:1") if word))


def empty_pinned() -> None:
    """Give pinned memory that nobody holds back to the host, where torch can."""
    give_back = getattr(torch.accelerator, "empty_host_cache", None)
    if give_back is not None:
        give_back()


def pinned_peak() -> int:
    """Bytes of pinned memory that torch has held at most since its peaks were forgotten, as large
    as it takes them from CUDA; 0 where it does not say."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return int(stats().get("allocated_bytes.peak", 0)) if stats is not None else 0


def forget_peaks(device: torch.device | None = None) -> None:
    """Let the allocators' peaks begin anew."""
    torch.cuda.reset_peak_memory_stats(device)
    if pinned_peak():
        torch.cuda.reset_peak_host_memory_stats()


def prepared_device(kind: str, rank: int) -> torch.device:
    """`choose_device` in a process that has not used CUDA yet."""
    prepare(kind)
    return choose_device(kind, rank)


def choose_device(kind: str, rank: int) -> torch.device:
    """The CPU, or the GPU of a rank on its host; the process then runs near that GPU.

    A launcher may show each of its processes one GPU only, so ranks count around those seen.
    """
    if kind == "cpu":
        return torch.device("cpu")
    require_gpus(kind, 1)
    device = torch.device(kind, rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    bind_near(device)
    return device


def require_gpus(kind: str, ranks: int) -> None:
    """RuntimeError where ranks that see the same GPUs are more than these: NCCL lets no two ranks
    share one."""
    if kind != "cpu" and ranks > torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise RuntimeError(f"{ranks} ranks need a GPU each, and this host has {found}")


def bind_near(device: torch.device, system: Path = Path("/sys")) -> int:
    """Bind this process to the CPUs of its GPU's NUMA node, as far as it may use them; the node's
    number, or -1 where the kernel (its `system` files) does not say."""
    found = torch.cuda.get_device_properties(device)
    place: list[Any] = [
        getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    if None in place:  # a torch that does not tell
        return -1
    name = "{:04x}:{:02x}:{:02x}.0".format(*place)
    try:
        node = int((system / f"bus/pci/devices/{name}/numa_node").read_text(encoding="ascii"))
        place_of = system / f"devices/system/node/node{node}/cpulist"
        near = cpu_set(place_of.read_text(encoding="ascii")) & os.sched_getaffinity(0)
    except (OSError, ValueError):
        return -1
    if near:
        os.sched_setaffinity(0, near)
    return node
