"""Pareto front of recompute cost against kept bytes of one layer, with the published ladder.

usage: pareto.py pareto.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style

TABLES = ("pareto",)
LADDER = {"keep all": "o", "balanced": "s", "balanced + FC1": "^", "full": "D"}


def main() -> None:
    source, target = style.arguments(2, "pareto.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    style.apply()
    figure, axis = plt.subplots(figsize=(style.COLUMN_IN, 2.8))
    for color, (model, own) in zip(style.PALETTE, rows.groupby("model", sort=False), strict=False):
        front = own[own.point == "front"].sort_values("kept_share")
        axis.step(
            100 * front.kept_share, 100 * front.recompute_share, where="post", color=color,
            lw=0.9, label=str(model),
        )  # fmt: skip
        for point, marker in LADDER.items():
            at = own[own.point == point]
            axis.plot(
                100 * at.kept_share, 100 * at.recompute_share, marker, color=color, ms=4,
                mfc="white",
            )  # fmt: skip
    for point, marker in LADDER.items():
        axis.plot([], [], marker, color=style.BLACK, mfc="white", ms=4, label=point)
    axis.set_xlabel("kept bytes of a layer (% of all it saves)")
    axis.set_ylabel("recompute (% of the layer's time)")
    axis.set_ylim(-1, None)
    axis.legend(ncols=2)
    style.save(figure, target)


if __name__ == "__main__":
    main()
