"""The command `doctor`: the software and hardware of this machine, and a cluster file for it."""

import importlib.util
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rematbench.cli.targets import need_file
from rematbench.host.console import CommandError, align_left, console, grid
from rematbench.host.gpu_state import query_smi
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.load import calibration, load_cluster, names
from rematbench.plugins.discover import discover

PACKAGES = ("rematbench", "numpy", "scipy", "pandas", "msgspec", "snakemake", "matplotlib")
OUTPUT = Annotated[
    Path | None,
    typer.Option("--write", metavar="FILE.yaml", help="Write a cluster file for this machine."),
]
FORCE = Annotated[bool, typer.Option("--force", help="Overwrite FILE.yaml if it exists.")]


def doctor(write: OUTPUT = None, force: FORCE = False) -> None:
    """Show the software, hardware and usable worlds of this machine; write a cluster file for it.

    \b
    Example:
      rematbench doctor
      rematbench doctor --write my-cluster.yaml
    """
    if write is not None and write.exists() and not force:
        raise CommandError(f"--write: {write} exists; add --force to overwrite it")
    need_file("--write", write)
    out = console()
    out.print(_facts())
    if write is None:
        return
    gpus = nvidia_gpus()
    write.write_text(cluster_yaml(write.stem, gpus), encoding="utf-8")
    out.print(f"wrote {write}: check every number marked CHECK, then use --cluster {write}")


def _facts() -> Table:
    table = align_left(grid("item", "on this machine"), 1)
    table.add_row("python", f"{platform.python_version()} on {platform.system()}")
    for package in PACKAGES:
        table.add_row(package, _version(package))
    table.add_row("CPU", f"{cpu_name()}, {os.cpu_count()} logical cores")
    table.add_row("host memory", f"{host_bytes() / 2**30:.1f} GiB")
    gpus = nvidia_gpus()
    table.add_row("GPUs", f"{len(gpus)} x {gpus[0][0]}" if gpus else "nvidia-smi lists no GPU")
    found = discover()
    table.add_row("methods", ", ".join(found.methods) or "none")
    for path, reason in found.broken.items():
        table.add_row("broken method", f"{path}: {reason}")
    torch = importlib.util.find_spec("torch") is not None
    real = "traced, executed (gloo on CPUs, NCCL on GPUs)" if torch else "others need torch"
    table.add_row("worlds", f"published, simulated; {real}")
    counted = ", ".join(f"{len(names(kind))} {kind}s" for kind in ("model", "cluster", "system"))
    table.add_row("config", counted)
    return table


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def host_bytes() -> int:
    """Physical memory of this machine in bytes; 0 where the system does not report it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):  # the system is not POSIX
        return 0


def nvidia_gpus() -> list[tuple[str, int]]:
    """(name, bytes) of every GPU that nvidia-smi lists."""
    found = query_smi(["name", "memory.total"], timeout_s=20.0)
    lines = [line.rpartition(",") for line in found.splitlines() if "," in line]
    return [(name.strip(), int(float(mib)) << 20) for name, _, mib in lines]


def _alike(gpu: str, hbm: int) -> tuple[Cluster, str]:
    """The shipped cluster of this GPU with the nearest memory, and its generation, with a CHECK
    if its rates are assumed (`roofline`).  If no shipped file has this GPU: an H100 cluster, whose
    numbers must be replaced, and a CHECK."""
    words = tuple(re.split(r"[\s-]", gpu))
    known = [load_cluster(name) for name in names("cluster")]
    alike = [c for c in known if any(word.endswith(c.gpu.partition("-")[0]) for word in words)]
    if not alike:
        choice = ", ".join(calibration().gpus)
        return load_cluster("h100-80gb"), f"CHECK  # its name; config/calibration.yaml has {choice}"
    nearest = min(alike, key=lambda cluster: abs(cluster.hbm_bytes - hbm))
    doubt = f"  # CHECK: no rates of {nearest.gpu} are published" if nearest.roofline else ""
    return nearest, f"{nearest.generation}{doubt}"


def cluster_yaml(name: str, gpus: list[tuple[str, int]]) -> str:
    """The text of a complete cluster file: numbers of this machine, and data-sheet numbers marked
    CHECK."""
    gpu, hbm = gpus[0] if gpus else ("H100-SXM5-80GB", 85_520_809_984)
    found = (
        "nvidia-smi on this machine"
        if gpus
        else "CHECK: this machine has no GPU; assumes an 80 GB H100"
    )
    alike, generation = _alike(gpu, hbm)
    sheet = "CHECK: NVIDIA data sheet of this generation"
    host = host_bytes() if gpus else 1_000_000_000_000
    entries = [
        ("peak_flop_per_s", f"{alike.peak_flop_per_s:.4g}", f"{sheet}, dense bf16"),
        ("hbm_bytes", hbm, found),
        ("hbm_bytes_per_s", f"{alike.hbm_bytes_per_s:.3g}", sheet),
        ("gpus_per_node", len(gpus) or 8, found),
        ("nvlink_bytes_per_s", f"{alike.nvlink_bytes_per_s:.3g}", f"{sheet}, one direction"),
        ("nics_per_node", 8, "CHECK: one NIC for each GPU"),
        ("nic_bytes_per_s", "5.0e10", "CHECK: 400 Gbps each"),
        ("pcie_bytes_per_s", f"{alike.pcie_bytes_per_s:.3g}", "CHECK: PCIe x16, one direction"),
        ("pcie_gpus_per_link", 1, "CHECK: no two GPUs share a host link"),
        ("numa_nodes", 2, "CHECK: two sockets"),
        ("host_bytes", host, "this machine" if gpus else "CHECK: 1 TB a node"),
    ]
    lines = [
        "# Written by `rematbench doctor --write`.  Confirm every CHECK and cite its source.",
        f"name: {name}",
        f"gpu: {gpu.replace(' ', '-')}",
        f"generation: {generation}",
    ]
    for key, value, source in entries:
        lines += [f"{key}:", f"  value: {value}", f'  source: "{source}"']
    return "\n".join(lines) + "\n"
