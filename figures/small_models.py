"""A small model on one node: published and predicted speed, and how long devices wait for hosts.

The wait is the share of the step that disappears with hosts that issue every action instantly.

usage: small_models.py PRED.csv PRED_INSTANT_HOSTS.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes

SWEEP = "vTrain ground_truth_single.csv"
KEYS = ["tp", "micro_batch"]
ROW = ["table", "gpus", "layers", "pp", "dp", "global_batch", *KEYS]


def main() -> None:
    source, instant, target = style.arguments(3, "PRED.csv PRED_INSTANT_HOSTS.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    rows = rows[rows.table.str.startswith(SWEEP) & (rows.pp == 1) & (rows.layers == 24)]
    alone = pd.read_csv(instant)[[*ROW, "pred_step_s"]]
    rows = rows.merge(alone, on=ROW, suffixes=("", "_instant"), validate="one_to_one")
    rows["waiting"] = 1 - rows.pred_step_s_instant / rows.pred_step_s
    rows = rows.sort_values(["gpus", "global_batch"], ascending=[False, True])
    rows = rows.drop_duplicates(KEYS, keep="last").sort_values(KEYS)  # fewest GPUs, largest batch
    style.apply()
    figure, axes = plt.subplots(
        2, rows.tp.nunique(), figsize=(style.TEXT_IN, 2.9), sharex=True, sharey="row",
        height_ratios=(2, 1),
    )  # fmt: skip
    for (speed, waiting), (tp, cells) in zip(axes.T, rows.groupby("tp"), strict=True):
        speed.set_title(f"TP {tp}")
        speeds(speed, cells)
        places = range(len(cells))
        waiting.bar(places, 100 * cells.waiting, color=style.ORANGE, width=0.6)
        waiting.set_xticks(places, cells.micro_batch)
        waiting.set_xlabel("micro-batch")
    axes[0][0].set_ylim(bottom=0)
    axes[0][0].set_ylabel("tokens/s/GPU")
    axes[0][0].legend()
    axes[1][0].set_ylabel("waits for\nthe host (%)")
    style.save(figure, target)


def speeds(axis: Axes, cells: pd.DataFrame) -> None:
    """Published speeds as dots, predicted speeds as a line."""
    places = range(len(cells))
    axis.plot(places, cells.tokens_per_s_per_gpu, "o", color=style.BLACK, label="published")
    axis.plot(places, cells.pred_tokens_per_s_per_gpu, "-s", color=style.BLUE, ms=3, label="ours")


if __name__ == "__main__":
    main()
