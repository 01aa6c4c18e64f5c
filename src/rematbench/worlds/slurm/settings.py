"""The `slurm:` section of a cluster file, and the resources that jobs request from Slurm."""

import shlex
from pathlib import Path
from typing import Any

from msgspec import Struct

from rematbench.inputs.cluster import Cluster
from rematbench.inputs.configfile import ConfigError, convert, read_mapping
from rematbench.inputs.load import load_cluster, located
from rematbench.workload import NonNegativeInt, PositiveInt

Resources = dict[str, int | str | None]

KEYS = (
    *("slurm_partition", "slurm_account", "slurm_extra", "qos", "constraint", "gres"),
    *("runtime", "mem_mb", "cpus_per_task", "nodes", "tasks", "tasks_per_gpu", "mpi"),
)
"""Keys that Snakemake's Slurm executor reads. It skips None, but passes an empty qos to sbatch."""

SIMULATED_MINUTES = 120
SIMULATED_MEM_MB = 2000
"""Minutes and MB of the longest simulated job (one model of the matrix). A center may allow
less."""


class SlurmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Partition, account and limits of a center; no setting changes a result.

    `gres`: the GPU resource without its count (`gpu`, `gpu:h800`); empty on CPU-only clusters.
    `nodes`: the maximum number of nodes of one job. `mem_mb_per_node` and `cpus_per_node`: 0 for
    the center's default. `cpu_partition`: the partition for jobs without GPUs, unless they run
    locally. `setup`: shell lines that run first on the first node (module load, activate).
    `environment`: variables exported to every process. `source`: where the numbers come from.
    """

    source: str
    partition: str = ""
    cpu_partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    gres: str = ""
    extra: str = ""
    nodes: PositiveInt = 1
    minutes: PositiveInt = 60
    cpus_per_node: NonNegativeInt = 0
    mem_mb_per_node: NonNegativeInt = 0
    setup: tuple[str, ...] = ()
    environment: dict[str, str] = {}

    def shell_setup(self) -> str:
        """The setup lines and exports as a prefix of a shell command."""
        exports = [f"export {key}={shlex.quote(value)}" for key, value in self.environment.items()]
        return "".join(f"{line} && " for line in (*self.setup, *exports))


class Center(Struct, frozen=True, kw_only=True):
    name: str
    cluster: Cluster
    slurm: SlurmSettings

    def nodes(self, gpus: int) -> int:
        """The number of nodes for `gpus` ranks, with equally many on each node; ConfigError if the
        ranks do not fill the nodes."""
        per_node = min(gpus, self.cluster.gpus_per_node)
        if gpus % per_node:
            text = f"{gpus} ranks do not fill whole nodes of {per_node} GPUs"
            raise ConfigError(self.name, "gpus_per_node", text)
        return gpus // per_node

    def executed_resources(self, nodes: int, gpus_per_node: int, minutes: int) -> Resources:
        """The resources of a job of executed cells: one task per node, where torchrun starts the
        ranks.  `mpi` prevents the executor from wrapping the command in its own srun, so our srun
        can reach every node."""
        slurm, several = self.slurm, nodes > 1
        return self._common() | {
            "slurm_partition": slurm.partition or None,
            "constraint": slurm.constraint or None,
            "slurm_extra": slurm.extra or None,
            "gres": f"{slurm.gres}:{gpus_per_node}" if slurm.gres else None,
            "runtime": minutes,
            "mem_mb": slurm.mem_mb_per_node,  # 0 means the center's default
            "cpus_per_task": slurm.cpus_per_node or -1,  # -1 means the center's default
            "nodes": nodes,
            "tasks": nodes if several else None,
            "tasks_per_gpu": 0 if several and slurm.gres else None,  # else `tasks` counts per GPU
            "mpi": "srun" if several else None,
        }

    def simulated_resources(self) -> Resources:
        """The resources of a CPU job for a simulated bundle that does not run locally."""
        return self._common() | {
            "slurm_partition": self.slurm.cpu_partition or self.slurm.partition or None,
            "runtime": min(SIMULATED_MINUTES, self.slurm.minutes),
            "mem_mb": SIMULATED_MEM_MB,
        }

    def _common(self) -> Resources:
        empty: Resources = dict.fromkeys(KEYS)
        slurm = self.slurm
        return empty | {"slurm_account": slurm.account or None, "qos": slurm.qos or None}


def load_center(name_or_path: str | Path) -> Center:
    """The center of a cluster file, by name or path; ConfigError if the `slurm:` section is
    wrong."""
    path = located("cluster", name_or_path)
    label = str(name_or_path)
    data: Any = read_mapping(path, label).get("slurm")
    if data is None:
        text = "missing: add `slurm:` with partition, nodes and minutes (docs/slurm.md)"
        raise ConfigError(label, "slurm", text)
    if not isinstance(data, dict):
        raise ConfigError(label, "slurm", "expected a mapping of keys to values")
    settings = convert(data, SlurmSettings, f"{label}: slurm")
    kind = settings.gres.split(":")
    if settings.gres and (not all(kind) or kind[-1].isdigit() or len(kind) > 2):
        text = f"{settings.gres!r}: give the kind without a count: gpu or gpu:h800"
        raise ConfigError(f"{label}: slurm", "gres", text)
    return Center(name=label, cluster=load_cluster(name_or_path), slurm=settings)
