"""Mean error of a stack's other rows against the number of rows that calibrate the stack, and the
error of one MFU of the same rows; a colour per stack.

usage: calibrated.py calibrated.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.lines import Line2D

TABLES = ("calibrated",)
SCALES, ONE_MFU = "after_", "mfu_"


def main() -> None:
    source, target = style.arguments(2, "calibrated.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    style.apply()
    figure, axis = plt.subplots(figsize=(style.TEXT_IN, 2.6))
    handles = []
    for color, marker, (_, row) in zip(style.PALETTE, style.MARKERS, rows.iterrows(), strict=False):
        look = {"color": color, "marker": marker, "ms": 3}
        for prefix, line in ((SCALES, "-"), (ONE_MFU, ":")):
            known = row[[name for name in rows.columns if name.startswith(prefix)]].astype(float)
            counts = [int(name.removeprefix(prefix)) for name in known.index]
            axis.plot(counts, 100 * known.to_numpy(), ls=line, **look)
        name = f"{str(row.source).split()[0].rstrip(',')}, {row.cluster} ({row.rows})"
        handles.append(Line2D([], [], **look, label=name))
    handles.append(Line2D([], [], color=style.GREY, ls=":", label="one MFU of the same rows"))
    axis.set(yscale="log", xlabel="rows that calibrate", ylabel="mean error of the rest (%)")
    ticks = (2, 5, 10, 20, 50)
    axis.set_yticks(ticks, labels=[str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_xticks(sorted(int(n.removeprefix(SCALES)) for n in rows.columns if SCALES in n))
    axis.legend(handles=handles, loc="center left", bbox_to_anchor=(1.0, 0.5))
    style.save(figure, target)


if __name__ == "__main__":
    main()
