"""A job of one or two cases, in processes started here or by a launcher (torchrun, srun).

One launch runs a list of cases of one world size. If a case dies, hangs or is wrong, it gets a
status and a reason, the launch ends its processes, and a new launch runs the remaining cases.

On a GPU without free memory an allocation raises an error. A host without free memory kills a
process, and not always the one that requested too much. So a job that cannot fit into host memory
is not started.
"""

import platform
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Literal, cast

import torch
import torch.distributed as dist

from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.host.files import scratch
from rematbench.host.memory import free_bytes
from rematbench.host.ranks import error_of_job, run_ranks
from rematbench.host.workers import start_server
from rematbench.problem import rank_parameters
from rematbench.worlds.torch import worker
from rematbench.worlds.torch.arithmetic import wide
from rematbench.worlds.torch.case import Case, RankResult, Result, Status, combine, failure
from rematbench.worlds.torch.devices import choose_device, prepare
from rematbench.worlds.torch.groups import Groups, default_backend
from rematbench.worlds.torch.parameters import ParameterSpec, specs_by_name
from rematbench.worlds.torch.rank_model import DTYPES, NotExecutable, require_executable
from rematbench.worlds.torch.worker import run_case

PROCESS_BYTES = 200 << 20
"""Bytes of a rank on CPUs before its model. Measured: 235 MB private to a process
(/proc/PID/smaps_rollup) with torch 2.13 imported and gloo's group joined, for tiny-llama-deep on 2
and on 4 ranks; rounded down, because other versions may take less."""


def state_bytes(case: Case) -> int:
    """A lower bound of the bytes of all ranks' parameters, gradients, master weights and moments,
    as the runtime stores them but without padding."""
    problem, lay = case.problem, case.problem.layout
    total = 0
    for stage in range(lay.pp):
        trained = rank_parameters(problem, case.plan, stage, trained=True)
        total += _held(case, rank_parameters(problem, case.plan, stage), trained)
    return total * (lay.gpus // lay.pp)


def _held(case: Case, held: int, count: int) -> int:
    """Bytes that a rank holds for `held` parameters on it, of which `count` train."""
    dtype, plan = DTYPES[case.problem.workload.precision], case.plan
    parameter, gradient = plan.state("parameter"), plan.state("gradient")
    optimizer = plan.state("optimizer")
    sums = (optimizer.update != "backward") * wide(dtype).itemsize
    own = held * dtype.itemsize // parameter.shards + count * sums // gradient.shards
    return own + count * 3 * wide(dtype).itemsize // optimizer.shards


def initialization_bytes(case: Case) -> int:
    """Peak bytes of all ranks while weights are drawn. Each rank holds one whole parameter in
    float64 next to the parameters that it has."""
    lay, total = case.problem.layout, 0
    for stage in range(lay.pp):
        made, trained, most = 0, 0, 0
        for spec in _specs(case, stage):
            whole = prod(spec.shape)
            most = max(most, _held(case, made, trained) + whole * torch.float64.itemsize)
            made += whole // spec.parts(lay)
            trained += whole // spec.parts(lay) * spec.trained
        total += most
    return total * (lay.gpus // lay.pp)


def _specs(case: Case, stage: int) -> list[ParameterSpec]:
    problem, plan = case.problem, case.plan
    places = [
        (unit.table.part, unit.layer)
        for number in range(problem.layout.vpp)
        for unit in ChunkOps.of_plan(problem, plan, stage, number, plan.held).units
    ]
    model = problem.workload.model
    held = range(model.experts.count // problem.layout.ep) if model.experts else None
    return list(specs_by_name(model, places, 0, held, problem.workload).values())


def memory_shortage(case: Case) -> str:
    """The reason why a case on CPUs is not started; empty if it may fit. The case must fit while
    weights are drawn and during training."""
    free = free_bytes()
    if case.device != "cpu" or free < 0:
        return ""
    trains = {
        "parameters, gradients and optimizer states": state_bytes(case),
        "activations": case.activation_bytes,
    }
    starts = {"initial weights, whole and in float64": initialization_bytes(case)}
    needs = max(trains, starts, key=lambda found: sum(found.values()))
    needs["processes with torch"] = case.world_size * PROCESS_BYTES
    need = sum(needs.values())
    if need <= free:
        return ""
    parts = ", ".join(f"{nbytes / 2**30:,.1f} of {what}" for what, nbytes in needs.items())
    return (
        f"{case.world_size} ranks need at least {need / 2**30:,.1f} GiB of host memory "
        f"({parts}), but this host has {free / 2**30:,.1f} GiB free"
    )


def execute_cases(cases: Sequence[Case], *, timeout_s: float = 120.0) -> list[Result]:
    """The results of cases of one world size, in their order; `timeout_s` for each case."""
    if len({(case.world_size, case.device) for case in cases}) > 1:
        raise ValueError("all cases of a launch must have the same world size and device")
    results: dict[int, Result] = {}
    waiting = []
    for number, case in enumerate(cases):
        if reason := refusal(case):
            results[number] = Result(name=case.name, status="unsupported", reason=reason)
        else:
            waiting.append(number)
    while waiting:
        done = _launch([cases[number] for number in waiting], timeout_s)
        results.update(zip(waiting, done, strict=False))
        waiting = waiting[len(done) :]
    return [results[number] for number in range(len(cases))]


def _launch(cases: list[Case], timeout_s: float) -> list[Result]:
    """The results of the cases in order, up to the first failure (at least one result)."""
    size, on_cpus = cases[0].world_size, cases[0].device == "cpu"
    if on_cpus:
        start_server(worker.__name__)  # an import of torch takes longer than a small job
    with scratch() as folder:
        ranks = [(rank, size, folder, cases, timeout_s) for rank in range(size)]
        start: Literal["forkserver", "spawn"] = "forkserver" if on_cpus else "spawn"
        failure = run_ranks(start, worker.run, ranks, folder, timeout_s)
        results: list[Result] = []
        for number, case in enumerate(cases):
            paths = [folder / f"{number}.{rank}.pt" for rank in range(size)]
            if not all(path.exists() for path in paths):
                cause = error_of_job(sorted(folder.glob(f"{number}.*.error")), failure)
                status = cast(Status, cause.status)
                return [*results, Result(name=case.name, status=status, reason=cause.reason)]
            loaded = [torch.load(path, weights_only=False) for path in paths]
            results.append(combine(case, loaded))
    return results


@dataclass(frozen=True)
class LauncherPlace:
    """The place of a process that a launcher started: its rank among `world_size` processes, its
    local rank on its host, and the address and port where the processes meet."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int


LOOKUP_S = 10.0
"""Seconds that a host name may stay unknown: a job's first host may be registered late."""


class RendezvousError(RuntimeError):
    """The processes of a launcher did not meet; the message is one line."""


def versions(device: str) -> dict[str, str]:
    made, name = str(torch.__version__), f"cpu ({platform.machine()})"
    if device == "cuda":
        name = torch.cuda.get_device_name() if has_gpu() else "cuda (torch can use no GPU)"
    if device == "cuda" and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        made = f"{made} (CUDA {torch.version.cuda}, NCCL {nccl})"
    return {"torch": made, "device": name}


def device_kind(kind: str) -> str:
    """`kind`; if it is empty, cuda if torch has a GPU, otherwise cpu."""
    prepare(kind or "cuda")  # this must precede torch's search for a GPU
    return kind or ("cuda" if has_gpu() else "cpu")


def has_gpu() -> bool:
    return torch.cuda.is_available()


def refusal(case: Case) -> str:
    """The reason why the runtime cannot execute a case; empty if it can. No process is started."""
    try:
        require_executable(case.problem, case.plan)
    except NotExecutable as error:
        return str(error)
    return ""


def run_spawned(cases: list[Case], timeout_s: float) -> list[Result]:
    """Run the cases in processes started here, one per GPU of the layout. A case that needs more
    memory than this machine has is not run; its status is `oom`."""
    full = {
        number: why
        for number, case in enumerate(cases)
        if not refusal(case) and (why := memory_shortage(case))
    }
    fitting = [case for number, case in enumerate(cases) if number not in full]
    done = iter(execute_cases(fitting, timeout_s=timeout_s) if fitting else [])
    return [
        Result(name=case.name, status="oom", reason=full[number]) if number in full else next(done)
        for number, case in enumerate(cases)
    ]


def run_launched(
    cases: list[Case], place: LauncherPlace, timeout_s: float
) -> tuple[list[Result], tuple[int, ...]]:
    """Run the cases in a process that a launcher started. Return the results of the cases (on rank
    0; empty on other ranks) and the number of ranks on each host. If a case fails here, this
    process ends after it, and the launcher ends the others. RendezvousError if a process does not
    join."""
    torch.set_num_threads(1)
    prepare(cases[0].device)
    device = choose_device(cases[0].device, place.local_rank)
    _meet(place, default_backend(device), timeout_s)
    clean = False
    try:
        talk = dist.new_group(backend="gloo")
        hosts = _gathered(socket.gethostname(), place, talk)
        known: dict[tuple[object, ...], Groups] = {}
        results: list[Result] = []
        for case in cases:
            result = _run_case(case, place, device, known, talk)
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


def _meet(place: LauncherPlace, backend: str, timeout_s: float) -> None:
    where = f"{place.address}:{place.port}"
    _look_up(place.address, min(timeout_s, LOOKUP_S))
    try:
        dist.init_process_group(
            backend,
            init_method=f"tcp://{where}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except Exception as error:  # torch's, gloo's and NCCL's errors have no common class
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise RendezvousError(
            f"rank {place.rank} of {place.world_size} did not meet the other ranks at {where} "
            f"(MASTER_ADDR, MASTER_PORT) within {timeout_s:g} s: {why}"
        ) from error


def _look_up(address: str, patience_s: float) -> None:
    """RendezvousError if no host has the address; torch would retry until its timeout."""
    until = time.monotonic() + patience_s
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            if time.monotonic() >= until:
                raise RendezvousError(
                    f"MASTER_ADDR {address}: no such host ({error.strerror})"
                ) from error
            time.sleep(0.2)


def _leave(device: torch.device, *, clean: bool) -> None:
    """Destroy the communicators. After a failure, abort them: NCCL's kernels may wait for a peer
    forever, and destroying a communicator would wait for these kernels."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if device.type == "cuda" and not clean and abort is not None:
        abort()
    else:
        dist.destroy_process_group()


def _run_case(
    case: Case,
    place: LauncherPlace,
    device: torch.device,
    groups: dict[tuple[object, ...], Groups],
    talk: dist.ProcessGroup,
) -> Result | None:
    """Run a case on this rank; return the case's result on rank 0, None on other ranks. A failure
    on rank 0 is in the result; other ranks raise it. Peers of a failed rank end at the timeout."""
    outcome: RankResult | tuple[Status, str]
    try:
        outcome = run_case(case, place.rank, device, groups)
    except Exception as error:
        status, reason = failure(error)
        outcome = (status, f"rank {place.rank}: {reason}")
        if place.rank != 0:
            raise
    if isinstance(outcome, tuple):
        return Result(name=case.name, status=outcome[0], reason=outcome[1])
    ranks = _gathered(outcome, place, talk)
    return combine(case, ranks) if place.rank == 0 else None


def _gathered(value: object, place: LauncherPlace, talk: dist.ProcessGroup) -> list:  # type: ignore[type-arg]
    values: list[object] | None = [None] * place.world_size if place.rank == 0 else None
    dist.gather_object(value, values, dst=0, group=talk)
    return values or []
