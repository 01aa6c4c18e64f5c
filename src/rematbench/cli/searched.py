"""The commands that search many jobs, written line by line, and their tables: published layouts,
cells of the matrix, published sweeps, spaces of packages."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from rematbench.cli.matrix import SUITE, declared
from rematbench.cli.options import Within
from rematbench.cli.targets import Output, need_file
from rematbench.evidence.published.sheets import CONFIGURATION, SCORED, SPEED, read_sheet
from rematbench.host.console import CommandError, console, plain
from rematbench.host.table import write_sheet
from rematbench.host.workers import collect_rarely
from rematbench.paper.expected import differences, read_cells
from rematbench.paper.matrix.best import best_lines
from rematbench.paper.studies.package_spaces import load_spaces, searched_spaces
from rematbench.paper.studies.published_layouts import against
from rematbench.paper.studies.published_sweeps import searched_sweeps
from rematbench.paper.tables.searched import NEEDED, TABLES, checked

Csv = Annotated[Path, Option("-o", "--output", metavar="FILE.csv", help="Where to write.")]
Processes = Annotated[int, Option(min=1, max=64, help="Worker processes.")]
Line = Mapping[str, Any]
ROUNDING = 1e-9
"""Largest difference of seconds (a share of them) and of shares between two searches that found the
same: sums in another order."""
PREDICTED = (
    *CONFIGURATION,
    *SCORED,
    *("pred_status", f"pred_{SPEED}", "pred_peak_device_bytes", "pred_usable_bytes"),
)
"""Columns that predicted rows need."""


def layouts(
    sheet: Annotated[Path, Argument(metavar="SHEET.csv", help="Published rows.")],
    output: Csv,
    table: Annotated[str, Option(metavar="NAME", help="Rows of this table only.")] = "",
    within: Within = 0.5,
    processes: Processes = 2,
) -> None:
    """What published layouts lose against the best of a search, row by row.

    \b
    Example:
      rematbench layouts results/published/runs.csv --table "Figure 9" -o figure9.csv
    """
    rows = [
        row for row in read_sheet(sheet, CONFIGURATION) if not table or row.get("table") == table
    ]
    if not rows:
        raise CommandError(f"{sheet}: no row of table {table!r}")
    _write(output, against(rows, within=within / 100, processes=processes), "loss")


def search_cells(
    suite: SUITE,
    output: Csv,
    model: Annotated[list[str] | None, Option(help="Only this model (repeatable).")] = None,
    seq_len: Annotated[list[int] | None, Option(help="Only this length (repeatable).")] = None,
    within: Within = 1.0,
    processes: Processes = 2,
) -> None:
    """The best layout of every arm in every cell of the matrix, and the fastest plan of all.

    \b
    Example:
      rematbench search-cells config/paper.yaml --model llama3-8b -o cells.csv
    """
    spec = declared(suite).restricted(model or (), seq_len or ())
    _write(output, best_lines(spec, within=within / 100, processes=processes), "gap")


def search_sweeps(
    predictions: Annotated[list[Path], Argument(metavar="PRED.csv...", help="Rows predicted.")],
    output: Csv,
    within: Within = 1.0,
    processes: Processes = 2,
) -> None:
    """What following the search would have lost on published sweeps.

    \b
    Example:
      rematbench search-sweeps results/paper/predictions.csv -o sweeps.csv
    """
    rows = [row for path in predictions for row in read_sheet(path, PREDICTED)]
    _write(output, searched_sweeps(rows, within=within / 100, processes=processes), "regret")


def search_spaces(
    jobs: Annotated[Path, Argument(metavar="JOBS.yaml", help="Jobs and spaces.")],
    output: Csv,
    within: Within = 0.5,
    processes: Processes = 2,
) -> None:
    """The fastest of a whole space beside the fastest that a package alone can run.

    \b
    Example:
      rematbench search-spaces config/searched.yaml -o spaces.csv
    """
    found = searched_spaces(load_spaces(jobs), within=within / 100, processes=processes)
    _write(output, found, "mfu_causal")


def searched_tables(
    folder: Annotated[Path, Argument(metavar="DIR", help="layouts.csv, sweeps.csv, ...")],
    output: Output,
) -> None:
    """Tables of searches, after each line's plan is simulated once more.

    \b
    Example:
      rematbench searched-tables results/searched -o results/paper/tables
    """
    collect_rarely()
    for name, table in TABLES.items():
        path = folder / f"{name}.csv"
        rows = read_sheet(path, NEEDED)
        if wrong := checked(name, rows):
            raise CommandError(f"{path}: {wrong}")
        table(rows).write(output)
        console().print(plain(f"{path}: {len(rows)} rows"))


def searched_again(
    made: Annotated[Path, Argument(metavar="MADE", help="Searches made again.")],
    committed: Annotated[Path, Argument(metavar="COMMITTED", help="Searches as committed.")],
) -> None:
    """Compare searches with the committed ones; sums of seconds may differ by rounding.

    \b
    Example:
      rematbench searched-again build/searched results/searched
    """
    paths = sorted(committed.glob("*.csv"))
    if not paths:
        raise CommandError(f"{committed}: no committed searches (*.csv) there")
    for path in paths:
        ours, theirs = read_cells(made / path.name), read_cells(path)
        if ours is None or theirs is None:
            raise CommandError(f"{made / path.name}: no such file, to compare with {path}")
        if found := differences(ours, theirs, ROUNDING, ROUNDING):
            raise CommandError(f"{made / path.name}: cells that differ: {len(found)}; {found[0]}")
        console().print(plain(f"{path.name}: {len(theirs) - 1} rows as committed"))


def _write(output: Path, lines: Iterable[Line], told: str) -> None:
    """Write and print each line as soon as its search ends."""
    need_file("-o", output)
    found: list[Line] = []
    for line in lines:
        found.append(line)
        share = line.get(told)
        text = f"{100 * share:.1f} %" if share is not None else ""
        text = f"{text} {line.get('reason') or ''}".strip()
        keys = ("model", "cluster", "gpus", "seq_len", "table", "arm")
        where = " ".join(str(line[key]) for key in keys if key in line)
        console().print(plain(f"{where} {line.get('space', '')}: {told} {text}"))
        write_sheet(output, found)
