"""What this machine cannot hold is not started."""

import os

from baselines.common.contract import NotRunnable
from rematbench.baselines.process import Job


def check_memory(job: Job) -> None:
    """NotRunnable if the weights and gradients of all ranks, in fp32, are more than the memory of
    this machine: a CPU that starts to swap answers to nobody."""
    if job.run.world == "traced" or job.device != "cpu":
        return
    lay = job.run.layout
    copies = lay.gpus // (lay.tp * lay.pp)
    needed = copies * job.run.model.parameters * 2 * 4
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise NotRunnable(
            f"{lay.gpus} ranks of {job.run.model.name} on this machine's CPU hold at least "
            f"{needed / 2**30:.0f} GiB of weights and gradients, it has {there / 2**30:.0f} GiB "
            "(a trace needs none)"
        )
