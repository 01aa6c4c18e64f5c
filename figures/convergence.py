"""Loss curves on real text: every lossless method on top of keep_all, and their deviations.

usage: convergence.py CONVERGENCE.csv FIGURE.pdf
"""

import matplotlib.pyplot as plt
import pandas as pd
import style
from matplotlib.axes import Axes

TABLES = ("convergence",)
BASE = "keep_all"
FLOOR = 1e-9
"""The value at which a deviation of exactly zero is drawn."""
SHOWN = (FLOOR / 2, 4e-4)
EQUAL = (style.GREEN, "o")
DEVIATING = (style.RED, "s")


def main() -> None:
    source, target = style.arguments(2, "CONVERGENCE.csv FIGURE.pdf")
    curves = pd.read_csv(source)
    curves["gap"] = (curves.deviation / (curves.loss - curves.deviation)).abs()
    style.apply()
    figure, axes = plt.subplots(1, 3, figsize=(style.TEXT_IN, 2.6), width_ratios=(5, 5, 4))
    losses(axes[0], curves)
    deviations(axes[1], curves)
    largest(axes[2], curves)
    figure.suptitle(
        "Bytes of the Python standard library, fp32 (executed, CPU)", fontsize=8, x=0.01, ha="left"
    )
    style.save(figure, target)


def losses(axis: Axes, curves: pd.DataFrame) -> None:
    """Losses: keep_all in every layout as wide pale lines, other methods as thin lines on top."""
    for (method, _), curve in curves.groupby(["method", "problem"]):
        look = {"color": style.FAINT, "lw": 4, "zorder": 1} if method == BASE else {}
        axis.plot(curve.step, curve.loss, **({"color": style.BLUE, "lw": 0.8, "zorder": 2} | look))
    axis.plot([], [], color=style.FAINT, lw=4, label=BASE)
    axis.plot([], [], color=style.BLUE, lw=0.8, label=f"{len(_others(curves))} others")
    axis.legend(loc="upper right")
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("loss (nats per byte)")


def deviations(axis: Axes, curves: pd.DataFrame) -> None:
    """Relative deviations from keep_all in the same layout, of the curves that deviate."""
    parted = [(name, curve) for name, curve in _others(curves) if curve.gap.max() > 0]
    for number, (name, curve) in enumerate(parted):
        lw = 0.8 + 1.4 * (len(parted) - 1 - number)
        color = style.PALETTE[(1 + number) % len(style.PALETTE)]
        axis.plot(curve.step, curve.gap.clip(lower=FLOOR), label=name, color=color, lw=lw)
    axis.set_yscale("log")
    axis.set_ylim(*SHOWN)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel(f"relative deviation from keep_all\n({FLOOR:g}: equal)")
    if parted:
        axis.legend(loc="upper left")


def largest(axis: Axes, curves: pd.DataFrame) -> None:
    """The largest deviation of each curve; curves that are bitwise equal are at the left."""
    others = sorted(_others(curves), key=lambda entry: entry[0], reverse=True)
    for row, (_, curve) in enumerate(others):
        gap = curve.gap.max()
        color, marker = DEVIATING if gap > 0 else EQUAL
        axis.plot(max(gap, FLOOR), row, color=color, marker=marker, ls="", clip_on=False)
    axis.set_xscale("log")
    axis.set_xlim(*SHOWN)
    axis.set_xticks([FLOOR, 1e-7, 1e-5], ["bitwise", "$10^{-7}$", "$10^{-5}$"])
    axis.set_xlabel("largest deviation")
    axis.set_yticks(range(len(others)), [name for name, _ in others], fontsize=6)
    axis.grid(axis="y", color=style.PALE, lw=0.5)


def _others(curves: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The names (method and layout) and curves of all methods except keep_all.  A method that was
    trained with several settings also has its first setting in its name."""
    rest = curves[curves.method != BASE]
    groups = list(rest.groupby(["method", "problem"], sort=True))
    plain = [method.split(" (")[0] for (method, _), _ in groups]
    names = [
        method.split(",")[0].replace(" (", ", ") if plain.count(word) > 1 else word
        for word, ((method, _), _) in zip(plain, groups, strict=True)
    ]
    return [
        (f"{name}, {problem.partition('-')[2]}", curve)
        for name, ((_, problem), curve) in zip(names, groups, strict=True)
    ]


if __name__ == "__main__":
    main()
