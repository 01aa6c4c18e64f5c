"""ATC'24 Figure 7: peak device memory as alpha grows, ours over published, OOM verdicts marked.

usage: fig7_memory.py PREDICTIONS.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes

GIB = 2**30
LOOKS = {
    "none": (style.BLUE, "o", "no recomputation"),
    "balanced": (style.RED, "s", "balanced checkpointing"),
}


def main() -> None:
    source, target = style.arguments(2, "PREDICTIONS.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    rows = rows[rows.table == "Figure 7"]
    style.apply()
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(style.COLUMN_IN, 3.3), sharex=True, height_ratios=(3, 1)
    )
    for recompute, cells in rows.groupby("recompute", sort=False):
        curve(top, bottom, str(recompute), cells.sort_values("offload_fraction"))
    top.set_ylabel("peak per GPU (GiB)")
    bottom.axhspan(-3, 3, color=style.PALE, lw=0)
    bottom.axhline(0, color=style.BLACK, lw=0.5)
    bottom.set_ylabel("error (%)")
    bottom.set_xlabel("offloaded share of activation bytes, alpha")
    top.set_title("llama-65b, 8,192 tokens, 256 H800")
    top.legend()
    style.save(figure, target)


def curve(top: Axes, bottom: Axes, recompute: str, cells: pd.DataFrame) -> None:
    """One policy: a line of ours, hollow markers of the paper, crosses where it ran out."""
    color, marker, label = LOOKS[recompute]
    alpha, ours = cells.offload_fraction, cells.pred_peak_device_bytes / GIB
    measured = cells.peak_device_bytes / GIB
    top.plot(alpha, ours, "-", color=color, label=f"{label}, ours (simulated)")
    top.plot(alpha, measured, marker, color=color, mfc="none", label="  published (executed)")
    lost = cells[cells.status == "oom"]
    if len(lost):
        height = lost.pred_peak_device_bytes / GIB
        top.plot(lost.offload_fraction, height, "x", color=color, ms=6, label="  published: OOM")
    error = 100 * (ours / measured - 1)
    bottom.plot(alpha, error, marker, color=color, ms=3)
    limit = max(4.0, 1.2 * float(error.abs().max()))
    bottom.set_ylim(-limit, limit)


if __name__ == "__main__":
    main()
