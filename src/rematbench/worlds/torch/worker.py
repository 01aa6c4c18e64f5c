"""One process of a launch: it joins its peers, runs the cases and writes their results."""

import gc
import math
import multiprocessing as mp
import os
import threading
import traceback
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.program import Program
from rematbench.plan import VOCABULARY
from rematbench.problem import Problem
from rematbench.worlds.torch.attention_backends import choose_flash
from rematbench.worlds.torch.batch import (
    Batch,
    make_batch,
    micro_batches,
)
from rematbench.worlds.torch.case import (
    Case,
    GradientShard,
    NotFinite,
    RankResult,
    failure,
)
from rematbench.worlds.torch.devices import (
    choose_device,
    pin_requested_size,
    pinned_peak,
    prepare,
    release_pinned,
    require_gpus,
    reset_peaks,
    set_expandable_segments,
)
from rematbench.worlds.torch.dispatch import Tracker
from rematbench.worlds.torch.draws import drawing_threads
from rematbench.worlds.torch.exchanges import reordered_channel, used_channels
from rematbench.worlds.torch.executor import Executor
from rematbench.worlds.torch.groups import Groups, default_backend
from rematbench.worlds.torch.parameters import Parameter, square_sum
from rematbench.worlds.torch.rank_model import NotExecutable, RankModel, require_executable


def run(rank: int, world_size: int, folder: Path, cases: list[Case], timeout_s: float) -> None:
    """Entry point of a process. Each result is written to `folder` as <case>.<rank>.pt, a failure
    as <case>.<rank>.error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    prepare(cases[0].device)
    try:
        require_gpus(cases[0].device, world_size)
        device = choose_device(cases[0].device, rank)
        dist.init_process_group(
            default_backend(device),
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except BaseException as error:
        _end_with(folder / f"0.{rank}.error", error)
    known: dict[tuple[object, ...], Groups] = {}
    for number, case in enumerate(cases):
        try:
            result = run_case(case, rank, device, known)
        except BaseException as error:
            _end_with(folder / f"{number}.{rank}.error", error)
        partial = folder / f"{number}.{rank}.part"
        torch.save(result, partial)
        partial.rename(folder / f"{number}.{rank}.pt")
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)
    dist.destroy_process_group()


def _end_with_parent() -> None:
    """End this process when its parent has ended for any reason: nobody would read the results, or
    end this process if it waits for a peer."""
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _end_with(path: Path, error: BaseException) -> NoReturn:
    """Write the reason to a file and exit; only an unexpected error prints its traceback."""
    status, reason = failure(error)
    path.write_text("\n".join([status, reason, traceback.format_exc()]))
    if status == "failed" and not isinstance(error, NotExecutable):
        traceback.print_exc()
    raise SystemExit(1)


def _groups(case: Case, rank: int, groups: dict[tuple[object, ...], Groups]) -> Groups:
    lay, order = case.problem.layout, case.problem.system.parallel.rank_order
    experts = case.problem.workload.model.experts is not None
    folded = (lay.ep, lay.expert_tp) if experts else ()
    shares = case.plan.schedule in VOCABULARY
    degrees = (lay.tp, lay.tp_columns, lay.cp, lay.ulysses, lay.dp, lay.pp, folded, shares, order)
    if degrees not in groups:
        groups[degrees] = Groups(lay, order, rank, experts=experts, vocabulary=shares)
    return groups[degrees]


def run_case(
    case: Case, rank: int, device: torch.device, cached_groups: dict[tuple[object, ...], Groups]
) -> RankResult:
    problem, plan = case.problem, case.plan
    require_executable(problem, plan)
    lowered = case.program or lower(plan, problem)
    if device.type == "cuda":
        _start_on_gpu(case, lowered, device)
    groups = _groups(case, rank, cached_groups)
    groups.connect(device, used_channels(lowered, problem.layout))
    threads, on_device = drawing_threads(device), case.device_weights
    model = RankModel(
        problem, plan, groups.place, device, case.seed, threads=threads, device_weights=on_device
    )
    program = lowered.ranks[groups.place.pp]
    streams = case.streams(rank) if case.streams else None
    tracker = Tracker(device) if case.measure and streams is None else None
    model.columns = groups.by_name.get("columns")
    executor = Executor(
        program, model, groups, tracker=tracker, optimizer=case.optimizer, streams=streams
    )
    if device.type == "cuda":
        release_memory(device)  # peaks of drawing weights do not belong to training
    result = empty_result(groups, executor)
    if case.shards:
        executor.before_update = lambda parameters: result.gradients[-1].update(
            _shards(case, parameters)
        )
    for step in range(case.steps):
        _step(case, executor, result, step)
        if device.type == "cuda":  # a tracker would slow the timed steps
            executor.tracker = executor.movers.tracker = None
    if device.type == "cuda":
        _time(case, executor, result)
    return result


def _start_on_gpu(case: Case, program: Program, device: torch.device) -> None:
    """Check the order of messages, collect the storages of earlier cases (their objects form
    cycles), empty the caches, reset the peaks, and set torch's options for this case."""
    if wrong := reordered_channel(program, case.problem.layout):
        raise NotExecutable(
            f"NCCL has no message tags, and messages from {wrong} are not received in the order "
            "in which they were sent"
        )
    if torch.are_deterministic_algorithms_enabled() != case.deterministic:
        torch.use_deterministic_algorithms(case.deterministic)  # importing a compiler, in 4 s
    # The stream that allocates an action's outputs is not the stream that writes them.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    release_memory(device)
    pin_requested_size()
    choose_options(case.problem)


def choose_options(problem: Problem) -> None:
    """Set the options of torch on a GPU that a problem decides: whether the allocator's segments
    expand, and the flash kernel. NotExecutable if the kernel cannot run here."""
    set_expandable_segments(expandable=problem.system.states.expandable_segments)
    try:
        choose_flash(problem.kernel)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise NotExecutable(f"attention {problem.kernel} cannot run here: {error}") from error


def release_memory(device: torch.device) -> None:
    """Release unused memory and reset the allocators' peaks. The workspaces of cuBLAS are cleared
    too, because it keeps one for each stream that any case has used."""
    gc.collect()
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()
    release_pinned()
    reset_peaks(device)


def empty_result(groups: Groups, executor: Executor) -> RankResult:
    """A result without steps: the rank's coordinates and the bytes of its states."""
    states = {t.untyped_storage()._cdata: t for t in executor.states()}
    nbytes = sum(t.untyped_storage().nbytes() for t in states.values())
    return RankResult(place=groups.place, state_bytes=nbytes)


def _load(case: Case, executor: Executor, step: int) -> Batch:
    """Load this rank's micro-batches of a step into the model; return the whole batch."""
    model, place, problem = executor.model, executor.groups.place, case.problem
    sequences = problem.layout.global_batch  # every rank draws the same batch in every layout
    batch = make_batch(problem.workload, sequences, case.seed, step, case.ignored)
    ahead = model.kind.mtp_layers > 0
    model.batches = micro_batches(batch, problem.layout, place, model.device, ahead=ahead)
    return batch


def _step(case: Case, executor: Executor, result: RankResult, step: int) -> None:
    batch = _load(case, executor, step)
    if case.shards:
        result.gradients.append({})
    loss = executor.run_step() / batch.counted
    if not math.isfinite(loss):
        raise NotFinite(f"loss of step {step} is {loss}")
    result.losses.append(loss)
    record_bytes(executor, result)


def _time(case: Case, executor: Executor, result: RankResult) -> None:
    """Time further steps by events. The host reads nothing until a step has ended."""
    executor.before_update = lambda parameters: None
    for step in range(case.steps, case.steps + case.timed_steps):
        _load(case, executor, step)
        seconds = executor.streams.clock()
        executor.issue_step()
        result.step_s.append(seconds())


def record_bytes(executor: Executor, result: RankResult) -> None:
    result.offload_bytes = executor.movers.offload_bytes
    result.recompute_flop = executor.recompute_flop
    result.bytes_after = result.bytes_after or list(executor.bytes_after)
    for device_bytes, host_bytes in executor.bytes_after:
        result.device_peak_bytes = max(result.device_peak_bytes, device_bytes)
        result.host_peak_bytes = max(result.host_peak_bytes, host_bytes)
    if executor.tracker is not None:
        result.peak_bytes = executor.tracker.device_peak_bytes
    result.pinned_bytes = executor.movers.host.pinned_bytes
    if executor.model.device.type == "cuda":
        result.pinned_bytes = max(result.pinned_bytes, pinned_peak())
        result.allocated_bytes = torch.cuda.max_memory_allocated(executor.model.device)
        result.reserved_bytes = torch.cuda.max_memory_reserved(executor.model.device)


def _shards(case: Case, parameters: list[Parameter]) -> dict[str, GradientShard]:
    """This rank's part of the summed gradients: its ZeRO shard, or the whole gradient."""
    found = {}
    for parameter in (one for one in parameters if one.spec.trained):
        own, owner = parameter.own_grad, parameter.owner
        row = 0 if parameter.spec.split is None else owner.tp_rank
        found[parameter.spec.name] = GradientShard(
            spec=parameter.spec,
            part=row if parameter.spec.columns is None else row * owner.columns + owner.column,
            number=owner.state_rank,
            shape=tuple(parameter.shape),
            square_sum=square_sum(own),
            values=own.detach().cpu().clone() if case.gradients else None,
        )
    return found
