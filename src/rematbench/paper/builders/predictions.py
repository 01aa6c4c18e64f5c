"""Predictions of published rows: of one method's plans, or of small models with instant hosts."""

from collections.abc import Mapping
from pathlib import Path

from rematbench.evidence.accuracy import MORE
from rematbench.evidence.predict import predict_rows, prediction_columns
from rematbench.evidence.published.words import committed
from rematbench.host.table import write_sheet
from rematbench.host.workers import collect_rarely
from rematbench.inputs.constants import instant_hosts
from rematbench.inputs.load import calibration
from rematbench.paper.catalog import sheets

SMALL = {"system": "megatron-deepspeed", "layers": "24", "pp": "1"}
"""The rows of runs_more.csv that are predicted with hosts that launch a kernel in no time."""


def build(output: Path, values: Mapping[str, str]) -> str:
    """Write rows with pred_* columns: those of the bundle `method` if there is one, else the small
    models, as if launches took no time."""
    collect_rarely()
    if "method" in values:
        rows, constants = sheets()[values["method"]], None
    else:
        rows = [row for row in committed(MORE) if all(row[key] == SMALL[key] for key in SMALL)]
        constants = instant_hosts(calibration())
    found = predict_rows(rows, processes=1, constants=constants)
    columns = dict.fromkeys(key for row in rows for key in row)
    write_sheet(output, found, [*columns, *prediction_columns(found)])
    return f"{output}: {len(found)} rows"
