"""Whether a host can hold a job whose every rank is a process on its CPUs.

A GPU that is full says so.  A host does not: it kills a process, and not always the one that asked
for too much.  So what cannot fit is not started.
"""

from rematbench.hostmemory import free_bytes
from rematbench.problem import rank_parameters
from rematbench.torch.case import Case
from rematbench.torch.kernels import wide
from rematbench.torch.model import DTYPES

PROCESS_BYTES = 200 << 20
"""What a rank on CPUs holds before its model: 235 MB private to it (/proc/PID/smaps_rollup) with
torch 2.13 imported and gloo's group joined, for tiny-llama-deep on 2 and on 4 ranks; rounded down,
as other versions may take less."""


def state_bytes(case: Case) -> int:
    """Bytes of all ranks' parameters, gradients, master weights and moments, as the runtime holds
    them, without what padding adds: nothing less will do."""
    problem, plan, lay = case.problem, case.plan, case.problem.layout
    dtype = DTYPES[problem.workload.precision]
    shards = lay.state_shards if lay.zero_stage >= 1 else 1
    gradients = plan.state("optimizer").update != "backward"
    total = 0
    for stage in range(lay.pp):
        count = rank_parameters(problem, plan, stage)
        own = count * (dtype.itemsize + gradients * wide(dtype).itemsize)
        total += own + count * 3 * wide(dtype).itemsize // shards
    return total * (lay.gpus // lay.pp)


def too_large(case: Case) -> str:
    """Why a case on CPUs is not started; nothing if it may fit."""
    free = free_bytes()
    if case.device != "cpu" or free < 0:
        return ""
    needs = {
        "parameters, gradients and optimizer states": state_bytes(case),
        "activations": case.activation_bytes,
        "processes with torch": case.world_size * PROCESS_BYTES,
    }
    need = sum(needs.values())
    if need <= free:
        return ""
    parts = ", ".join(f"{nbytes / 2**30:,.1f} of {what}" for what, nbytes in needs.items())
    return (
        f"{case.world_size} ranks hold {need / 2**30:,.1f} GiB at least ({parts}), and this host "
        f"has {free / 2**30:,.1f} GiB free"
    )
