"""Tables of committed searches (results/searched).

They show the loss of published layouts, the regret on published sweeps, the best plan of a
package's space, and the best plans of models with experts. A search takes minutes, but checking its
answer takes one simulation, so each answer is simulated again before a table is written.
"""

from collections.abc import Sequence
from pathlib import Path

from rematbench.advise.candidates.layouts import DEGREES
from rematbench.advise.search.job import simulated
from rematbench.evaluate.result import WORDS
from rematbench.evidence.published.sheets import Row, number, read_sheet
from rematbench.host.console import CommandError
from rematbench.host.workers import collect_rarely
from rematbench.paper.matrix.sweep import changed_step
from rematbench.paper.sheet.table import Table, table_of

INPUTS = {
    "layouts": "results/searched/layouts.csv",
    "spaces": "results/searched/spaces.csv",
    "sweeps": "results/searched/sweeps.csv",
    "experts": "results/searched/experts.csv",
}
TABLES = ("searched_layouts", "searched_spaces", "searched_sweeps", "searched_experts")

NEEDED = ("name", "step_s", "gap", "model", "cluster", "system", "seq_len", *WORDS, "partition")
NEEDED += ("precision", "attention", "run_with")
"""Columns that a line needs so that its plan can be simulated again."""


def build(layouts: Path, spaces: Path, sweeps: Path, experts: Path) -> list[Table]:
    """The tables; CommandError if the step of a plan no longer agrees with its line."""
    collect_rarely()
    given = {"layouts": layouts, "spaces": spaces, "sweeps": sweeps, "experts": experts}
    found = {name: read_sheet(path, NEEDED) for name, path in given.items()}
    for name, rows in found.items():
        if wrong := checked(name != "sweeps", rows):
            raise CommandError(f"{given[name]}: {wrong}")
    return [searched_table(name, rows) for name, rows in found.items()]


def checked(filled: bool, rows: Sequence[Row]) -> str:
    """A sentence on the first line whose plan no longer has the committed step; empty if every step
    is confirmed.  `filled`: plans may fill the device, as published plans do."""
    reserve_gib = 0.0 if filled else None
    for row in rows:
        if row.get("run_with"):
            what = f"{row['name']} for {row['model']} on {row['gpus']} GPUs"
            result, told_s = simulated(row, reserve_gib), number(row, "step_s") or 0.0
            if wrong := changed_step(what, result, told_s):
                return wrong
    return ""


def layout_text(row: Row) -> str:
    """The degrees tp-cp-pp-vpp-dp and a layout's unusual fields; empty if there is no plan."""
    if not row.get("tp"):
        return ""
    words = ["-".join(row[key] for key in DEGREES)]
    words += [f"u {row['ulysses']}"] if row["ulysses"] != "1" else []
    words += [f"mb {row['micro_batch']}"] if row["micro_batch"] != "1" else []
    words += [f"z {row['zero_stage']}"] if row["zero_stage"] != "1" else []
    ends = row["partition"].split(",")
    words += [f"ends {ends[0]} {ends[-1]}"] if "--partition" in row["run_with"] else []
    return " ".join(words)


def _short(source: str) -> str:
    """The source without its edition and address."""
    return source.partition(";")[0].partition(", ")[0]


def searched_table(name: str, rows: Sequence[Row]) -> Table:
    """The table of layouts, spaces, sweeps or experts."""
    lines = ({**row, "layout": layout_text(row)} for row in rows)
    return table_of(f"searched_{name}", lines, {"source": _short})
