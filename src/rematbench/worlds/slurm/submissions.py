"""The jobs that are due, their predicted GPU-hours, and the checks before the first submission."""

from collections.abc import Callable, Sequence
from math import fsum
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from rematbench.host.console import CommandError
from rematbench.host.table import write_sheet
from rematbench.plan import PlanError
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.cells import Bundle, Campaign, CampaignCell
from rematbench.worlds.slurm.queue import Node, Unreachable, partitions
from rematbench.worlds.slurm.requests import check_request, executed_request, simulated_request
from rematbench.worlds.slurm.settings import Center

STARTUP_S = 60.0
"""Seconds of a cell's start-up (imports, communicators, allocating the model): our estimate."""


class Submission(Struct, frozen=True, kw_only=True):
    """One job of a bundle.  `gpu_hours` is predicted; `most_gpu_hours` is the job's time limit
    times its GPUs.  Both are zero on a cluster whose `slurm:` section has no `gres`."""

    bundle: str
    nodes: int
    gpus: int
    cells: int
    minutes: int
    gpu_hours: float
    most_gpu_hours: float


def submissions(campaign: Campaign, store: Store) -> list[Submission]:
    """A submission for every bundle that has an unfinished cell."""
    found = []
    for bundle in campaign.bundles.values():
        cells = [cell for cell in bundle.cells if store.finished(campaign.key(cell)) is None]
        if cells:
            found.append(_submission(campaign, bundle, cells))
    return found


def _submission(campaign: Campaign, bundle: Bundle, cells: Sequence[CampaignCell]) -> Submission:
    slurm = campaign.center.slurm
    whole = campaign.center.cluster.gpus_per_node if "--exclusive" in slurm.extra else 0
    gpus = bundle.nodes * max(bundle.gpus_per_node, whole) if slurm.gres else 0
    seconds = slurm.canary_s + fsum(STARTUP_S + _seconds(campaign, cell) for cell in cells)
    return Submission(
        bundle=bundle.name,
        nodes=bundle.nodes,
        gpus=gpus,
        cells=len(cells),
        minutes=bundle.minutes,
        gpu_hours=gpus * seconds / 3600,
        most_gpu_hours=gpus * bundle.minutes / 60,
    )


def _seconds(campaign: Campaign, cell: CampaignCell) -> float:
    """Predicted seconds of a cell's steps; 0 for a cell without a plan."""
    try:
        found = campaign.simulated(cell)
    except PlanError:
        return 0.0
    return campaign.steps(cell) * found.step_s if found is not None else 0.0


def write_plan(rows: Sequence[Submission], path: Path) -> None:
    """Write the submissions as CSV; the header alone where there are none."""
    if rows:
        write_sheet(path, [asdict(row) for row in rows])
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(",".join(Submission.__struct_fields__) + "\n", encoding="utf-8")


def announce(
    campaign: Campaign,
    store: Store,
    max_gpu_hours: float,
    *,
    ask_slurm: bool,
    say: Callable[[str], None],
) -> None:
    """Print every submission that is due and their summary, then check them with `refuse`."""
    rows = submissions(campaign, store)
    for row in rows:
        say(
            f"to submit: {row.bundle}: {row.nodes} nodes, {row.gpus} GPUs, {row.cells} cells, "
            f"{row.gpu_hours:.3f} GPU-hours predicted, at most {row.minutes} min"
        )
    say(summary(campaign, rows))
    refuse(campaign, rows, max_gpu_hours=max_gpu_hours, ask_slurm=ask_slurm)


def summary(campaign: Campaign, rows: Sequence[Submission]) -> str:
    """The number of submissions and their GPU-hours, in one line."""
    known = fsum(row.gpu_hours for row in rows)
    most = fsum(row.most_gpu_hours for row in rows)
    return (
        f"{len(rows)} submissions on {campaign.center.name}: {known:.3f} GPU-hours predicted, "
        f"{most:.2f} if each ran to its limit"
    )


def refuse(
    campaign: Campaign, rows: Sequence[Submission], *, max_gpu_hours: float, ask_slurm: bool
) -> None:
    """CommandError, before the first submission, where a job has more nodes than the center allows,
    all jobs together exceed `max_gpu_hours` (0: no limit), or, with `ask_slurm`, no partition can
    hold a job."""
    center, slurm = campaign.center, campaign.center.slurm
    for row in rows:
        if row.nodes > slurm.nodes:
            raise CommandError(
                f"{row.bundle} needs {row.nodes} nodes; {center.name} allows {slurm.nodes} "
                "(slurm: nodes)"
            )
    total = fsum(row.gpu_hours for row in rows)
    if max_gpu_hours and total > max_gpu_hours:
        worst = max(rows, key=lambda row: row.gpu_hours)
        raise CommandError(
            f"{total:.3f} predicted GPU-hours exceed max_gpu_hours {max_gpu_hours:g} "
            f"({len(rows)} submissions, the largest {worst.bundle} with {worst.gpu_hours:.3f})"
        )
    nodes = slurm_nodes() if ask_slurm and rows else None
    if nodes is not None:
        for row in rows:
            check_request(executed_request(center, campaign.bundles[row.bundle]), nodes)


def refuse_simulated(center: Center) -> None:
    """CommandError if the center's partitions can never hold a job that runs simulated cells."""
    nodes = slurm_nodes()
    if nodes is not None:
        check_request(simulated_request(center), nodes)


def slurm_nodes() -> list[Node] | None:
    """Every node of every partition; None where Slurm is not installed, CommandError where Slurm
    does not answer."""
    try:
        return partitions()
    except Unreachable as error:
        raise CommandError(f"Slurm does not answer: {error}") from error
