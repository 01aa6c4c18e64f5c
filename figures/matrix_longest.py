"""The longest of the matrix's context lengths that fits, by method: a dot per cluster.

usage: matrix_longest.py matrix_longest.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

TABLES = ("matrix_longest",)
COLORS = (style.BLUE, style.RED, style.GREEN)


def main() -> None:
    source, target = style.arguments(2, "matrix_longest.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    rows = rows[rows.fails_at.notna() | (rows.longest == rows.longest.max())]
    models, clusters, arms = (list(rows[key].unique()) for key in ("model", "cluster", "arm"))
    lengths = sorted(set(rows.longest.dropna()) | set(rows.fails_at.dropna()))
    style.apply()
    figure, axes = plt.subplots(
        1, len(models), figsize=(style.TEXT_IN, 0.22 * len(arms) + 1.0), sharey=True, squeeze=False
    )
    for axis, model in zip(axes[0], models, strict=True):
        dots(axis, rows[rows.model == model], arms, clusters)
        axis.set_title(model)
        style.context_axis(axis, lengths)
        axis.grid(axis="y", color=style.PALE, lw=0.5)
    axes[0, 0].set_yticks(range(len(arms)), arms)
    axes[0, 0].invert_yaxis()
    handles = [
        Line2D([], [], ls="", marker=style.MARKERS[i], color=COLORS[i], label=name)
        for i, name in enumerate(clusters)
    ]
    label = "does not fit; none shorter was run"
    handles.append(Line2D([], [], ls="", marker="x", color=style.GREY, label=label))
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    figure.supxlabel("longest context of the grid that fits (tokens)", fontsize=8)
    style.save(figure, target)


def dots(axis: Axes, rows: pd.DataFrame, arms: list[str], clusters: list[str]) -> None:
    """The longest length by method, with the clusters side by side in a row; a cross where even the
    shortest length that was run does not fit."""
    offsets = np.linspace(-0.25, 0.25, len(clusters))
    for index, cluster in enumerate(clusters):
        for _, row in rows[rows.cluster == cluster].iterrows():
            height = arms.index(row.arm) + offsets[index]
            fits = pd.notna(row.longest)
            axis.plot(
                row.longest if fits else row.fails_at, height,
                style.MARKERS[index] if fits else "x",
                color=COLORS[index] if fits else style.GREY, ms=3.5,
            )  # fmt: skip


if __name__ == "__main__":
    main()
