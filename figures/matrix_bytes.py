"""Peak device and pinned host bytes against context length, all methods of a length at one layout.
A line joins only lengths with equal layouts, because bytes also change with the layout.

usage: matrix_bytes.py matrix_same_layout.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

TABLES = ("matrix_same_layout",)
GIB = 2**30
KINDS = {"reserved_bytes": "device (GiB)", "host_node_bytes": "host (GiB/node)"}


def main() -> None:
    source, target = style.arguments(2, "matrix_same_layout.csv FIGURE.pdf")
    rows, cluster = style.of_first_cluster(source)
    models = list(rows.model.unique())
    style.apply()
    figure, axes = plt.subplots(
        2, len(models), figsize=(style.TEXT_IN, 3.6), sharex=True, sharey="row", squeeze=False
    )
    for column, model in enumerate(models):
        for row, key in enumerate(KINDS):
            curves(axes[row, column], rows[rows.model == model], key)
        axes[0, column].set_title(f"{model}, {cluster}")
    for axis, label in zip(axes[:, 0], KINDS.values(), strict=True):
        axis.set_ylabel(label)
        axis.set_ylim(0, None)
    figure.legend(handles=legend(), loc="outside upper center", ncols=4)
    figure.supxlabel("context length (tokens)", fontsize=8)
    style.save(figure, target)


def curves(axis: Axes, cells: pd.DataFrame, key: str) -> None:
    """Draw the bytes of each method at the lengths at which it fits, and a dashed line at the
    device's usable bytes."""
    for arm, own in cells.groupby("arm", sort=False):
        color, marker = style.STRONG.get(str(arm), (style.FAINT, ""))
        fits = own[own.status == "ok"].sort_values("seq_len")
        order = 3 if arm in style.STRONG else 1
        for _, joined in fits.groupby((fits.layout != fits.layout.shift()).cumsum()):
            axis.plot(
                joined.seq_len, joined[key] / GIB, "-", marker=marker or ".", color=color, ms=3,
                zorder=order,
            )  # fmt: skip
    if key == "reserved_bytes":
        usable = (cells.reserved_bytes + cells.headroom_bytes).dropna()
        axis.axhline(usable.iloc[0] / GIB, color=style.BLACK, lw=0.8, ls="--")
    style.context_axis(axis, sorted(cells.seq_len.unique()))


def legend() -> list[Line2D]:
    lines = [
        Line2D([], [], color=color, marker=marker, label=arm)
        for arm, (color, marker) in style.STRONG.items()
    ]
    lines.append(Line2D([], [], color=style.FAINT, label="other methods"))
    lines.append(Line2D([], [], color=style.BLACK, ls="--", lw=0.8, label="usable device bytes"))
    return lines


if __name__ == "__main__":
    main()
