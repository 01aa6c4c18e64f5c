"""The GPU and the memory of a rank: settings before CUDA starts, memory between jobs, and a check
for jobs too large for this machine."""

import gc
import os
from collections.abc import Mapping

import torch

from baselines.common.interface import NotRunnable
from rematbench.host.memory import free_bytes
from rematbench.worlds.packages.process import PackageJob
from rematbench.worlds.torch.devices import choose_device, gpu_count, release_pinned


def require_gpus(job: PackageJob, local_ranks: int) -> None:
    """Raise NotRunnable if this machine has more ranks than GPUs: NCCL ranks cannot share a GPU."""
    if job.device != "cuda" or job.run.world == "traced":
        return
    found = gpu_count()
    if not found:
        raise NotRunnable("--device cuda: torch sees no GPU here")
    if local_ranks > found:
        raise NotRunnable(f"{local_ranks} ranks need a GPU each, and torch sees {found} here")


def take_gpu(local: int, world_size: int, settings: Mapping[str, str]) -> torch.device:
    """Take the rank's GPU, with the package's `settings` in the environment.

    Environment variables that a person has set are kept. The process gets its share of the CPUs
    near the GPU, for an optimizer on the host. LOCAL_RANK becomes the GPU's number among the GPUs
    that the process sees, as packages expect. Only the attention kernels that the project's
    executor uses stay allowed: flash, and the memory-efficient kernel for fp32. A case that needs
    the quadratic kernel is an error.
    """
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    device = choose_device("cuda", local)
    os.environ["LOCAL_RANK"] = str(device.index)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", min(world_size, torch.cuda.device_count())))
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // here))
    torch.backends.cuda.enable_math_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return device


def clear_memory() -> None:
    """Free the last job's device memory and pinned memory. The objects of a job form reference
    cycles, so only a garbage collection frees them."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()
        release_pinned()


def cuda_versions() -> dict[str, str]:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"cuda": str(torch.version.cuda), "nccl": nccl}


def require_memory(job: PackageJob) -> None:
    """Raise NotRunnable if the fp32 weights and gradients of all ranks exceed the free memory. A
    machine that starts to swap no longer responds."""
    if job.run.world == "traced" or job.device != "cpu":
        return
    lay = job.run.layout
    copies = lay.gpus // (lay.tp * lay.pp)
    needed, free = copies * job.run.model.parameters * 2 * 4, free_bytes()
    if 0 <= free < needed:
        raise NotRunnable(
            f"{lay.gpus} ranks of {job.run.model.name} on this machine's CPU hold at least "
            f"{needed / 2**30:,.1f} GiB of weights and gradients, and {free / 2**30:,.1f} GiB are "
            "free (a trace needs none)"
        )
