"""The style of every figure: sizes for a paper's column, colours, fonts and lines.

The colours are those of Okabe and Ito (2008), which are distinct under all common colour-vision
deficiencies.  Series also differ in marker or hatch, so that a grey print is readable.
"""

from typing import Any

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
PARTS = {
    "compute": (PALE, "compute", ""),
    "recompute": (ORANGE, "recomputation", ""),
    "bubble": (GREY, "pipeline bubble", ""),
    "copies": (RED, "host copies", "///"),
    "tp": (BLUE, "tensor parallel", ""),
    "cp": (SKY, "context parallel", "..."),
    "pp": (GREEN, "stage to stage", ""),
    "dp": (PINK, "data parallel", "xxx"),
    "ep": (GREEN, "expert parallel", "\\\\\\"),
    "host": (BLACK, "host", ""),
}
"""Colour, label and hatch of each part of a step, in the order in which they are stacked."""

_TICKS = {
    "color": INK,
    "labelsize": 7,
    "major.size": 4.8,
    "major.width": 0.6,
    "minor.size": 3.2,
    "minor.width": 0.8,
}


RC: dict[Any, Any] = {
    "font.size": 8,
    "font.sans-serif": ["Arial", "DejaVu Sans", "Liberation Sans", "sans-serif"],
    "text.color": INK,
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
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
    **{f"{axis}tick.{key}": value for axis in "xy" for key, value in _TICKS.items()},
}
"""Matplotlib's parameters of all figures (8 pt at column width)."""
