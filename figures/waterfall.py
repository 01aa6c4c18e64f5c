"""ATC'24 Table 8 as a waterfall: engine, layout, checkpointing, offload; ours beside published.

usage: waterfall.py atc24_table8_waterfall.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes

TABLES = ("atc24_table8_waterfall",)


def main() -> None:
    source, target = style.arguments(2, "atc24_table8_waterfall.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    style.apply()
    figure, axis = plt.subplots(figsize=(style.COLUMN_IN, 2.6))
    before = 0.0
    for at, (_, row) in enumerate(rows.iterrows()):
        first = before == 0.0
        low, high = sorted((before, row.predicted))
        down = row.predicted < before
        color = style.GREY if first else (style.RED if down else style.BLUE)
        fits = row.pred_status == "ok"
        axis.bar(
            at, high - low, 0.7, bottom=low, color=color, hatch="" if fits else "////",
            edgecolor="white", lw=0.3,
        )  # fmt: skip
        level(axis, at, row.predicted, color)  # a bar of a small change is too low to be seen
        if not first:
            axis.plot([at - 0.65, at - 0.35], [before] * 2, color=style.GREY, lw=0.6)
        tall = max(high, row.published if pd.notna(row.published) else 0.0) + 3
        total = f"{row.predicted:.0f}"
        gain = total if first else f"{total}\n{100 * row.gain:+.1f} %"
        axis.annotate(gain, (at, tall), ha="center", va="bottom", fontsize=7)
        if pd.notna(row.published):
            axis.plot([at - 0.42, at + 0.42], [row.published] * 2, color=style.BLACK, lw=1.2)
        before = row.predicted
    axis.set_xticks(range(len(rows)), ["Megatron-LM", *(f"+ {name}" for name in rows.step[1:])])
    axis.tick_params(axis="x", labelrotation=20)
    axis.set_ylim(0, 1.22 * max(rows.predicted.max(), rows.published.max()))
    axis.set_ylabel("tokens/s/GPU")
    axis.plot([], [], color=style.BLACK, lw=1.2, label="published")
    axis.bar([0], [0], color=style.BLUE, label="ours (simulated)")
    axis.bar([0], [0], color=style.RED, label="ours, slower")
    axis.bar([0], [0], color=style.BLUE, hatch="////", edgecolor="white", label="does not fit")
    axis.legend(loc="lower right", framealpha=1, frameon=True, edgecolor="none")
    axis.set_title("llama-175b, 8,192 tokens, 256 H800")
    style.save(figure, target)


def level(axis: Axes, at: int, height: float, color: str) -> None:
    """Draw a line as wide as a bar at the speed after a change."""
    axis.plot([at - 0.35, at + 0.35], [height] * 2, color=color, lw=1.6, solid_capstyle="butt")


if __name__ == "__main__":
    main()
