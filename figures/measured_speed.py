"""Measured MFU and memory of every method, a row per problem, engines by colour and hatch.

If no cell was timed on a GPU, the script says so and draws nothing.

usage: measured_speed.py measured_speed.csv FIGURE.pdf
"""

from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
import style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

GIB = 2**30
HATCHES = ("", "///", "...", "xxx", "\\\\\\")
ROW_IN, BAR_IN = 0.75, 0.2


def main() -> None:
    source, target = style.arguments(2, "measured_speed.csv FIGURE.pdf")
    rows = pd.read_csv(source, dtype={"remark": str})
    rows = rows[rows.step_s.notna()]
    wrong = rows[rows.alike == "NO"]
    rows = rows.drop(wrong.index)
    left = f"; {len(wrong)} omitted: their training results differ" if len(wrong) else ""
    if rows.empty:
        for old in (target.with_suffix(".pdf"), target.with_suffix(".png")):
            old.unlink(missing_ok=True)
        why = "no other cell" if left else "no cell"
        print(f"no figure: {why} was timed on a GPU (a CPU's time is never performance){left}")
        return
    draw(rows, target)
    print(f"{target.name}: {len(rows)} cells that were timed on a GPU{left}")


def draw(rows: pd.DataFrame, target: Path) -> None:
    """Draw MFU at the left (tokens/s/GPU if the GPU's peak is unknown), and bytes at the right."""
    problems = [(str(name), cells) for name, cells in rows.groupby("problem", sort=False)]
    engines = list(rows.engine.unique())
    heights = [len(cells) for _, cells in problems]
    style.apply()
    figure, axes = plt.subplots(
        len(problems),
        2,
        figsize=(style.TEXT_IN, ROW_IN * len(problems) + BAR_IN * sum(heights) + 0.5),
        sharey="row",
        squeeze=False,
        height_ratios=[height + 1 for height in heights],
    )
    for (left, right), (problem, cells) in zip(axes, problems, strict=True):
        left.set_title(problem, loc="left")
        speeds(left, cells, engines)
        memory(right, cells, engines)
    figure.legend(handles=legend(engines), loc="outside upper center", ncols=3)
    style.save(figure, target)


def legend(engines: list[str]) -> list[Artist]:
    """Legend entries of the engines, then of the marks."""
    marks = {"ls": "", "color": style.BLACK}
    return [
        *(
            Patch(facecolor=color, hatch=hatch, edgecolor="white", label=engine)
            for engine, (color, hatch) in looks(engines).items()
        ),
        Line2D([], [], **marks, marker="|", ms=7, label="reserved"),
        Line2D([], [], **marks, marker="o", mfc="none", ms=3.5, label="simulated peak"),
    ]


def looks(engines: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each engine."""
    return {
        engine: (style.PALETTE[i % len(style.PALETTE)], HATCHES[i % len(HATCHES)])
        for i, engine in enumerate(engines)
    }


def speeds(axis: Axes, cells: pd.DataFrame, engines: list[str]) -> None:
    """The speed of each cell as a bar, with the range of its timed steps."""
    known = cells.mfu_causal.notna().all()
    values = 100 * cells.mfu_causal if known else cells.tokens_per_s_per_gpu
    bars(axis, cells.assign(value=values), engines)
    spread = values.to_numpy()
    least, most = cells.step_min_s.to_numpy(), cells.step_max_s.to_numpy()
    middle = cells.step_s.to_numpy()
    places = range(len(cells))
    gaps = (spread - spread * middle / most, spread * middle / least - spread)
    axis.errorbar(spread, places, xerr=gaps, fmt="none", ecolor=style.BLACK, elinewidth=0.6)
    axis.set_xlabel("MFU, causal (%)" if known else "tokens/s/GPU")


def memory(axis: Axes, cells: pd.DataFrame, engines: list[str]) -> None:
    """The measured peak of live bytes of each cell as a bar, its reserved bytes as a line, and its
    simulated peak as a circle."""
    bars(axis, cells.assign(value=cells.peak_device_bytes / GIB), engines)
    places = range(len(cells))
    axis.plot(cells.reserved_bytes / GIB, places, "|", color=style.BLACK, ms=7)
    axis.plot(cells.simulated_peak_bytes / GIB, places, "o", mfc="none", color=style.BLACK, ms=3.5)
    axis.set_xlabel("peak on the fullest rank (GiB)")


def bars(axis: Axes, cells: pd.DataFrame, engines: list[str]) -> None:
    """A horizontal bar of `value` for each cell, from the top."""
    found = looks(engines)
    sns.barplot(
        x=cells.value.to_numpy(), y=[str(number) for number in range(len(cells))],
        hue=cells.engine.to_list(), hue_order=engines, dodge=False, ax=axis, errorbar=None,
        saturation=1, palette={engine: color for engine, (color, _) in found.items()}, legend=False,
    )  # fmt: skip
    for group, (_, hatch) in zip(axis.containers, found.values(), strict=False):
        for bar in group:
            bar.set_hatch(hatch)
            bar.set_edgecolor("white")
    axis.set_yticks(range(len(cells)), cells.method)
    axis.set_ylabel("")


if __name__ == "__main__":
    main()
