"""The options of a process that torchrun or srun may have started: its rank among theirs."""

from typing import Annotated

from typer import Option

from rematbench.host.console import CommandError
from rematbench.runs import rank_error

Rank = Annotated[int | None, Option(envvar=["RANK", "SLURM_PROCID"], hidden=True)]
Size = Annotated[int | None, Option(envvar=["WORLD_SIZE", "SLURM_NTASKS"], hidden=True)]
Local = Annotated[int, Option(envvar=["LOCAL_RANK", "SLURM_LOCALID"], hidden=True)]
Address = Annotated[str, Option(envvar="MASTER_ADDR", hidden=True)]
Port = Annotated[int, Option(envvar="MASTER_PORT", hidden=True)]


def is_launched(
    rank: int | None, world_size: int | None, meeting: tuple[str, int], gpus: int
) -> bool:
    """Whether a launcher started this process as one of several (a single process starts its ranks
    itself).  CommandError if the launcher's processes cannot be the layout's ranks."""
    if rank is None or world_size is None or world_size == 1:
        return False
    if world_size != gpus:
        raise CommandError(f"--gpus {gpus}: the launcher started {world_size} processes")
    if not 0 <= rank < world_size:
        raise CommandError(
            f"RANK (or SLURM_PROCID) {rank}: the ranks of {world_size} processes are 0 to "
            f"{world_size - 1}"
        )
    if not all(meeting):
        raise CommandError(rank_error.NO_MEETING)
    return True
