"""Commands on executed cells: run-cells, cells."""

import importlib.util
from pathlib import Path
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
from rematbench.worlds.slurm.runner import remove_records, run_bundle

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


def _campaign(suite: Path, cluster: str, methods: list[Path] | None) -> Campaign:
    return Campaign(load_campaign_suite(suite), discover(methods or ()), cluster)


def run_cells(
    suite: SUITE,
    store: STORE,
    bundle: Annotated[str, Option(metavar="NAME", help="The bundle: METHOD.NODESxGPUS.PART.")],
    output: Annotated[
        Path, Option("-o", "--output", metavar="DONE.json", help="The bundle's manifest.")
    ],
    cluster: CLUSTER = "",
    job_id: Annotated[str, Option(metavar="ID", help="Slurm job id of this process.")] = "",
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
    run_bundle(campaign, found, Store(store), output, job_id=job_id, say=typer.echo)


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

    With -o, each cell becomes a row of a sheet, with its status and its numbers, measured and
    simulated; only GPU runs have times.  With --again, the records of finished cells are deleted so
    that the next run executes them again, for example after a repair of the nodes, which no record
    shows.  Their bundles' manifests and executed.csv, next to the store, are deleted too.

    \b
    Example:
      rematbench cells config/measure.yaml --store results/measure/cells
    """
    if cell and not again:
        raise CommandError("--cell needs --again STATUS")
    need_file("-o", output)
    campaign = _campaign(suite, cluster, methods)
    held = Store(store)
    if again:
        found = remove_records(
            campaign, held, store.resolve().parent, statuses=again, names=cell or []
        )
        for name, was in found.items():
            typer.echo(f"{name}: status was {was}; it will run again")
        typer.echo(f"{len(found)} of {len(campaign.cells)} cells will run again")
    elif output is not None:
        rows = number_rows(campaign, held)
        write_sheet(output, rows)
        done = sum(row["status"] == "ok" for row in rows)
        typer.echo(f"{output}: {len(rows)} cells, {done} ok")
    else:
        table = align_left(grid("cell", "state", "job", "reason"), 1, 2, 3)
        for row in cell_rows(campaign, held):
            keys = ("cell", "status", "job_id", "reason")
            table.add_row(*(plain(str(row[key])) for key in keys))
        console().print(table)
