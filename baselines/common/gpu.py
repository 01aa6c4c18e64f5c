"""A rank's GPU: its settings before CUDA starts, its memory between jobs."""

import gc
import os
from collections.abc import Mapping

import torch

from baselines.common.contract import NotRunnable
from rematbench.baselines.process import Job
from rematbench.torch.devices import choose_device


def require(job: Job, local_ranks: int) -> None:
    """NotRunnable where the GPUs that torch sees here are fewer than the ranks of this host: NCCL
    lets no two ranks share one."""
    if job.device != "cuda" or job.run.world == "traced":
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise NotRunnable("--device cuda: torch sees no GPU here")
    if local_ranks > found:
        raise NotRunnable(f"{local_ranks} ranks need a GPU each, and torch sees {found} here")


def take(local: int, ranks_here: int, settings: Mapping[str, str]) -> torch.device:
    """The rank's GPU, with the package's `settings` in the environment (what a person has set
    stays) and its share of the CPUs near it, which an optimizer on the host works with."""
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    device = choose_device("cuda", local)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_here))
    return device


def clear() -> None:
    """Memory of the last job given back: a job's objects are cycles, which only a collection
    frees."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gc.collect()
        torch.cuda.empty_cache()


def stack() -> dict[str, str]:
    """Versions of CUDA and of NCCL."""
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"cuda": str(torch.version.cuda), "nccl": nccl}
