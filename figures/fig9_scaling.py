"""ATC'24 Figure 9: tokens/s per GPU of the searched optimum as GPUs grow, ours over published.

usage: fig9_scaling.py PREDICTIONS.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes


def main() -> None:
    source, target = style.arguments(2, "PREDICTIONS.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    rows = rows[rows.table == "Figure 9"]
    style.apply()
    figure, axes = plt.subplots(
        2, 2, figsize=(style.COLUMN_IN, 3.0), sharex="col", height_ratios=(3, 1)
    )
    for column, (model, cells) in enumerate(rows.sort_values("gpus").groupby("model", sort=False)):
        speeds(axes[0, column], str(model), cells)
        errors(axes[1, column], cells)
    axes[0, 0].set_ylabel("tokens/s/GPU")
    axes[1, 0].set_ylabel("error (%)")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2)
    style.save(figure, target)


def speeds(axis: Axes, model: str, cells: pd.DataFrame) -> None:
    """Published as markers, ours as a line through its own points."""
    axis.plot(
        cells.gpus, cells.tokens_per_s_per_gpu, "o", color=style.BLACK, mfc="none",
        label="published (executed)",
    )  # fmt: skip
    axis.plot(
        cells.gpus, cells.pred_tokens_per_s_per_gpu, "x-", color=style.BLUE, lw=0.8,
        label="ours (simulated)",
    )  # fmt: skip
    axis.set_title(f"{model}, 4,096 tokens")
    low = min(cells.tokens_per_s_per_gpu.min(), cells.pred_tokens_per_s_per_gpu.min())
    axis.set_ylim(0.8 * low, None)


def errors(axis: Axes, cells: pd.DataFrame) -> None:
    """Signed error of every cell, with the target's +-10 %."""
    error = 100 * (cells.pred_tokens_per_s_per_gpu / cells.tokens_per_s_per_gpu - 1)
    axis.axhspan(-10, 10, color=style.PALE, lw=0)
    axis.axhline(0, color=style.BLACK, lw=0.5)
    axis.vlines(cells.gpus, 0, error, color=style.BLUE, lw=1.2)
    axis.plot(cells.gpus, error, ".", color=style.BLUE)
    limit = max(12.0, 1.15 * error.abs().max())
    axis.set_ylim(-limit, limit)
    axis.set_xlabel("GPUs")


if __name__ == "__main__":
    main()
