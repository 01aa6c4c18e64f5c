"""A job of one or two cases, in processes started here or by a launcher (torchrun, srun)."""

import platform
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rematbench.worlds.torch.case import Case, RankResult, Result, Status
from rematbench.worlds.torch.devices import choose_device, prepare
from rematbench.worlds.torch.failures import failure
from rematbench.worlds.torch.gather import combine
from rematbench.worlds.torch.groups import Groups, default_backend
from rematbench.worlds.torch.hostroom import too_large
from rematbench.worlds.torch.launch import execute_cases
from rematbench.worlds.torch.model import NotExecutable, require_executable
from rematbench.worlds.torch.worker import run_case


@dataclass(frozen=True)
class Given:
    """A process that a launcher started. It has a rank among `world_size` processes, a local rank
    on its host, and the address and port where the processes meet."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int


LOOK_UP_S = 10.0
"""Seconds that a host name may stay unknown: a job's first host may be registered late."""


class NotMet(RuntimeError):
    """The processes of a launcher have not found each other; the message is one line."""


def versions(device: str) -> dict[str, str]:
    """The software versions and the name of the device, for a record."""
    made, name = str(torch.__version__), f"cpu ({platform.machine()})"
    if device == "cuda":
        name = torch.cuda.get_device_name() if has_gpu() else "cuda (none that torch can use)"
    if device == "cuda" and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        made = f"{made} (CUDA {torch.version.cuda}, NCCL {nccl})"
    return {"torch": made, "device": name}


def device_kind(asked: str) -> str:
    """The device that was asked for, else cuda where torch has a GPU, else cpu."""
    prepare(asked or "cuda")  # before torch looks for a GPU
    return asked or ("cuda" if has_gpu() else "cpu")


def has_gpu() -> bool:
    """Whether torch can use a GPU here."""
    return torch.cuda.is_available()


def refused(case: Case) -> str:
    """Why the runtime does not execute a case, found before any process starts; else empty."""
    try:
        require_executable(case.problem, case.plan)
    except NotExecutable as error:
        return str(error)
    return ""


def run_own(cases: list[Case], timeout_s: float) -> list[Result]:
    """Run the cases in processes started here, one per GPU of the layout. A case that needs more
    memory than this machine has is not run; its status is `oom`."""
    full = {
        number: why
        for number, case in enumerate(cases)
        if not refused(case) and (why := too_large(case))
    }
    fitting = [case for number, case in enumerate(cases) if number not in full]
    done = iter(execute_cases(fitting, timeout_s=timeout_s) if fitting else [])
    return [
        Result(name=case.name, status="oom", reason=full[number]) if number in full else next(done)
        for number, case in enumerate(cases)
    ]


def run_given(
    cases: list[Case], given: Given, timeout_s: float
) -> tuple[list[Result], tuple[int, ...]]:
    """Run the cases in a process that a launcher started. The result has the cases' results on rank
    0 (empty elsewhere), and how many ranks each host has. A case that fails here ends this process;
    the launcher ends the others. NotMet if not all processes join."""
    torch.set_num_threads(1)
    prepare(cases[0].device)
    device = choose_device(cases[0].device, given.local_rank)
    _meet(given, default_backend(device), timeout_s)
    clean = False
    try:
        talk = dist.new_group(backend="gloo")
        hosts = _gathered(socket.gethostname(), given, talk)
        known: dict[tuple[object, ...], Groups] = {}
        results: list[Result] = []
        for case in cases:
            result = _one(case, given, device, known, talk)
            if result is not None:
                results.append(result)
                if result.status != "ok":  # other ranks may still be inside the failed case
                    break
        else:
            clean = True
        counts = tuple(hosts.count(name) for name in dict.fromkeys(hosts))
        return results, counts
    finally:
        _leave(device, clean=clean)


def _meet(given: Given, backend: str, timeout_s: float) -> None:
    where = f"{given.address}:{given.port}"
    _look_up(given.address, min(timeout_s, LOOK_UP_S))
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{where}",
            rank=given.rank,
            world_size=given.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except Exception as error:  # torch's, gloo's and NCCL's errors have no common class
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise NotMet(
            f"rank {given.rank} has not met the others of {given.world_size} processes at {where} "
            f"(MASTER_ADDR, MASTER_PORT) within {timeout_s:g} s: {why}"
        ) from error


def _look_up(address: str, patience_s: float) -> None:
    """NotMet if no host has the name; without this check torch would retry until its timeout."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise NotMet(f"MASTER_ADDR {address}: no such host ({error.strerror})") from error
            time.sleep(0.2)


def _leave(device: torch.device, *, clean: bool) -> None:
    """Destroy the communicators, or abort them after a failure. NCCL's kernels may then wait for a
    peer for ever, and destroying a communicator waits for its kernels."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if device.type == "cuda" and not clean and abort is not None:
        abort()
    else:
        dist.destroy_process_group()


def _one(
    case: Case,
    given: Given,
    device: torch.device,
    known: dict[tuple[object, ...], Groups],
    talk: dist.ProcessGroup,
) -> Result | None:
    """Run a case on this rank; the case's result on rank 0, else None. Ranks that fail alike (NaN,
    refused) all return a result; where one rank fails alone, the others end at the timeout."""
    own: RankResult | tuple[Status, str]
    try:
        own = run_case(case, given.rank, device, known)
    except Exception as error:
        status, reason = failure(error)
        own = (status, f"rank {given.rank}: {reason}")
        if given.rank != 0:
            raise
    if isinstance(own, tuple):
        return Result(name=case.name, status=own[0], reason=own[1])
    ranks = _gathered(own, given, talk)
    return combine(case, ranks) if given.rank == 0 else None


def _gathered(own: object, given: Given, talk: dist.ProcessGroup) -> list:  # type: ignore[type-arg]
    """The objects of every rank on rank 0, in rank order; empty elsewhere."""
    found: list[object] | None = [None] * given.world_size if given.rank == 0 else None
    dist.gather_object(own, found, dst=0, group=talk)
    return found or []
