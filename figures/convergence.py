"""Loss curves on real text: every lossless method on top of keep_all, and how far they part.

usage: convergence.py CONVERGENCE.csv FIGURE.pdf
"""

from typing import Any

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
    """keep_all as a wide pale line, the others on top of it."""
    base = curves[curves.method == BASE]
    axis.plot(base.step, base.loss, color=style.PALE, lw=6, label=BASE)
    others = _others(curves)
    for number, (name, curve) in enumerate(others):
        axis.plot(curve.step, curve.loss, label=name, **_line(number, len(others)))
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats per byte)")


def deviations(axis: Axes, curves: pd.DataFrame) -> None:
    """Relative deviation from keep_all; exact equality lies on the floor."""
    base = curves[curves.method == BASE].loss.to_numpy()
    others = _others(curves)
    for number, (_, curve) in enumerate(others):
        gap = np.maximum(np.abs(curve.deviation.to_numpy()) / base, FLOOR)
        axis.plot(curve.step, gap, **_line(number, len(others)))
    axis.set_yscale("log")
    axis.set_ylim(FLOOR / 2, None)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel(f"relative deviation\n(drawn at {FLOOR:g}: equal)")


def _others(curves: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    rest = curves[curves.method != BASE]
    return [(str(name), curve) for name, curve in rest.groupby("method", sort=True)]


def _line(number: int, count: int) -> dict[str, Any]:
    """Later lines are thinner, so that equal curves show one on top of another."""
    color = style.PALETTE[number % len(style.PALETTE)]
    return {"color": color, "lw": 0.6 + 0.7 * (count - 1 - number), "solid_capstyle": "butt"}


if __name__ == "__main__":
    main()
