"""Commands on executed cells: run-cells, cells, resume."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from shutil import which
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.cli.targets import Methods, need_file
from rematbench.host.console import CommandError, align_left, console, grid, plain
from rematbench.host.table import write_sheet
from rematbench.plugins.discover import discover
from rematbench.worlds.records.store import Store
from rematbench.worlds.slurm.campaign import Campaign, load_campaign_suite
from rematbench.worlds.slurm.campaign_rows import cell_rows, number_rows
from rematbench.worlds.slurm.cell_records import is_final, remove_records
from rematbench.worlds.slurm.runner import Runner, finish
from rematbench.worlds.slurm.slurm_queue import PATIENCE_MINUTES, Silent, job_alive, settle_jobs

SUITE = Annotated[
    Path,
    Argument(
        metavar="SUITE.yaml", help="Suite file that lists the problems and methods to execute."
    ),
]
STORE = Annotated[
    Path, Option("--store", metavar="DIR", help="Folder that holds the finished cells.")
]
CLUSTER = Annotated[
    str, Option(metavar="C", help="Cluster name or YAML file; replaces the suite's cluster.")
]
PATIENCE = Annotated[
    float,
    Option(
        min=0.01,
        metavar="MINUTES",
        help="Fail if Slurm does not answer for this many minutes.",
    ),
]


def _campaign(suite: Path, cluster: str, methods: list[Path] | None) -> Campaign:
    return Campaign(load_campaign_suite(suite), discover(methods or ()), cluster)


def run_cells(
    suite: SUITE,
    store: STORE,
    bundle: Annotated[str, Option(metavar="NAME", help="METHOD.NODESxGPUS.PART.")],
    output: Annotated[Path, Option("-o", "--output", metavar="DONE.json", help="Its manifest.")],
    cluster: CLUSTER = "",
    job_id: Annotated[str, Option(metavar="ID", help="Slurm job id of this process.")] = "",
    minutes: Annotated[int, Option(min=0, help="Time limit of the job (0: no limit).")] = 0,
    methods: Methods = None,
) -> None:
    """Execute a bundle's unfinished cells, in a Slurm job or on this machine.

    \b
    Example:
      rematbench run-cells config/measure.yaml --store results/measure/cells
        --bundle keep_all.1x2.0 -o bundle.json
    """
    need_file("-o", output)
    campaign = _campaign(suite, cluster, methods)
    found = campaign.bundle(bundle)
    if importlib.util.find_spec("torch") is None:
        raise CommandError("torch is not installed in this environment (see docs/slurm.md)")
    held = Store(store, job_id=job_id, job_alive=job_alive, say=typer.echo, is_final=is_final)
    runner = Runner(campaign, found, held, job_id=job_id, minutes=minutes, say=typer.echo)
    finish(runner, output)


def cells(
    suite: SUITE,
    store: STORE,
    output: Annotated[
        Path | None,
        Option(
            "-o", "--output", metavar="EXECUTED.csv", help="Write the cells' numbers to this file."
        ),
    ] = None,
    again: Annotated[
        list[str] | None,
        Option(
            "--again",
            metavar="STATUS",
            help="Rerun cells that ended with this status (repeatable).",
        ),
    ] = None,
    cell: Annotated[
        list[str] | None,
        Option(metavar="NAME", help="With --again: rerun only this cell (repeatable)."),
    ] = None,
    cluster: CLUSTER = "",
    methods: Methods = None,
) -> None:
    """Show how far a measurement has got: every cell and its state.

    With -o, each cell becomes a row of a sheet, with its status and its numbers, measured beside
    simulated; only GPU runs have times.  With --again, finished cells are forgotten so that the
    next run starts them again, for example after a repair of the nodes or of the environment, which
    no record can know of.  This deletes their records and, beside the store, the manifests of their
    bundles and executed.csv.

    \b
    Example:
      rematbench cells config/measure.yaml --store results/measure/cells
    """
    if cell and not again:
        raise CommandError("--cell needs --again STATUS")
    need_file("-o", output)
    campaign = _campaign(suite, cluster, methods)
    held = Store(store, job_alive=job_alive, is_final=is_final)
    if again:
        _forget(campaign, held, store.resolve().parent, again, cell or [])
    elif output is not None:
        rows = number_rows(campaign, held)
        write_sheet(output, rows)
        done = sum(row["status"] == "ok" for row in rows)
        typer.echo(f"{output}: {len(rows)} cells, {done} ok")
    else:
        table = align_left(grid("cell", "state", "attempts", "job", "reason"), 1, 3, 4)
        for row in cell_rows(campaign, held):
            keys = ("cell", "status", "attempts", "job_id", "reason")
            table.add_row(*(plain(str(row[key])) for key in keys))
        console().print(table)


def _forget(
    campaign: Campaign, held: Store, results: Path, statuses: list[str], names: list[str]
) -> None:
    found = remove_records(campaign, held, results, statuses=statuses, names=names)
    for name, was in found.items():
        typer.echo(f"{name}: status was {was}; it will run again")
    typer.echo(f"{len(found)} of {len(campaign.cells)} cells will run again")


def resume(
    words: Annotated[
        list[str] | None,
        Argument(metavar="[TARGET...]", help="Targets (default: measure); options after `--`."),
    ] = None,
    cancel: Annotated[
        bool, Option("--cancel", help="Cancel jobs of an earlier run instead of waiting for them.")
    ] = False,
    patience: PATIENCE = PATIENCE_MINUTES,
    settle: Annotated[
        bool, Option("--settle", help="Only wait for or cancel earlier jobs; start no new job.")
    ] = False,
) -> None:
    """Go on after `snakemake --profile slurm` was interrupted or killed, in the folder it ran in.

    Settles what the run left in the queue (pending jobs are cancelled, running ones finish their
    cells), removes Snakemake's lock, and becomes `snakemake --profile slurm TARGET...`.

    \b
    Example:
      rematbench resume measure
      rematbench resume -- smoke --config simulate_on=slurm
    """
    if not Path("Snakefile").is_file():
        raise CommandError(
            f"no Snakefile in {Path.cwd()}: run `resume` in the folder where the run was started"
        )
    if which("squeue") is None:
        raise CommandError("Slurm is not available: squeue is not on PATH")
    try:
        settle_jobs(Path().resolve(), cancel=cancel, patience_s=60 * patience, say=typer.echo)
    except Silent as error:
        more = (
            "run the same command again when Slurm answers, or wait longer with --patience MINUTES"
        )
        raise CommandError(f"{error}; finished cells are kept: {more}") from error
    if settle:
        return
    begin = ["snakemake", *(words or ["measure"]), "--profile", "slurm"]
    subprocess.run([*begin, "--unlock"], check=False, capture_output=True)  # fails if not locked
    sys.stdout.flush()
    os.execvp(begin[0], begin)
