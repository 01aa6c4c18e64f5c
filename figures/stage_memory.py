"""Device memory of every pipeline stage at its peak, as stacked bars up to the device's size.

usage: stage_memory.py STAGES.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes

GIB = 2**30
PARTS = (
    ("parameter", "parameters", style.BLUE, ""),
    ("gradient", "gradients", style.SKY, ""),
    ("optimizer", "optimizer", style.BLUE, "////"),
    ("saved", "saved activations", style.ORANGE, ""),
    ("transient", "transients", style.RED, ""),
    ("staging", "staging pools", style.PINK, ""),
    ("fragmentation", "fragmentation", style.BLACK, ""),
    ("non_torch", "context, NCCL", style.GREY, ""),
    ("free", "free", "white", "...."),
)


def main() -> None:
    source, target = style.arguments(2, "STAGES.csv FIGURE.pdf")
    stages = pd.read_csv(source)
    style.apply()
    figure, axis = plt.subplots(figsize=(style.TEXT_IN, 2.9))
    bars(axis, stages)
    axis.set_xlabel("pipeline rank")
    axis.set_ylabel("device memory (GiB)")
    axis.set_title(f"{stages.title[0]} (simulated)", loc="left", fontsize=7)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
    style.save(figure, target)


def bars(axis: Axes, stages: pd.DataFrame) -> None:
    """Stacked parts of every stage's memory; a line marks the size of the device (a stage above the
    line does not fit)."""
    bottom = pd.Series(0.0, index=stages.index)
    for key, label, color, hatch in PARTS:
        height = stages[key].clip(lower=0) / GIB
        axis.bar(
            stages["rank"], height, 0.8, bottom=bottom, color=color, hatch=hatch, label=label,
            edgecolor="white" if hatch == "////" else style.GREY, linewidth=0.3,
        )  # fmt: skip
        bottom = bottom + height
    device = stages[[key for key, *_ in PARTS]].sum(axis=1) / GIB
    axis.axhline(device.iloc[0], color=style.BLACK, lw=0.8, ls="--", label="the device")
    axis.set_xticks(stages["rank"])
    axis.set_xlim(-0.6, len(stages) - 0.4)
    axis.set_ylim(0, 1.02 * max(device.iloc[0], bottom.max()))


if __name__ == "__main__":
    main()
