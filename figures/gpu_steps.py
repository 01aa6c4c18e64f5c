"""Steps on one GPU, measured beside predicted; each method's speed over full recomputation.

usage: gpu_steps.py gpu_layers.csv gpu_ratios.csv FIGURE.pdf
"""

from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes

TABLES = ("gpu_layers", "gpu_ratios")
KEYS = ["problem", "method"]
ABOVE: dict[str, Any] = {"loc": "lower center", "bbox_to_anchor": (0.5, 1.0), "columnspacing": 1.0}


def main() -> None:
    steps, ratios, target = style.arguments(3, "gpu_layers.csv gpu_ratios.csv FIGURE.pdf")
    rows = pd.read_csv(steps)
    rows = rows[rows.status == "ok"].merge(pd.read_csv(ratios), on=KEYS, suffixes=("", "_"))
    rows = rows.sort_values(["context", "step_s"]).reset_index(drop=True)
    style.apply()
    figure, (errors, speeds) = plt.subplots(
        1, 2, figsize=(style.TEXT_IN, 0.9 + 0.19 * len(rows)), sharey=True
    )
    names = [
        f"{row.method.split(' (')[0]}, {row.context // 1024}K"
        for row in rows.itertuples(index=False)
    ]
    errors.set_yticks(range(len(rows)), names)
    errors.invert_yaxis()
    _errors(errors, rows)
    _speeds(speeds, rows[rows.ratio.notna()])
    style.save(figure, target)


def _errors(axis: Axes, rows: pd.DataFrame) -> None:
    """Signed errors of seconds and of allocated and reserved bytes."""
    looks = {
        "step_s": (style.BLUE, "o", "seconds of a step"),
        "allocated_bytes": (style.GREEN, "s", "allocated bytes"),
        "reserved_bytes": (style.ORANGE, "^", "reserved bytes"),
    }
    axis.axvline(0, color=style.BLACK, lw=0.5)
    for key, (color, marker, label) in looks.items():
        axis.plot(100 * rows[f"{key}_error"], rows.index, marker, color=color, ms=4, label=label)
    axis.set_xlabel("measured over predicted, less 1 (%)")
    axis.legend(**ABOVE, ncol=3)


def _speeds(axis: Axes, rows: pd.DataFrame) -> None:
    """Speed over full recomputation: measured with its 95 % interval, and predicted."""
    axis.axvline(1, color=style.BLACK, lw=0.5)
    half = rows.half_width.fillna(0)
    axis.errorbar(
        rows.ratio, rows.index, xerr=half, fmt="o", color=style.BLUE, ms=4, label="measured"
    )
    axis.plot(
        rows.predicted_ratio,
        rows.index,
        "s",
        color=style.BLACK,
        mfc="none",
        ms=6,
        label="predicted",
    )
    axis.set_xlabel("speed over full recomputation")
    axis.legend(**ABOVE, ncol=2)


if __name__ == "__main__":
    main()
