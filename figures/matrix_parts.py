"""Parts of the step of the fastest method by context length: stacked shares, a panel per model.

usage: matrix_parts.py matrix_fastest.csv FIGURE.pdf
"""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import style
from matplotlib.axes import Axes

TABLES = ("matrix_fastest",)
PARTS = {name: look for name, look in style.PARTS.items() if name not in ("ep", "host")}
"""Colour, label and hatch of each share, from the bottom."""

LONGEST = 20
"""The most characters of a name on one line, so that a name on two lines is no wider than its bar
and ends inside the bar's compute part."""


def main() -> None:
    source, target = style.arguments(2, "matrix_fastest.csv FIGURE.pdf")
    rows, cluster = style.of_first_cluster(source)
    models = list(rows.model.unique())
    style.apply()
    figure, axes = plt.subplots(
        1, len(models), figsize=(style.TEXT_IN, 3.2), sharey=True, squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=True):
        bars(axis, rows[rows.model == model].sort_values("seq_len"))
        axis.set_title(model)
    axes[0, 0].set_ylabel("share of the step")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4)
    figure.supxlabel(f"context (tokens); fastest method of each cell on {cluster}", fontsize=8)
    style.save(figure, target)


def bars(axis: Axes, rows: pd.DataFrame) -> None:
    """One bar per length with the name of the fastest method; a cross where no method fits."""
    places = np.arange(len(rows))
    bottom = np.zeros(len(rows))
    for part, (color, label, hatch) in PARTS.items():
        shares = rows[f"part_{part}"].fillna(0.0).to_numpy()
        axis.bar(
            places, shares, 0.8, bottom=bottom, color=color, label=label, hatch=hatch,
            edgecolor="white", lw=0.3,
        )  # fmt: skip
        bottom += shares
    for place, (arm, filled) in enumerate(zip(rows.arm, bottom, strict=True)):
        if filled:
            axis.annotate(
                textwrap.fill(arm, LONGEST), (place, 0.02), rotation=90, ha="center", va="bottom",
                fontsize=5.5, linespacing=1.0,
            )  # fmt: skip
        else:
            axis.plot(place, 0.03, "x", color=style.BLACK, ms=4)
    axis.set_xticks(places, [f"{length / 1024:.0f}K" for length in rows.seq_len])
    axis.tick_params(axis="x", labelrotation=90)
    axis.set_ylim(0, 1)


if __name__ == "__main__":
    main()
