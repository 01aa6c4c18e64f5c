"""Mean error of a stack's other rows against the number of rows that calibrate the stack, and the
error of one MFU of the same rows; a colour per stack.

usage: calibrated.py calibrated.csv FIGURE.pdf
"""

import re
from itertools import cycle
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.lines import Line2D

TABLES = ("calibrated",)
SCALES, ONE_MFU = "after_", "mfu_"


def source_looks(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Colour and marker of each stack: a colour for each source, hollow markers for its second
    stack."""
    names = [str(source).split()[0] for source in rows.source]
    colors = dict(zip(dict.fromkeys(names), cycle(style.PALETTE), strict=False))
    return [
        {
            "color": colors[name],
            "marker": marker,
            "ms": 3.5,
            "mfc": "white" if name in names[:at] else colors[name],
        }
        for at, (name, marker) in enumerate(zip(names, cycle(style.MARKERS), strict=False))
    ]


def labels(rows: pd.DataFrame) -> list[str]:
    """Source and cluster of each stack; stacks with equal names also have the source's words in
    brackets."""
    names = [
        f"{str(row.source).split()[0].rstrip(',')}, {row.cluster}" for row in rows.itertuples()
    ]
    brackets = [re.search(r"\(([^)]*)\)", str(source)) for source in rows.source]
    return [
        f"{name}, {bracket[1]}" if bracket and names.count(name) > 1 else name
        for name, bracket in zip(names, brackets, strict=True)
    ]


def main() -> None:
    source, target = style.arguments(2, "calibrated.csv FIGURE.pdf")
    rows = pd.read_csv(source)
    style.apply()
    figure, axis = plt.subplots(figsize=(style.TEXT_IN, 2.6))
    handles = []
    looks = source_looks(rows)
    for look, label, (_, row) in zip(looks, labels(rows), rows.iterrows(), strict=True):
        for prefix, line in ((SCALES, "-"), (ONE_MFU, ":")):
            errors = row[[name for name in rows.columns if name.startswith(prefix)]].astype(float)
            counts = [int(name.removeprefix(prefix)) for name in errors.index]
            axis.plot(counts, 100 * errors.to_numpy(), ls=line, **look)
        handles.append(Line2D([], [], **look, label=f"{label} ({row.rows} rows)"))
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
