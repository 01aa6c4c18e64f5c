"""The fastest method of every model, cluster and context length, with its 80 % band.  A square
marks each method that ties with the fastest, in the colour of that method.  A text gives the gain
of the fastest plan of all compositions.

usage: fastest.py matrix_fastest.csv FIGURE.pdf
"""

import textwrap

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

TABLES = ("matrix_fastest",)
OTHERS = "other methods"
SPARE = (style.GREEN, style.PINK)
"""Colours of the two most frequent fastest methods without a colour in `style.STRONG`."""
LETTERS = 19
"""The most letters of a method's name on one line of a cell."""
MIN_GAIN = 0.01
"""Smallest gain of the fastest plan that is shown: the gap that a search may leave unproved."""
FREE, TIED = 0.6, 0.2
"""Strength of the colour of a cell without ties, and of one with ties."""


def main() -> None:
    source, target = style.arguments(2, "matrix_fastest.csv FIGURE.pdf")
    rows = pd.read_csv(source, keep_default_na=False)
    style.apply()
    where = list(dict.fromkeys(zip(rows.model, rows.cluster, strict=True)))
    lengths = sorted(rows.seq_len.unique())
    colors = colors_of(rows)
    shades = pd.DataFrame(index=range(len(where)), columns=range(len(lengths)), dtype=float)
    look = []
    figure, axis = plt.subplots(figsize=(style.TEXT_IN, 0.4 * len(where) + 0.9))
    for row in rows.itertuples():
        down, across = where.index((row.model, row.cluster)), lengths.index(row.seq_len)
        shades.loc[down, across] = len(look)
        look.append(pale(colors.get(row.arm, style.GREY), TIED if row.ties else FREE))
        cell(axis, row, across, down, colors)
    sns.heatmap(
        shades, cmap=ListedColormap(look), cbar=False, linewidths=1.5, linecolor="white", ax=axis
    )
    axis.set_xticklabels([f"{length // 1024}K" for length in lengths])
    axis.set_yticklabels([cluster for _, cluster in where], rotation=0)
    axis.tick_params(length=0, labeltop=True, labelbottom=False)
    axis.set(xlabel="", ylabel="")
    axis.set_title("context length (tokens); tokens/s/GPU (80 % band)")
    models(axis, [model for model, _ in where])
    figure.legend(handles=legend(colors), loc="outside lower center", ncols=4)
    style.save(figure, target)


def colors_of(rows: pd.DataFrame) -> dict[str, str]:
    """Colours of the methods that are fastest in a cell: from `style.STRONG`, and from SPARE."""
    winners = [str(arm) for arm in rows.arm.value_counts().index if arm]
    own = {arm: color for arm, (color, _) in style.STRONG.items() if arm in winners}
    rest = [arm for arm in winners if arm not in own]
    return own | dict(zip(rest, SPARE, strict=False))


def pale(color: str, strength: float) -> tuple[float, ...]:
    """A colour mixed with white: RGB, with the given strength of the colour."""
    return tuple(1.0 - strength * (1.0 - part) for part in to_rgb(color))


def cell(axis: Axes, row: object, across: int, down: int, colors: dict[str, str]) -> None:
    """Draw the texts of a cell, a square per tie, and a frame if published rows cover the job."""
    name = textwrap.fill(row.arm, LETTERS) if row.arm else "nothing fits"
    middle = {"ha": "center", "va": "center", "linespacing": 0.95}
    lift = 0.27 if "\n" in name else 0.22
    axis.text(across + 0.5, down + lift, name, size=5.5, weight="bold", **middle)
    if row.arm:
        rate, low, high = (rate_text(row, key) for key in ("tokens_per_s_per_gpu", "low", "high"))
        axis.text(across + 0.5, down + 0.62, f"{rate} ({low} to {high})", size=5.5, **middle)
    ties = sorted(filter(None, row.ties.split(", ")), key=lambda arm: arm not in colors)
    for place, arm in enumerate(ties):
        at = (across + 0.05 + 0.041 * place, down + 0.78)
        axis.add_patch(Rectangle(at, 0.031, 0.12, fc=colors.get(arm, style.GREY), lw=0, zorder=3))
    words = ", ".join([*(["tight"] if row.fits == "tight" else []), *by_any_plan(row)])
    axis.text(across + 0.95, down + 0.84, words, size=4.5, ha="right", va="center")
    if row.arm and not row.outside:
        frame = {"fill": False, "ec": style.BLACK, "lw": 1.2, "zorder": 4}
        axis.add_patch(Rectangle((across + 0.02, down + 0.04), 0.96, 0.92, **frame))


def by_any_plan(row: object) -> list[str]:
    """The text of the gain of the fastest plan of all, if the gain is above MIN_GAIN."""
    gain = float(row.any_gain or 0.0)
    return [f"search +{100.0 * gain:.0f} %"] if gain > MIN_GAIN else []


def rate_text(row: object, key: str) -> str:
    """Tokens/s/GPU as text: a whole number from 100 on, or else one decimal."""
    value = float(getattr(row, key))
    return f"{value:,.0f}" if value >= 100.0 else f"{value:.1f}"


def models(axis: Axes, names: list[str]) -> None:
    """Draw the name of each model beside its rows, and a line between models."""
    for model in dict.fromkeys(names):
        first, count = names.index(model), names.count(model)
        beside = {"rotation": 90, "ha": "center", "va": "center", "weight": "bold", "size": 7}
        across = axis.get_yaxis_transform()
        axis.text(-0.155, first + count / 2, model, transform=across, **beside)
        if first:
            axis.axhline(first, color=style.GREY, lw=0.8, zorder=5)


def legend(colors: dict[str, str]) -> list[Artist]:
    """The fastest methods by colour, and the marks of a cell."""
    named: list[Artist] = [Patch(fc=pale(color, FREE), label=arm) for arm, color in colors.items()]
    named.append(Patch(fc=pale(style.GREY, FREE), label=OTHERS))
    named.append(Patch(fill=False, ec=style.BLACK, label="inside of the published range"))
    small = {"ls": "", "marker": "s", "ms": 3}
    named.append(Line2D([], [], color=style.GREY, **small, label="a method that ties"))
    return named


if __name__ == "__main__":
    main()
