"""The resources that jobs request from Slurm, by the `slurm:` section of a cluster file, and
refusals before the first submission: too many nodes or predicted GPU-hours."""

from collections.abc import Collection
from math import fsum

from rematbench.host.console import CommandError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import Bundle, Campaign, CampaignCell
from rematbench.worlds.slurm.settings import Center

Resources = dict[str, int | str | None]

KEYS = (
    *("slurm_partition", "slurm_account", "slurm_extra", "qos", "constraint", "gres"),
    *("runtime", "mem_mb", "cpus_per_task", "nodes", "tasks", "tasks_per_gpu", "mpi"),
)
"""Keys that the executor reads.  The executor skips a value of None, but passes an empty qos on."""

SIMULATED_MINUTES = 120
SIMULATED_MEM_MB = 2000
"""Minutes and MB that the longest simulated job (one model of the matrix) needs.  A center may
allow fewer minutes."""

STARTUP_S = 60.0
"""Seconds of a cell's start-up (imports, communicators, allocating the model): our estimate."""


def executed_resources(center: Center, bundle: Bundle) -> Resources:
    """The resources of a bundle of executed cells: one task per node, where torchrun starts the
    ranks.  `mpi` prevents the executor from wrapping the command in its own srun, so our srun can
    reach every node."""
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


def refuse(campaign: Campaign, store: Store, *, max_gpu_hours: float = 0.0) -> None:
    """CommandError if a bundle with an unfinished cell needs more nodes than the center allows, or
    all such bundles together exceed `max_gpu_hours` predicted GPU-hours (0: no limit)."""
    center, hours = campaign.center, {}
    for name, bundle in campaign.bundles.items():
        cells = [cell for cell in bundle.cells if store.finished(campaign.key(cell)) is None]
        if not cells:
            continue
        if bundle.nodes > center.slurm.nodes:
            raise CommandError(
                f"{name} needs {bundle.nodes} nodes, but {center.name} allows "
                f"{center.slurm.nodes} (key slurm: nodes)"
            )
        hours[name] = gpu_hours(campaign, bundle, cells) if max_gpu_hours else 0.0
    total = fsum(hours.values())
    if total > max_gpu_hours:
        worst = max(hours, key=lambda name: hours[name])
        raise CommandError(
            f"{total:.3f} predicted GPU-hours exceed max_gpu_hours {max_gpu_hours:g} "
            f"({len(hours)} submissions, the largest {worst} with {hours[worst]:.3f})"
        )


def gpu_hours(campaign: Campaign, bundle: Bundle, cells: Collection[CampaignCell]) -> float:
    """Predicted GPU-hours of a bundle's cells; 0 on a cluster whose `slurm:` section has no `gres`.
    A job with whole nodes (`--exclusive`) counts all GPUs of its nodes."""
    slurm, cluster = campaign.center.slurm, campaign.center.cluster
    if not slurm.gres:
        return 0.0
    whole = "--exclusive" in slurm.extra
    gpus = bundle.nodes * (cluster.gpus_per_node if whole else bundle.gpus_per_node)
    seconds = STARTUP_S * len(cells)
    for cell in cells:
        step = campaign.simulated(cell)
        seconds += campaign.steps(cell) * step.step_s if step is not None else 0.0
    return gpus * seconds / 3600
