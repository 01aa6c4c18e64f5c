"""The command `stages`: what fills the memory of each pipeline rank."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from rematbench.cli.targets import need_file
from rematbench.host.console import console, rich_table
from rematbench.host.table import GIB, TableText, write_sheet
from rematbench.paper.builders.stages import stage_rows
from rematbench.worlds.records.plan_replay import replay


def stages(
    record: Annotated[
        Path, Argument(metavar="RECORD.json", help="A run written by `simulate -o` or `run`.")
    ],
    output: Annotated[Path | None, Option("-o", "--output", metavar="STAGES.csv")] = None,
    cluster: Annotated[
        str, Option(metavar="FILE.yaml", help="Cluster file, if it is not in the run's folder.")
    ] = "",
    system: Annotated[
        str, Option(metavar="FILE.yaml", help="Stack file, if it is not in the run's folder.")
    ] = "",
) -> None:
    """Show what fills the memory of each pipeline stage at its peak.

    \b
    Example:
      rematbench simulate keep_all --model llama-7b --cluster a800-80gb --gpus 4
        --seq-len 4096 --global-batch 16 --pp 4 -o run.json
      rematbench stages run.json
    """
    need_file("-o", output)
    rows = stage_rows(replay(record, cluster=cluster, system=system))
    parts = [key for key in rows[0] if key not in ("rank", "title")]
    table = TableText(
        title=f"GiB at the peak of each stage: {rows[0]['title']}",
        heads=("rank", *(part.replace("_", "-") for part in parts)),
        rows=tuple(
            (str(row["rank"]), *(f"{row[part] / GIB:.2f}" for part in parts)) for row in rows
        ),
        note="The parts and the free bytes add up to the device's memory; a negative value of "
        "free means that the stage does not fit.",
    )
    console().print(rich_table(table))
    if output is not None:
        write_sheet(output, rows)
