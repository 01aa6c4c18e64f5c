"""Refuses jobs that this machine's memory cannot hold."""

from baselines.common.contract import NotRunnable
from rematbench.host.memory import free_bytes
from rematbench.worlds.packages.process import PackageJob


def check_memory(job: PackageJob) -> None:
    """NotRunnable if the weights and gradients of all ranks, in fp32, exceed the free memory. A
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
