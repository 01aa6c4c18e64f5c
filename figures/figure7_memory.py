"""ATC'24 Figure 7: peak device memory as alpha grows, ours over published, OOM verdicts marked.

usage: figure7_memory.py CELLS.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

TABLES = ("cells",)
GIB = 2**30
LOOKS = {
    "none": (style.BLUE, "o", "no recomputation"),
    "balanced": (style.RED, "s", "balanced ckpt."),
}


def main() -> None:
    source, target = style.arguments(2, "CELLS.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    rows = rows[rows.table == "Figure 7"].sort_values("offload_fraction")
    style.apply()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(style.COLUMN_IN, 3.4), sharex=True, height_ratios=(3, 1)
    )
    for recompute, cells in rows.groupby("recompute", sort=False):
        curve(top, bottom, str(recompute), cells)
    top.set_ylabel("peak per GPU (GiB)")
    top.set_ylim(0, None)
    bottom.axhspan(-3, 3, color=style.PALE, lw=0, zorder=0)
    bottom.axhline(0, color=style.BLACK, lw=0.5)
    bottom.set_ylim(-4, 4)
    bottom.set_ylabel("error (%)")
    bottom.set_xlabel("offloaded share of activation bytes, alpha")
    bottom.set_xticks([0, 0.2, 0.4, 0.6, 0.8, 1])
    top.set_title("llama-65b, 8,192 tokens, 256 H800")
    top.legend(handles=legend(), loc="lower left", ncols=2, columnspacing=0.8, handlelength=1.5)
    style.save(figure, target)


def legend() -> list[Line2D]:
    colors = [Line2D([], [], color=color, label=label) for color, _, label in LOOKS.values()]
    dark = {"color": style.GREY, "ls": ""}
    return [
        *colors,
        Line2D([], [], color=style.GREY, label="ours (simulated)"),
        Line2D([], [], **dark, marker="o", mfc="none", label="published"),
        Line2D([], [], **dark, marker="x", label="published OOM"),
    ]


def curve(top: Axes, bottom: Axes, recompute: str, cells: pd.DataFrame) -> None:
    """Draw one policy: simulated peaks as a line, published peaks as hollow markers, and a cross if
    the published run was out of memory."""
    color, marker, _ = LOOKS[recompute]
    alpha, ours = cells.offload_fraction, cells.predicted / GIB
    top.plot(alpha, ours, "-", color=color)
    top.plot(alpha, cells.published / GIB, marker, color=color, mfc="white", ms=4)
    lost = cells[cells.status == "oom"]
    top.plot(lost.offload_fraction, lost.predicted / GIB, "x", color=color, ms=6)
    bottom.plot(alpha, (100 * cells.error).clip(-4, 4), marker, color=color, ms=3, clip_on=False)


if __name__ == "__main__":
    main()
