"""One process of a torchrun launch: joins the others and runs one case with them.

torchrun (static rendezvous, ranks in node order) gave each process its rank and the address of
rank 0 by the usual variables, which torch.distributed reads itself.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from rematbench.cpulist import cpu_set
from rematbench.discover import Composition
from rematbench.plan import Plan, Unsupported
from rematbench.problem import Problem
from rematbench.torch.case import Case, RankResult, Result
from rematbench.torch.gather import combine
from rematbench.torch.groups import default_backend
from rematbench.torch.model import NotExecutable, require_executable
from rematbench.torch.worker import NotFinite, run_case


def execute_joined(
    problem: Problem,
    method: Composition,
    base: Plan,
    *,
    steps: int,
    folder: Path,
    timeout_s: float,
) -> dict[str, Any] | None:
    """The record of a method on a problem, on rank 0; None on the others.  A rank that fails
    leaves `folder`/error.RANK (status, then one line) and raises."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    plan = method.plan(problem, base)
    if isinstance(plan, Unsupported):
        return record_of(problem, method, _unsupported(method, plan.reason), kind)
    try:
        require_executable(problem, plan)
    except NotExecutable as error:
        return record_of(problem, method, _unsupported(method, str(error)), kind)
    case = Case(name=method.name, problem=problem, plan=plan, steps=steps, device=kind)
    result = _join(case, folder, timeout_s)
    return None if result is None else record_of(problem, method, result, kind)


def _unsupported(method: Composition, reason: str) -> Result:
    return Result(name=method.name, status="unsupported", reason=reason)


def _join(case: Case, folder: Path, timeout_s: float) -> Result | None:
    device = _device(case.device)
    dist.init_process_group(default_backend(device), timeout=timedelta(seconds=timeout_s))
    rank, size = dist.get_rank(), dist.get_world_size()
    if size != case.world_size:
        raise ValueError(f"{size} processes for a layout of {case.world_size} ranks")
    own = _told(folder / f"error.{rank}", lambda: run_case(case, rank, device, {}))
    gathered: list[RankResult | None] | None = [None] * size if rank == 0 else None
    dist.gather_object(own, gathered)  # norms, not gradients: no tensor travels
    dist.barrier()
    dist.destroy_process_group()
    return None if gathered is None else combine(case, cast(list[RankResult], gathered))


def _told(path: Path, run: Callable[[], RankResult]) -> RankResult:
    try:
        return run()
    except BaseException as error:
        status = "failed"
        if isinstance(error, torch.OutOfMemoryError):
            status = "oom"
        elif isinstance(error, NotFinite):
            status = "nan"
        line = " ".join(f"{type(error).__name__}: {error}".split())
        path.write_text(f"{status}\n{line}\n", encoding="utf-8")
        raise


def _device(kind: str) -> torch.device:
    """This process's GPU, in the order of ranks on the node, and its CPUs near that GPU."""
    if kind == "cpu":
        return torch.device("cpu")
    local = int(dist.get_node_local_rank(0))
    device = torch.device(kind, local % torch.cuda.device_count())
    torch.cuda.set_device(device)
    bind_near(device)
    return device


def bind_near(device: torch.device) -> int:
    """Bind this process to the CPUs of its GPU's NUMA node, as far as it may use them; the node's
    number, or -1 where the kernel does not say."""
    found = torch.cuda.get_device_properties(device)
    place: list[Any] = [
        getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")
    ]
    if None in place:  # a torch that does not tell
        return -1
    name = "{:04x}:{:02x}:{:02x}.0".format(*place)
    try:
        node = int(Path(f"/sys/bus/pci/devices/{name}/numa_node").read_text(encoding="ascii"))
        listing = Path(f"/sys/devices/system/node/node{node}/cpulist").read_text(encoding="ascii")
    except (OSError, ValueError):
        return -1
    near = cpu_set(listing) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
    return node


def record_of(problem: Problem, method: Composition, result: Result, kind: str) -> dict[str, Any]:
    """What a cell's record holds; seconds only where they are a performance."""
    on_gpu = kind == "cuda"
    return {
        "world": "executed",
        "method": method.name,
        "parameters": method.parameters,
        "status": result.status,
        "reason": result.reason,
        "losses": result.losses,
        "gradient_norms": result.gradient_norms,
        "peak_device_bytes": [r.device_peak_bytes + r.state_bytes for r in result.ranks],
        "peak_host_bytes": [rank.host_peak_bytes for rank in result.ranks],
        "offload_bytes": sum(rank.offload_bytes for rank in result.ranks),
        "recompute_flop": sum(rank.recompute_flop for rank in result.ranks),
        "step_s": [rank.step_s for rank in result.ranks] if on_gpu else None,
        "provenance": {
            "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        },
    }
