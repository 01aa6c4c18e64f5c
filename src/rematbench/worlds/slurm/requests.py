"""Checks, before a submission, of whether a center's partitions can ever hold the job."""

from collections.abc import Sequence

from msgspec import Struct

from rematbench.host.console import CommandError
from rematbench.worlds.slurm.cells import Bundle
from rematbench.worlds.slurm.queue import Node
from rematbench.worlds.slurm.resources import simulated_resources
from rematbench.worlds.slurm.settings import Center


class ResourceRequest(Struct, frozen=True, kw_only=True):
    """What a job asks for: `nodes` nodes, each with these CPUs, MB and GPUs (0: the center's
    default).

    `key`: the key of the cluster file's `slurm:` section that names the partition.  An empty
    `partition` is Slurm's default partition.
    """

    name: str
    center: str
    key: str
    partition: str
    nodes: int = 1
    minutes: int
    cpus: int = 0
    mem_mb: int = 0
    gres: str = ""
    gpus: int = 0

    @property
    def where(self) -> str:
        """The partition in words."""
        return f"partition {self.partition}" if self.partition else "the default partition"


def executed_request(center: Center, bundle: Bundle) -> ResourceRequest:
    """The request of a bundle of executed cells."""
    slurm = center.slurm
    return ResourceRequest(
        name=bundle.name,
        center=center.name,
        key="partition",
        partition=slurm.partition,
        nodes=bundle.nodes,
        minutes=bundle.minutes,
        cpus=slurm.cpus_per_node,
        mem_mb=slurm.mem_mb_per_node,
        gres=slurm.gres,
        gpus=bundle.gpus_per_node if slurm.gres else 0,
    )


def simulated_request(center: Center) -> ResourceRequest:
    """The request of a job that runs simulated cells."""
    asked = simulated_resources(center)
    return ResourceRequest(
        name="a simulated job",
        center=center.name,
        key="cpu_partition" if center.slurm.cpu_partition else "partition",
        partition=center.slurm.cpu_partition or center.slurm.partition,
        minutes=int(asked["runtime"] or 0),
        mem_mb=int(asked["mem_mb"] or 0),
    )


def check_request(request: ResourceRequest, nodes: Sequence[Node]) -> None:
    """CommandError if the request's partition can never hold the job; `nodes`: the nodes of all
    partitions."""
    where = request.where
    key = f"{request.center}: slurm: {request.key}"
    if request.partition:
        here = [node for node in nodes if node.partition == request.partition]
    else:
        here = [node for node in nodes if node.default]
    if not here:
        known = ", ".join(sorted({node.partition for node in nodes})) or "none"
        raise CommandError(f"{key}: Slurm has no {where} (known: {known})")
    if not here[0].up:
        raise CommandError(f"{key}: {where} takes no jobs now: it is not up")
    if request.minutes > here[0].minutes:
        raise CommandError(
            f"{request.name} asks for {request.minutes} minutes; {where} allows {here[0].minutes}"
        )
    wants = [
        ("CPUs", request.cpus, [node.cpus for node in here]),
        ("MB of memory", request.mem_mb, [node.mem_mb for node in here]),
    ]
    if request.gpus:
        wants.append((request.gres, request.gpus, [node.count(request.gres) for node in here]))
    for what, want, has in wants:
        fitting = sum(amount >= want for amount in has)
        if fitting < request.nodes:
            raise CommandError(
                f"{request.name} needs {request.nodes} nodes with {want} {what}; {where} has "
                f"{fitting} such of {len(here)} (the largest has {max(has)})"
                if want
                else f"{request.name} needs {request.nodes} nodes; {where} has {len(here)}"
            )
