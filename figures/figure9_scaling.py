"""ATC'24 Figure 9: tokens/s per GPU of the searched optimum as GPUs grow, ours over published.

usage: figure9_scaling.py CELLS.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

TABLES = ("cells",)


def main() -> None:
    source, target = style.arguments(2, "CELLS.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    rows = rows[(rows.table == "Figure 9") & rows.error.notna()].sort_values("gpus")
    style.apply()
    figure, axes = plt.subplots(
        2, 2, figsize=(style.COLUMN_IN, 3.1), sharex="col", height_ratios=(3, 1)
    )
    for column, (model, cells) in enumerate(rows.groupby("model", sort=False)):
        speeds(axes[0, column], str(model), cells)
        errors(axes[1, column], cells)
    axes[0, 0].set_ylabel("tokens/s/GPU")
    axes[1, 0].set_ylabel("error (%)")
    figure.legend(handles=legend(), loc="outside upper center", ncols=2, columnspacing=1.0)
    style.save(figure, target)


def legend() -> list[Line2D]:
    blue = {"color": style.BLUE, "lw": 0.8}
    return [
        Line2D([], [], ls="", marker="o", color=style.BLACK, mfc="none", label="published"),
        Line2D([], [], **blue, label="ours (simulated)"),
        Line2D([], [], **blue, ls="", marker="D", label="  held-out cell"),
        Line2D([], [], **blue, ls="", marker="D", mfc="none", label="  of a source used"),
    ]


def speeds(axis: Axes, model: str, cells: pd.DataFrame) -> None:
    """Published speeds as circles, simulated speeds as diamonds on a line; the diamonds of held-out
    cells are filled."""
    axis.plot(cells.gpus, cells.predicted, "-", color=style.BLUE, lw=0.8)
    for held_out, some in cells.groupby(cells.split == "held-out"):
        face = style.BLUE if held_out else "white"
        axis.plot(some.gpus, some.predicted, "D", color=style.BLUE, mfc=face, ms=3.5)
    axis.plot(cells.gpus, cells.published, "o", color=style.BLACK, mfc="none", ms=5, mew=0.8)
    axis.set_title(model)
    values = pd.concat([cells.published, cells.predicted])
    axis.set_ylim(0.8 * values.min(), 1.04 * values.max())


def errors(axis: Axes, cells: pd.DataFrame) -> None:
    """Signed error of every cell, with a strip for the target of +-10 %."""
    error = 100 * cells.error
    axis.axhspan(-10, 10, color=style.PALE, lw=0)
    axis.axhline(0, color=style.BLACK, lw=0.5)
    axis.vlines(cells.gpus, 0, error, color=style.BLUE, lw=1.2)
    axis.plot(cells.gpus, error, ".", color=style.BLUE)
    limit = max(12.0, 1.15 * error.abs().max())
    axis.set_ylim(-limit, limit)
    axis.set_xlabel("GPUs")


if __name__ == "__main__":
    main()
