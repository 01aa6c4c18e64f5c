"""The common style of all figures, and how they are saved as PDF and PNG.

`rematbench compare --plot` shares the colours (src/rematbench/host/chart_style.py).
"""

import sys
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from rematbench.host.chart_style import (
    BLACK,
    BLUE,
    COLUMN_IN,
    FAINT,
    GREEN,
    GREY,
    MARKERS,
    ORANGE,
    PALE,
    PALETTE,
    PARTS,
    PINK,
    RED,
    SKY,
    TEXT_IN,
)
from rematbench.inputs.paths import data_dir

__all__ = (
    "BLACK",
    "BLUE",
    "COLUMN_IN",
    "FAINT",
    "GREEN",
    "GREY",
    "MARKERS",
    "ORANGE",
    "PALE",
    "PALETTE",
    "PARTS",
    "PINK",
    "RED",
    "SKY",
    "TEXT_IN",
)
COLORS = 256
STRONG = {
    "keep all": (BLACK, "o"),
    "full recomputation": (ORANGE, "s"),
    "balanced": (SKY, "^"),
    "balanced + offload": (BLUE, "D"),
    "memo": (RED, "v"),
}
"""Methods of the matrix that figures draw in colour; all others are grey."""


def apply() -> None:
    """Set fonts, lines and colours for all figures."""
    mpl.rc_file(data_dir("config") / "figures.mplstyle", use_default_template=False)
    mpl.rcParams["axes.prop_cycle"] = mpl.cycler("color", PALETTE)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PDF and PNG.  The files have no dates, so equal data give equal bytes.  A
    palette reduces the PNG, which the page embeds, to a quarter of its size.  The PNG's Description
    is the titles of its panels, so that a test can compare the numbers in a committed picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".pdf"), metadata={"CreationDate": None, "Producer": None})
    words = PngInfo()
    words.add_text("Description", "\n".join(axis.get_title(loc="left") for axis in figure.axes))
    figure.set_layout_engine("none")  # the layout of the PDF holds
    made = BytesIO()
    figure.savefig(made, format="png", dpi=200, metadata={"Software": None})
    plt.close(figure)
    with Image.open(made) as picture:
        few = picture.convert("RGB").quantize(
            COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
        )
    few.save(path.with_suffix(".png"), pnginfo=words)


def context_axis(axis: Axes, lengths: Sequence[float]) -> None:
    """Set a logarithmic axis of context lengths, labelled in units of 1,024 tokens (K)."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [f"{length / 1024:.0f}K" for length in lengths], minor=False)
    axis.tick_params(axis="x", labelrotation=90)


def of_first_cluster(source: Path) -> tuple[pd.DataFrame, str]:
    """The matrix's rows of the first cluster in the table, and the name of the cluster."""
    rows = pd.read_csv(source)
    cluster = str(rows.cluster.iloc[0])
    return rows[rows.cluster == cluster], cluster


def arguments(count: int | None, usage: str) -> list[Path]:
    """The paths on a script's command line: the inputs, then the PDF.  `count`: the number of all
    paths (None: any number from 2 on).  SystemExit with `usage` for another number."""
    given = len(sys.argv) - 1
    if given != (max(given, 2) if count is None else count):
        raise SystemExit(f"usage: {Path(sys.argv[0]).name} {usage}")
    return [Path(word) for word in sys.argv[1:]]
