"""The style of every figure: sizes for a paper's column, colours and hatches.  Fonts and lines are
in config/figures.mplstyle.

Okabe and Ito (2008) chose these colours to stay distinct under all common colour-vision
deficiencies.  Series also differ in marker or hatch, so that a grey print is readable.
"""

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
