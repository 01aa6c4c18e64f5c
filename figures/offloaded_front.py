"""Seconds of an update against device bytes with optimizer states in host memory: published runs,
the same runs predicted, and our planner's front.

usage: offloaded_front.py offloaded_front.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

TABLES = ("offloaded_front",)
GIB = 2**30
FRONT = "optimizer_offload"
NODES = {"h100-80gb-dos": "four H100", "polaris-a100-40gb-bound": "four A100-40GB"}
LOOKS = {
    "DeepSpeed, asynchronous copies": (style.BLUE, "o"),
    "Deep Optimizer States": (style.ORANGE, "s"),
}


def main() -> None:
    source, target = style.arguments(2, "offloaded_front.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    style.apply()
    panels = rows.groupby(["cluster", "parameters"])
    size = (style.TEXT_IN, 2.5)
    figure, axes = plt.subplots(1, len(panels), figsize=size, squeeze=False)
    for axis, ((cluster, _), own) in zip(axes[0], panels, strict=True):
        panel(axis, own)
        axis.set_title(f"{own.model.iloc[0]}, {NODES[str(cluster)]}", loc="left")
        axis.set_xlabel("allocated GiB a device")
    axes[0][0].set_ylabel("update (s)")
    figure.legend(handles=legend(), loc="outside lower center", ncols=3)
    style.save(figure, target)


def panel(axis: Axes, rows: pd.DataFrame) -> None:
    """The runs of one model on one node, and the front."""
    front = rows[rows.series == FRONT].sort_values("peak_device_bytes")
    axis.plot(front.peak_device_bytes / GIB, front.update_s, color=style.RED, lw=1, zorder=1)
    for series, (color, marker) in LOOKS.items():
        for world, inside in (("published", color), ("simulated", "white")):
            own = rows[(rows.series == series) & (rows.world == world)]
            axis.plot(
                own.peak_device_bytes / GIB, own.update_s, marker, color=color, mfc=inside, ms=4,
            )  # fmt: skip
    axis.set_ylim(0, None)
    axis.set_xlim(0, None)


def legend() -> list[Line2D]:
    """The looks of the runs, of the two worlds, and of the front."""
    handles = [
        Line2D([], [], color=color, marker=marker, ls="", label=series)
        for series, (color, marker) in LOOKS.items()
    ]
    handles.append(Line2D([], [], color=style.RED, label="optimizer_offload (simulated)"))
    for name, inside in (("published", style.BLACK), ("predicted", "white")):
        handles.append(Line2D([], [], color=style.BLACK, marker="o", mfc=inside, ls="", label=name))
    return handles


if __name__ == "__main__":
    main()
