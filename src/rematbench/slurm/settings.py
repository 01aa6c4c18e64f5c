"""The `slurm:` section of a cluster file: how a center wants its jobs submitted."""

from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from rematbench.spec.cluster import Cluster
from rematbench.spec.configfile import ConfigError, closest, convert, read_mapping
from rematbench.spec.load import load_cluster, located
from rematbench.workload import NonNegativeInt, PositiveInt

CanarySeconds = Annotated[float, Meta(ge=0.0, le=60.0)]


class SlurmSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Partition, account and limits of a center; nothing here changes a result.

    `gres` is the GPU resource without its count (`gpu`, `gpu:h800`); empty on CPU-only clusters.
    `nodes` is the most one job may have; 0 for memory or CPUs leaves them to the center's defaults.
    `cpu_partition` is for jobs without GPUs, where they do not run locally.
    `setup` are shell lines run before anything else on the first node (module load, activate);
    `environment` is exported to every process.  `source` says where the numbers come from.
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
    canary_s: CanarySeconds = 10.0

    def shell_setup(self) -> str:
        """The setup lines and exports as one shell prefix."""
        exports = [f"export {key}={_quoted(value)}" for key, value in self.environment.items()]
        return "".join(f"{line} && " for line in (*self.setup, *exports))


class Center(Struct, frozen=True, kw_only=True):
    """A cluster and how jobs are submitted to it."""

    name: str
    cluster: Cluster
    slurm: SlurmSettings

    def nodes(self, gpus: int) -> int:
        """Nodes that hold `gpus` ranks, all alike; ConfigError where they cannot be alike."""
        per_node = min(gpus, self.cluster.gpus_per_node)
        if gpus % per_node:
            text = f"{gpus} ranks do not fill nodes of {per_node}"
            raise ConfigError(self.name, "gpus_per_node", text)
        return gpus // per_node


def load_center(name_or_path: str | Path) -> Center:
    """A cluster with its `slurm:` section, by name or file; ConfigError if it has none."""
    path = located("cluster", name_or_path)
    label = str(name_or_path)
    data: Any = read_mapping(path, label).get("slurm")
    if data is None:
        text = "missing: add `slurm:` with partition, nodes and minutes (docs/slurm.md)"
        raise ConfigError(label, "slurm", text)
    if not isinstance(data, dict):
        raise ConfigError(label, "slurm", "expected a mapping of keys to values")
    settings = convert(data, SlurmSettings, f"{label}: slurm")
    _check(settings, f"{label}: slurm")
    return Center(name=label, cluster=load_cluster(name_or_path), slurm=settings)


_BY_KEY = ("--partition", "--account", "--qos", "--constraint", "--gres", "--nodes", "--time")


def _check(settings: SlurmSettings, label: str) -> None:
    words = settings.gres.split(":")
    if settings.gres and (not all(words) or words[-1].isdigit() or len(words) > 2):
        text = f"{settings.gres!r}: the kind without a count, as in gpu or gpu:h800"
        raise ConfigError(label, "gres", text)
    for word in settings.extra.split():
        if word.split("=")[0] in _BY_KEY:
            hint = closest(word.split("=")[0].lstrip("-"), [key.lstrip("-") for key in _BY_KEY])
            raise ConfigError(label, "extra", f"{word!r} has a key of its own{hint}")


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"
