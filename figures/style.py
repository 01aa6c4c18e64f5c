"""The common style of all figures: sizes for a paper's column, a palette, PDF and PNG.

The colours are those of Okabe and Ito (2008), which are distinct under all common colour-vision
deficiencies.  Series also differ in marker or hatch, so that a grey print is readable.
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

COLORS = 256
COLUMN_IN = 3.5
TEXT_IN = 7.2

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
BLUE = "#0072B2"
RED = "#D55E00"
PINK = "#CC79A7"
GREY = "#8C8C8C"
PALE = "#E4E4E4"
FAINT = "#C8C8C8"
INK = ".15"
PALETTE = (BLUE, RED, GREEN, ORANGE, BLACK, PINK, SKY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
TICKS = {
    "color": INK,
    "labelsize": 7,
    "major.size": 4.8,
    "major.width": 0.6,
    "minor.size": 3.2,
    "minor.width": 0.8,
}
STRONG = {
    "keep all": (BLACK, "o"),
    "full recomputation": (ORANGE, "s"),
    "balanced": (SKY, "^"),
    "balanced + offload": (BLUE, "D"),
    "memo": (RED, "v"),
}
"""Methods of the matrix that figures draw in colour; all others are grey."""


def apply() -> None:
    """Set fonts, lines and colours for all figures (8 pt at column width)."""
    mpl.rcParams.update(
        {
            "font.size": 8,
            "font.sans-serif": ["Arial", "DejaVu Sans", "Liberation Sans", "sans-serif"],
            "text.color": INK,
            "axes.axisbelow": True,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.labelsize": 8,
            "axes.linewidth": 0.6,
            "axes.prop_cycle": mpl.cycler("color", PALETTE),
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlesize": 8,
            "figure.constrained_layout.use": True,
            "legend.fontsize": 7,
            "legend.frameon": False,
            "legend.title_fontsize": 9.6,
            "lines.linewidth": 1.2,
            "lines.markersize": 4,
            "lines.solid_capstyle": "round",
            "patch.edgecolor": "w",
            "patch.force_edgecolor": True,
            "patch.linewidth": 0.8,
            "pdf.fonttype": 42,
            "svg.hashsalt": "rematbench",
            **{f"{axis}tick.{key}": value for axis in "xy" for key, value in TICKS.items()},
        }
    )


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
