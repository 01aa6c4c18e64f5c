"""Facts of a node before it runs a cell: memory, limits, NUMA nodes, and rates of a canary."""

import os
import platform
import resource
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from rematbench.host.memory import cgroup_limit, cpu_set, meminfo

MEMORY_SLACK = 0.05
"""Share of a node's memory that the operating system needs: pinned bytes must fit into the rest."""
SLOW = 0.8
"""A device with a rate below this share of the median of all devices is named slow."""


class NodeFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts of one host of an allocation.  A limit of -1 bytes is no limit.  `torch_gpus`: the
    number of GPUs that torch sees; -1 where they are not counted."""

    host: str
    kernel: str
    memory_bytes: int
    available_bytes: int
    cgroup_bytes: int
    memlock_bytes: int
    cpus: int
    numa_nodes: int
    numa_cpus: dict[str, int] = {}
    gpu_numa: dict[str, int] = {}
    canary: list[dict[str, float | str]] = []
    torch: str = ""
    torch_gpus: int = -1


def node_facts(canary_s: float = 0.0, *, count_gpus: bool = False) -> NodeFacts:
    """Facts of this host.  Where torch is installed, a canary of `canary_s` seconds measures its
    rates.  `count_gpus`: count the GPUs that torch sees."""
    cpus = os.sched_getaffinity(0)
    nodes = _numa_nodes()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    info = meminfo()
    return NodeFacts(
        host=socket.gethostname(),
        kernel=platform.release(),
        memory_bytes=info.get("MemTotal", 0),
        available_bytes=info.get("MemAvailable", 0),
        cgroup_bytes=cgroup_limit(),
        memlock_bytes=-1 if soft == resource.RLIM_INFINITY else soft,
        cpus=len(cpus),
        numa_nodes=len(nodes),
        numa_cpus={name: len(found & cpus) for name, found in nodes.items()},
        gpu_numa=_gpu_numa(),
        canary=_canary(canary_s),
        **(_torch_gpus() if count_gpus else {}),
    )


def _torch_gpus() -> dict[str, Any]:
    try:
        from rematbench.worlds.torch.canary import gpus_seen  # noqa: PLC0415  # torch is optional
    except ImportError:
        return {"torch": "(not installed)", "torch_gpus": 0}
    version, count = gpus_seen()
    return {"torch": version, "torch_gpus": count}


def _canary(seconds: float) -> list[dict[str, float | str]]:
    if seconds <= 0:
        return []
    try:
        from rematbench.worlds.torch.canary import canary  # noqa: PLC0415  # torch is optional
    except ImportError:
        return []
    return canary(seconds)


def _numa_nodes() -> dict[str, set[int]]:
    found = {}
    for path in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
        try:
            found[path.name] = cpu_set((path / "cpulist").read_text(encoding="ascii"))
        except OSError:
            continue
    return found


def _gpu_numa() -> dict[str, int]:
    """The NUMA node of every NVIDIA display controller, by PCI address."""
    found = {}
    for path in sorted(Path("/sys/bus/pci/devices").glob("*")):
        try:
            vendor = (path / "vendor").read_text(encoding="ascii").strip()
            kind = (path / "class").read_text(encoding="ascii").strip()
            if vendor == "0x10de" and kind.startswith("0x03"):
                found[path.name] = int((path / "numa_node").read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return found


def shortages(facts: NodeFacts, pinned_bytes: int, gpus: int = 0) -> list[str]:
    """Reasons not to start a cell on a node: the node cannot hold the predicted pinned bytes, or
    torch sees fewer than `gpus` GPUs (without CUDA a cell would run on CPUs for hours)."""
    found = []
    if 0 <= facts.torch_gpus < gpus:
        sees = f"torch {facts.torch} sees {facts.torch_gpus} of {gpus} GPUs"
        found.append(f"{facts.host}: {sees} that the job asked for")
    room = {
        "memory": int(facts.memory_bytes * (1 - MEMORY_SLACK)),
        "cgroup limit": facts.cgroup_bytes,
    }
    found += [
        _short(facts, name, limit, pinned_bytes)
        for name, limit in room.items()
        if 0 <= limit < pinned_bytes
    ]
    return found


def oddities(nodes: Sequence[NodeFacts], pinned_bytes: int = 0) -> list[str]:
    """Remarks on nodes that stop no cell: a slow device, a GPU on a NUMA node without CPUs,
    `ulimit -l` below the pinned bytes (CUDA ignores that limit, RDMA libraries do not)."""
    found = [
        _short(node, "ulimit -l", node.memlock_bytes, pinned_bytes)
        for node in nodes
        if 0 <= node.memlock_bytes < pinned_bytes
    ]
    for key in ("gemm_flop_per_s", "h2d_bytes_per_s", "d2h_bytes_per_s"):
        rates = [(float(c[key]), n.host, c["device"]) for n in nodes for c in n.canary if key in c]
        median = sorted(rate for rate, *_ in rates)[len(rates) // 2] if rates else 0.0
        for rate, host, device in rates:
            if rate < SLOW * median:
                share = 100 * rate / median
                found.append(f"{host}: {device}: {key} is {share:.0f} % of the median")
    for node in nodes:
        for gpu, number in node.gpu_numa.items():
            if node.numa_cpus.get(f"node{number}", 1) == 0:
                found.append(f"{node.host}: no CPU of NUMA node {number}, where GPU {gpu} is")
    return found


def _short(facts: NodeFacts, name: str, limit: int, pinned_bytes: int) -> str:
    return (
        f"{facts.host}: {name} {_gib(limit)} GiB is less than the predicted {_gib(pinned_bytes)} "
        "GiB of pinned memory per node"
    )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f}"
