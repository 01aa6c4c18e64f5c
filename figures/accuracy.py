"""Predicted against published speeds of every scored cell, and signed errors by group.

usage: accuracy.py CELLS.csv FIGURE.pdf
"""

from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

TABLES = ("cells",)
SPLITS = ("fitted", "held-out", "in-sample", "sibling")
LABEL_IN = 0.31
"""Height of a label of two lines."""
FITTED: dict[str, Any] = {"color": style.GREY, "mfc": style.GREY, "ms": 2, "mew": 0.0, "alpha": 0.8}


def main() -> None:
    source, target = style.arguments(2, "CELLS.csv FIGURE.pdf")
    cells = pd.read_csv(source)
    cells = cells[(cells.metric == "tokens_per_s_per_gpu") & cells.error.notna()]
    style.apply()
    looks = source_looks(list(dict.fromkeys(cells.source_name)))
    height = max(2.9, LABEL_IN * len(looks))
    figure, (cloud, strips) = plt.subplots(
        1, 2, figsize=(style.TEXT_IN, height), width_ratios=(1.15, 1)
    )
    scatter(cloud, cells, looks)
    errors(strips, cells, looks)
    style.save(figure, target)


def source_looks(names: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker by group: a colour for each source (the first word of a group's name), and
    a marker for each group of the source."""
    sources = list(dict.fromkeys(name.split()[0] for name in names))
    looks: dict[str, tuple[str, str]] = {}
    for color, source in zip(cycle(style.PALETTE), sources, strict=False):
        own = [name for name in names if name.split()[0] == source]
        looks |= {
            name: (color, mark) for name, mark in zip(own, cycle(style.MARKERS), strict=False)
        }
    return looks


def scatter(axis: Axes, cells: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> None:
    """Predicted over published speeds on log-log axes; filled markers are held-out cells, hollow
    markers are cells of sources that shaped the model, grey ones were fitted."""
    low, high = 0.7 * cells.published.min(), 1.4 * cells.published.max()
    line = np.array([low, high])
    axis.fill_between(line, 0.9 * line, 1.1 * line, color=style.PALE, lw=0)
    axis.plot(line, line, color=style.BLACK, lw=0.5)
    for name, (color, marker) in looks.items():
        for split in SPLITS:
            some = cells[(cells.source_name == name) & (cells.split == split)]
            axis.plot(some.published, some.predicted, marker, **points(color, split))
    axis.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axis.set_xlabel("published tokens/s/GPU")
    axis.set_ylabel("predicted tokens/s/GPU")
    handles = [
        Line2D([], [], marker="o", color=style.BLACK, mfc=face, ls="", label=label)
        for face, label in ((style.BLACK, "held-out"), ("none", "of a source used"))
    ]
    handles.append(Line2D([], [], marker="o", ls="", label="fitted, not counted", **FITTED))
    handles.append(Patch(color=style.PALE, label="within 10 %"))
    axis.legend(handles=handles, loc="upper left", handletextpad=0.4)


def points(color: str, split: str) -> dict[str, Any]:
    """The look of the cells of a split."""
    if split == "fitted":
        return FITTED
    face = color if split == "held-out" else "none"
    return {"color": color, "mfc": face, "ms": 3, "mew": 0.6, "alpha": 0.8}


def errors(axis: Axes, cells: pd.DataFrame, looks: dict[str, tuple[str, str]]) -> None:
    """Signed errors, one strip per group; the label has the number of cells and their mean absolute
    error, both without fitted cells."""
    rng = np.random.default_rng(0)
    axis.axvspan(-10, 10, color=style.PALE, lw=0)
    axis.axvline(0, color=style.BLACK, lw=0.5)
    labels = []
    for row, (name, (color, marker)) in enumerate(looks.items()):
        own = cells[cells.source_name == name]
        tested = own[own.split != "fitted"]
        for split in SPLITS:
            some = own[own.split == split]
            height = row + rng.uniform(-0.25, 0.25, len(some))
            axis.plot(100 * some.error, height, marker, **points(color, split))
        mean = 100 * tested.error.abs().mean()
        labels.append(f"{name}\nn = {len(tested)}, mean {mean:.1f} %")
    axis.set_yticks(range(len(labels)), labels)
    axis.invert_yaxis()
    axis.set_xlabel("error of predicted tokens/s/GPU (%)")


if __name__ == "__main__":
    main()
