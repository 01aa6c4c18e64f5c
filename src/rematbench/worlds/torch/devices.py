"""The device of a rank on its host, the CPUs near the device, and pinned memory."""

import contextlib
import os
from pathlib import Path
from typing import Any

import torch

from rematbench.host.memory import cpu_set


def gpu_count() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def prepare(kind: str) -> None:
    """Set the environment variables that CUDA or oneDNN reads when a process first uses it.

    CUDA gets the maximum number of hardware queues: streams that share a queue wait for each other,
    and a kernel that waits for a peer must not block other streams. cuBLAS gets workspaces of one
    size per stream, because it is not deterministic otherwise. On a CPU AMX is off: the rounding of
    AMX's bf16 products depends on the number of rows, so the gradients of a plan that splits rows
    would differ by more than the bound.
    """
    if kind == "cpu":
        os.putenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
    else:
        os.putenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


PINNED_CACHE_KEY = "pinned_max_cached_size_mb"
SEGMENTS_KEY = "expandable_segments"


def allocator_settings() -> str:
    """The settings that torch's allocators use now. Empty if torch does not report them."""
    try:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
    except (AttributeError, KeyError):
        return ""
    return str(settings.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def pin_requested_size() -> None:
    """Make torch pin large blocks of the requested size, if torch supports this.

    Otherwise torch pins the next power of two, up to twice the offloaded bytes. torch unpins such a
    block when it is freed, so only a pool that keeps its blocks benefits.
    """
    settings = allocator_settings()
    if PINNED_CACHE_KEY not in settings:
        with contextlib.suppress(RuntimeError, ValueError):  # this torch may not know the key
            _set(settings, f"{PINNED_CACHE_KEY}:1")


def set_expandable_segments(*, expandable: bool) -> None:
    """Turn expandable segments of torch's allocator on or off, as in the stack; RuntimeError if
    torch does not support this. Existing allocations stay in place."""
    settings = [word for word in allocator_settings().split(",") if word]
    others = [word for word in settings if not word.startswith(SEGMENTS_KEY)]
    if not expandable and others == settings:
        return
    word = f"{SEGMENTS_KEY}:{expandable}"
    try:
        done = _set(",".join(others), word)
    except ValueError:  # torch 2.11 reports a key among its settings that it refuses
        known = (one for one in others if not one.startswith(PINNED_CACHE_KEY))
        done = _set(",".join(known), word)
    if not done:
        raise RuntimeError(
            f"torch {torch.__version__} cannot set {SEGMENTS_KEY} in a running process"
        )


def _set(settings: str, word: str) -> bool:
    """Add a setting of torch's allocators to the given settings, because a call resets all
    settings that it does not name.  Return whether torch has the call."""
    setting = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setting is None:
        return False
    setting(",".join(one for one in (settings, word) if one))
    return True


def release_pinned() -> None:
    own = getattr(torch._C, "_host_emptyCache", None)  # torch before 2.12 has it
    give_back = getattr(torch.accelerator, "empty_host_cache", own)
    if give_back is not None:
        give_back()


def pinned_peak() -> int:
    """Peak bytes that torch has pinned since the last reset; 0 if it does not report them."""
    stats = getattr(torch.cuda, "host_memory_stats", None)
    return int(stats().get("allocated_bytes.peak", 0)) if stats is not None else 0


def limit_memory(device: torch.device, nbytes: int) -> None:
    """Let torch's allocator reserve at most `nbytes` on a GPU, so that a job runs out of memory as
    it would on a smaller device."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, nbytes / total), device)


def reset_peaks(device: torch.device | None = None) -> None:
    torch.cuda.reset_peak_memory_stats(device)
    if pinned_peak():
        torch.cuda.reset_peak_host_memory_stats()


def prepared_device(kind: str, rank: int) -> torch.device:
    """`choose_device` in a process that has not used CUDA yet."""
    prepare(kind)
    return choose_device(kind, rank)


def choose_device(kind: str, rank: int) -> torch.device:
    """The CPU, or the GPU of a rank on its host, with the process bound to CPUs near that GPU. A
    launcher may make only one GPU visible to each process, so ranks count modulo the visible
    GPUs."""
    if kind == "cpu":
        return torch.device("cpu")
    require_gpus(kind, 1)
    device = torch.device(kind, rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    bind_to_numa_node(device)
    return device


def smi_name() -> str:
    """The current GPU as nvidia-smi names it: its UUID, or its number if torch reports no UUID."""
    number = torch.cuda.current_device()
    found = getattr(torch.cuda.get_device_properties(number), "uuid", None)
    return f"GPU-{found}" if found else str(number)


def require_gpus(kind: str, ranks: int) -> None:
    """RuntimeError if there are fewer visible GPUs than ranks: NCCL cannot share a GPU."""
    if kind != "cpu" and ranks > torch.cuda.device_count():
        found = torch.cuda.device_count()
        raise RuntimeError(f"{ranks} ranks need one GPU each, but this host has {found}")


def bind_to_numa_node(device: torch.device, system: Path = Path("/sys")) -> int:
    """Bind this process to the CPUs that it may use on its GPU's NUMA node. Return the number of
    the node, or -1 if torch or the kernel (its files under `system`) does not report the node."""
    found = torch.cuda.get_device_properties(device)
    place: list[Any] = [
        getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    if None in place:  # This version of torch does not report the PCI address.
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
