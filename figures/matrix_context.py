"""MFU against context length: one panel per model and cluster, a line per method at its best
layout.  Grey: the 80 % band of the fastest method.  Dotted: contexts without published runs.

usage: matrix_context.py matrix_best_layout.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

TABLES = ("matrix_best_layout",)


def main() -> None:
    source, target = style.arguments(2, "matrix_best_layout.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    models, clusters = list(rows.model.unique()), list(rows.cluster.unique())
    style.apply()
    figure, axes = plt.subplots(
        len(models), len(clusters), figsize=(style.TEXT_IN, 1.45 * len(models) + 0.6),
        sharex=True, sharey="col", squeeze=False,
    )  # fmt: skip
    for row, model in enumerate(models):
        for column, cluster in enumerate(clusters):
            cells = rows[(rows.model == model) & (rows.cluster == cluster)]
            panel(axes[row, column], cells)
            if row == 0:
                axes[row, column].set_title(cluster)
        axes[row, 0].set_ylabel(f"{model}\nMFU causal (%)")
    figure.legend(handles=legend(), loc="outside upper center", ncols=4)
    figure.supxlabel("context length (tokens)", fontsize=8)
    style.save(figure, target)


def panel(axis: Axes, cells: pd.DataFrame) -> None:
    """MFU of every method: coloured lines (`style.STRONG`) over grey lines over the 80 % band of
    the fastest method."""
    best = cells[cells["rank"] == "best"].sort_values("seq_len")
    mfu_per_rate = 100 * best.mfu_causal / best.tokens_per_s_per_gpu
    band = {"color": style.FAINT, "alpha": 0.3, "lw": 0, "zorder": 0}
    axis.fill_between(best.seq_len, best.low * mfu_per_rate, best.high * mfu_per_rate, **band)
    for arm, own in cells.groupby("arm", sort=False):
        look = style.STRONG.get(str(arm))
        color, marker = look or (style.FAINT, "")
        fits = own[own.status == "ok"].sort_values("seq_len")
        order = 3 if look else 1
        within = fits.outside.fillna("").map(lambda text: "context" not in text)
        some = {"color": color, "zorder": order, "lw": 1.2 if look else 0.8}
        axis.plot(fits.seq_len, 100 * fits.mfu_causal, ls=":", **some)
        axis.plot(fits.seq_len[within], 100 * fits.mfu_causal[within], "-", **some)
        if look:
            axis.plot(fits.seq_len, 100 * fits.mfu_causal, marker, color=color, ms=3, zorder=4)
            far = fits[~within]
            hollow = {"mfc": "white", "ms": 3, "zorder": 5}
            axis.plot(far.seq_len, 100 * far.mfu_causal, marker, color=color, **hollow)
    style.context_axis(axis, sorted(cells.seq_len.unique()))
    axis.set_ylim(0, None, auto=True)  # auto: rows below share this axis and may have higher values


def legend() -> list[Line2D]:
    lines = [
        Line2D([], [], color=color, marker=marker, label=arm)
        for arm, (color, marker) in style.STRONG.items()
    ]
    lines.append(Line2D([], [], color=style.FAINT, label="other methods"))
    dark = {"color": style.GREY, "marker": "o"}
    lines.append(Line2D([], [], **dark, ls="-", label="context published"))
    lines.append(Line2D([], [], **dark, ls=":", mfc="white", label="context not published"))
    return lines


if __name__ == "__main__":
    main()
