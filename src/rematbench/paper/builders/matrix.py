"""A part of the grand matrix: every arm at one layout and at its best layout."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.table import write_sheet
from rematbench.paper.matrix.best import ANSWERED
from rematbench.paper.matrix.spec import load_matrix
from rematbench.paper.matrix.sweep import run_matrix
from rematbench.plugins.discover import discover


def build(output: Path, values: Mapping[str, str], suite: Path, cells: Path) -> str:
    """Write the results of a model (`model`) at some lengths (`seq_lens`, tokens).  `cells`: a
    sheet of the best layouts of earlier searches; other cells of the matrix are searched now."""
    lengths = [int(word) for word in values["seq_lens"].split()]
    spec = load_matrix(suite).restricted([values["model"]], lengths)
    lines, began = [], time.process_time()
    for found in run_matrix(spec, discover(), read_sheet(cells, ANSWERED)):
        lines += found
        at = f"{found[0]['model']} {found[0]['cluster']} {found[0]['seq_len']}"
        sys.stderr.write(f"{at}: {time.process_time() - began:.0f} CPU s so far\n")
    write_sheet(output, lines)
    return f"{output}: {len(lines)} results"
