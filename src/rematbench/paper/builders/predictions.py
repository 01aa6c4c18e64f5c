"""Predictions of the published rows that one composed method plans."""

from collections.abc import Mapping
from pathlib import Path

from rematbench.evidence.predict import predict_rows, prediction_columns
from rematbench.host.table import write_sheet
from rematbench.host.workers import collect_rarely
from rematbench.paper.catalog import sheets


def build(output: Path, values: Mapping[str, str]) -> str:
    """Write the rows of the bundle `method` with pred_* columns."""
    collect_rarely()
    rows = sheets()[values["method"]]
    found = predict_rows(rows, processes=1)
    columns = dict.fromkeys(key for row in rows for key in row)
    write_sheet(output, found, [*columns, *prediction_columns(found)])
    return f"{output}: {len(found)} rows"
