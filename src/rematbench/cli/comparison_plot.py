"""A comparison as a figure: speed against headroom, and the parts of each step."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematbench.host.chart_style import BLUE, PARTS, RC, TEXT_IN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GIB = 2**30
FORMATS = (".pdf", ".png", ".svg")
MOST_BARS = 16
"""How many rows have their steps drawn; the fastest come first."""
LEAST_S = 1e-9
"""Parts of fewer seconds are not drawn: they are the rounding error of a difference."""

Row = Mapping[str, Any]


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a comparison that fit and have a time. Each row is a point with its band as
    error bar (hollow where the job lies outside of what was published), and a stacked bar of its
    step's seconds."""
    from matplotlib import rc_context  # noqa: PLC0415 (slow to load)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    timed = [row for row in rows if row["status"] == "ok" and row["step_s"] is not None]
    fitting = [row for row in timed if not row["same_as"]]
    bars = fitting[:MOST_BARS]
    with rc_context(RC):
        figure = Figure(figsize=(TEXT_IN, 1.8 + 0.17 * len(bars)), layout="constrained")
        FigureCanvasAgg(figure)
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
        _speeds(left, fitting)
        _steps(right, bars)
        figure.suptitle(_title(rows), fontsize=8)
        handles, labels = right.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=5)
        figure.savefig(path, dpi=200, metadata=None)


def _title(rows: Sequence[Row]) -> str:
    if not rows:
        return "no row"
    job = rows[0]
    degrees = "  ".join(f"{key} {job[key]}" for key in ("tp", "cp", "pp", "vpp", "dp", "ulysses"))
    return (
        f"{job['model']}, {job['seq_len']:,} tokens, {job['gpus']} x {job['gpu']}, "
        f"{job['system']}\n{degrees}  zero {job['zero_stage']} | simulated, rematbench "
        f"{job['rematbench']}, constants of {job['constants']}"
    )


def _speeds(axes: "Axes", rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        speed = row["tokens_per_s_per_gpu"]
        low, high = row["low_tokens_per_s_per_gpu"], row["high_tokens_per_s_per_gpu"]
        room = row["headroom_bytes"] / GIB
        axes.plot([room, room], [low, high], color=BLUE, lw=0.6)
        axes.plot(room, speed, "o", color=BLUE, mfc="white" if row["outside"] else BLUE)
        axes.annotate(
            str(index + 1), (room, speed), xytext=(3, 3), textcoords="offset points", fontsize=7
        )
    axes.set_xlabel("headroom of the fullest device (GiB)")
    axes.set_ylabel("tokens/s/GPU")
    axes.set_title("lines: 80 % band; hollow: outside of the published range", fontsize=7)
    axes.set_ylim(bottom=0)
    if not rows:
        axes.text(0.5, 0.5, "nothing fits", transform=axes.transAxes, ha="center")


def _steps(axes: "Axes", rows: Sequence[Row]) -> None:
    places = range(len(rows))
    begin = [0.0] * len(rows)
    for part, (colour, label, hatch) in PARTS.items():
        values = [row[f"{part}_s"] or 0.0 for row in rows]
        if any(value > LEAST_S for value in values):
            axes.barh(places, values, left=begin, label=label, color=colour, hatch=hatch, lw=0.3)
        begin = [a + b for a, b in zip(begin, values, strict=True)]
    axes.set_yticks(places, [f"{i + 1}  {row['name']}" for i, row in enumerate(rows)], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the step")
