"""Published layouts of ATC'24 Figure 9 beside the best searched layouts: speeds and losses.

usage: searched_layouts.py searched_layouts.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

TABLES = ("searched_layouts",)
EXPECTED = 4.0
"""Expected limit, in percent, of the loss of a published layout against the best layout."""
NAMED = 1.0
"""The smallest loss, in percent, at which the deciding part of the step is named."""


def main() -> None:
    source, target = style.arguments(2, "searched_layouts.csv FIGURE.pdf")
    rows = pd.read_csv(source).sort_values("gpus")
    rows = rows[rows.loss.notna()]
    style.apply()
    figure, axes = plt.subplots(
        2, 2, figsize=(style.TEXT_IN, 3.4), sharex="col", height_ratios=(2, 1)
    )
    for column, (model, cells) in enumerate(rows.groupby("model")):
        speeds(axes[0, column], str(model), cells)
        losses(axes[1, column], cells)
    axes[0, 0].set_ylabel("tokens/s/GPU")
    axes[1, 0].set_ylabel("published\nloses (%)")
    figure.legend(handles=legend(), loc="outside upper center", ncols=4, columnspacing=1.0)
    style.save(figure, target)


def legend() -> list[Line2D | Patch]:
    line = {"ls": "", "ms": 4}
    return [
        Line2D([], [], **line, marker="o", color=style.BLACK, mfc="none", label="published"),
        Line2D([], [], **line, marker="s", color=style.BLUE, label="ours of that layout"),
        Line2D([], [], **line, marker="^", color=style.RED, label="best of the search"),
        Patch(color=style.RED, label="loss, and what decides"),
    ]


def speeds(axis: Axes, model: str, cells: pd.DataFrame) -> None:
    """By number of GPUs: the published speed, the simulated speed of the published layout, and the
    simulated speed of the best layout."""
    at = range(len(cells))
    axis.vlines(
        at, cells.pred_tokens_per_s_per_gpu, cells.tokens_per_s_per_gpu, color=style.RED, lw=0.8
    )
    axis.plot(at, cells.tokens_per_s_per_gpu, "^", color=style.RED, ms=4)
    axis.plot(at, cells.pred_tokens_per_s_per_gpu, "s", color=style.BLUE, ms=3.5)
    axis.plot(
        at, cells.published_tokens_per_s_per_gpu, "o", color=style.BLACK, mfc="none", ms=5, mew=0.8
    )
    axis.set_title(model)


def losses(axis: Axes, cells: pd.DataFrame) -> None:
    """Draw the loss of the published layout in percent, and from NAMED on the part of the step that
    decides it."""
    loss = 100 * cells.loss
    axis.bar(range(len(cells)), loss, 0.6, color=style.RED)
    axis.axhline(EXPECTED, color=style.GREY, lw=0.6, ls="--")
    for at, (percent, part) in enumerate(zip(loss, cells.decides, strict=True)):
        if percent >= NAMED:
            axis.annotate(part, (at, percent), ha="center", va="bottom", fontsize=6)
    axis.set_xticks(range(len(cells)), cells.gpus.astype(str), rotation=90)
    axis.set_ylim(0, 1.25 * max(EXPECTED, loss.max()))
    axis.set_xlabel("GPUs")


if __name__ == "__main__":
    main()
