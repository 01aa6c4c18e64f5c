"""The `slurm:` section of a cluster file as resources that Snakemake's Slurm executor reads."""

from rematbench.worlds.slurm.cells import Bundle
from rematbench.worlds.slurm.settings import Center

Resources = dict[str, int | str | None]

KEYS = (
    "slurm_partition",
    "slurm_account",
    "slurm_extra",
    "qos",
    "constraint",
    "gres",
    "runtime",
    "mem_mb",
    "cpus_per_task",
    "nodes",
    "tasks",
    "tasks_per_gpu",
    "mpi",
)
"""Keys that the executor reads.  The executor skips a value of None, but passes an empty qos on."""

SIMULATED_MINUTES = 120
SIMULATED_MEM_MB = 2000
"""Minutes and MB that the longest simulated job (one model of the matrix) needs.  A center may
allow fewer minutes."""


def executed_resources(center: Center, bundle: Bundle) -> Resources:
    """The resources of a bundle of executed cells: one task per node, where torchrun starts the
    ranks.  `mpi` keeps the executor from wrapping the command in its own srun, so that our srun
    can reach every node."""
    slurm = center.slurm
    several = bundle.nodes > 1
    return _common(center) | {
        "slurm_partition": slurm.partition or None,
        "constraint": slurm.constraint or None,
        "slurm_extra": slurm.extra or None,
        "gres": f"{slurm.gres}:{bundle.gpus_per_node}" if slurm.gres else None,
        "runtime": bundle.minutes,
        "mem_mb": slurm.mem_mb_per_node,  # 0: the center's default; None is not allowed
        "cpus_per_task": slurm.cpus_per_node or -1,  # negative: the center's default
        "nodes": bundle.nodes,
        "tasks": bundle.nodes if several else None,
        "tasks_per_gpu": 0 if several and slurm.gres else None,  # else `tasks` counts per GPU
        "mpi": "srun" if several else None,
    }


def simulated_resources(center: Center) -> Resources:
    """The resources of a CPU job for a simulated bundle that does not run locally."""
    return _common(center) | {
        "slurm_partition": center.slurm.cpu_partition or center.slurm.partition or None,
        "runtime": min(SIMULATED_MINUTES, center.slurm.minutes),
        "mem_mb": SIMULATED_MEM_MB,
    }


def _common(center: Center) -> Resources:
    empty: Resources = dict.fromkeys(KEYS)
    return empty | {"slurm_account": center.slurm.account or None, "qos": center.slurm.qos or None}
