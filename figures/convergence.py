"""Loss curves on real text: every lossless method on top of keep_all, and how far they part.

usage: convergence.py CONVERGENCE.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import style
from matplotlib.axes import Axes

BASE = "keep_all"
FLOOR = 1e-9
"""Where a deviation of exactly zero is drawn."""


def main() -> None:
    source, target = style.arguments(2, "CONVERGENCE.csv FIGURE.pdf")
    curves = pd.read_csv(source)
    style.apply()
    figure, (left, right) = plt.subplots(1, 2, figsize=(style.TEXT_IN, 2.6))
    losses(left, curves)
    deviations(right, curves)
    figure.suptitle(
        "Bytes of the Python standard library, fp32 (executed, CPU)", fontsize=8, x=0.01, ha="left"
    )
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    style.save(figure, target)


def losses(axis: Axes, curves: pd.DataFrame) -> None:
    """keep_all as a wide pale line, the others as thin lines on top of it."""
    base = curves[curves.method == BASE]
    axis.plot(base.step, base.loss, color=style.PALE, lw=5, label=BASE)
    for number, (name, curve) in enumerate(_others(curves)):
        color = style.PALETTE[number % len(style.PALETTE)]
        axis.plot(curve.step, curve.loss, color=color, lw=0.8, ls=_dash(number), label=name)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats per byte)")


def deviations(axis: Axes, curves: pd.DataFrame) -> None:
    """Relative deviation from keep_all; exact equality lies on the floor."""
    base = curves[curves.method == BASE].loss.to_numpy()
    for number, (_, curve) in enumerate(_others(curves)):
        gap = np.maximum(np.abs(curve.deviation.to_numpy()) / base, FLOOR)
        color = style.PALETTE[number % len(style.PALETTE)]
        axis.plot(curve.step, gap, color=color, lw=0.8, ls=_dash(number))
    axis.set_yscale("log")
    axis.set_ylim(FLOOR / 2, None)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel(f"|loss - keep_all| / keep_all ({FLOOR:g}: equal)")


def _others(curves: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    rest = curves[curves.method != BASE]
    return [(str(name), curve) for name, curve in rest.groupby("method", sort=True)]


def _dash(number: int) -> str:
    return ("-", "--", ":", "-.")[number % 4]


if __name__ == "__main__":
    main()
