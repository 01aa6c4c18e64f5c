"""The device of a rank on its host, and the CPUs beside it."""

import os
from pathlib import Path
from typing import Any

import torch

from rematbench.cpulist import cpu_set


def prepare(kind: str) -> None:
    """Settings that CUDA reads once, when a process first uses it.  As many hardware queues as
    there can be: streams that share one wait for each other, and a kernel that waits for a peer
    must hold up none.  And cuBLAS workspaces of one size for each stream, without which it may
    give other bits every time."""
    if kind != "cpu":
        os.putenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        os.putenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


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
