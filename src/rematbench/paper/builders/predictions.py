"""Predictions of published rows: those of one method's plans, or all of one sheet."""

from collections.abc import Mapping
from pathlib import Path

from rematbench.evidence.predict import COLUMNS, predict_rows
from rematbench.evidence.published.derived import all_cells, bundles
from rematbench.evidence.published.sheets import read_cells
from rematbench.host.table import write_sheet
from rematbench.host.workers import collect_rarely
from rematbench.inputs.constants import instant_hosts
from rematbench.inputs.load import calibration
from rematbench.plugins.discover import discover

RUNS = Path("results/published/runs.csv")
SMALL = {"system": "megatron-deepspeed", "layers": "24", "pp": "1"}
"""The rows that are predicted with hosts that launch a kernel in no time."""


def build(output: Path, values: Mapping[str, str], sheet: Path = RUNS) -> str:
    """Write rows with pred_* columns: those of the bundle `method` if there is one, else the whole
    sheet; with instant `hosts` the small models, as if launches took no time."""
    collect_rarely()
    rows, constants = read_cells(sheet, "ROWS.csv"), None
    columns = rows.columns
    if "method" in values:
        rows[:] = bundles(all_cells(rows), discover())[values["method"]]
        columns = (*columns, "cell")
    elif values["hosts"]:
        rows[:] = [row for row in rows if all(row[key] == SMALL[key] for key in SMALL)]
        constants = instant_hosts(calibration())
    found = predict_rows(rows, processes=1, constants=constants)
    write_sheet(output, found, [*columns, *COLUMNS])
    return f"{output}: {len(found)} rows"
