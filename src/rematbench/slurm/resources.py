"""A cluster file's `slurm:` section as the resources that Snakemake's Slurm executor reads."""

from rematbench.slurm.cells import Bundle
from rematbench.slurm.settings import Site

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
"""Keys that the executor reads.  It skips a value of None, but would pass an empty qos on."""

SIMULATED_MINUTES = 120
SIMULATED_MEM_MB = 2000
"""The longest simulated job (one model of the matrix) needs so much; a site may allow less."""


def executed_resources(site: Site, bundle: Bundle) -> Resources:
    """One task per node (torchrun starts the ranks); `mpi` keeps the executor from wrapping the
    command in an srun of its own, so that ours can reach every node."""
    slurm = site.slurm
    several = bundle.nodes > 1
    return _common(site) | {
        "slurm_partition": slurm.partition or None,
        "constraint": slurm.constraint or None,
        "slurm_extra": slurm.extra or None,
        "gres": f"{slurm.gres}:{bundle.gpus_per_node}" if slurm.gres else None,
        "runtime": bundle.minutes,
        "mem_mb": slurm.mem_mb_per_node,  # 0 asks for nothing, and must be a number
        "cpus_per_task": slurm.cpus_per_node or -1,  # negative: the site's default
        "nodes": bundle.nodes,
        "tasks": bundle.nodes if several else None,
        "tasks_per_gpu": 0 if several and slurm.gres else None,  # or `tasks` is taken for it
        "mpi": "srun" if several else None,
    }


def simulated_resources(site: Site) -> Resources:
    """The CPU job of a simulated bundle that does not run locally."""
    return _common(site) | {
        "slurm_partition": site.slurm.cpu_partition or site.slurm.partition or None,
        "runtime": min(SIMULATED_MINUTES, site.slurm.minutes),
        "mem_mb": SIMULATED_MEM_MB,
    }


def _common(site: Site) -> Resources:
    empty: Resources = dict.fromkeys(KEYS)
    return empty | {"slurm_account": site.slurm.account or None, "qos": site.slurm.qos or None}
