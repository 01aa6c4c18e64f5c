"""Answers as figures: speed against headroom with the parts of each step, and bytes by rank."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from rematbench.cli.targets import need_file
from rematbench.evaluate.result import Result
from rematbench.host.chart_style import BLUE, GREEN, GREY, ORANGE, PARTS, PINK, SKY, TEXT_IN
from rematbench.host.console import CommandError
from rematbench.host.table import GIB
from rematbench.inputs.paths import data_dir

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Plot = Annotated[Path | None, Option(metavar="FILE.png", help="Draw the answer (png, pdf or svg).")]
FORMATS = (".pdf", ".png", ".svg")
MOST_BARS = 16
"""The number of rows, the fastest first, whose steps are drawn."""
LEAST_S = 1e-9
"""Parts of fewer seconds are not drawn: they are the rounding error of a difference."""

Row = Mapping[str, Any]


def need_figure(path: Path | None) -> None:
    """CommandError if a figure cannot be written to `path`, or its format is unknown."""
    need_file("--plot", path)
    if path is not None and path.suffix.lower() not in FORMATS:
        raise CommandError(f"--plot {path}: expected a file of {', '.join(FORMATS)}")


def write_plot(rows: Sequence[Row], path: Path) -> None:
    """Draw the rows of a comparison or a search that fit and have a time.  Each row is a point with
    its band as error bar (blue: tied with the first; hollow: outside of the published range;
    square: the best plan of a package `alone`), and a stacked bar of its step's seconds."""
    timed = [row for row in rows if row["status"] == "ok" and row["step_s"] is not None]
    fitting = [row for row in timed if not row["same_as"]]
    bars = fitting[:MOST_BARS]
    lines = sum(max(1.4, row["name"].count("\n") + 1) for row in bars)
    with _figure(path, 1.8 + 0.12 * lines) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(1.0, 1.2))
        _speeds(left, fitting)
        _steps(right, bars)
        figure.suptitle(_title(rows), fontsize=8)
        handles, labels = right.get_legend_handles_labels()
        if handles:
            figure.legend(handles, labels, loc="outside lower center", ncols=5)


def write_ranks(result: Result, title: str, path: Path) -> None:
    """Draw the device bytes of each pipeline rank at its peak by kind, and a line at the bytes that
    a process may use."""
    ranks = result.evaluation.ranks if result.evaluation else ()
    kinds = {
        "parameters": (BLUE, [rank.parameter for rank in ranks]),
        "gradients": (SKY, [rank.gradient_at_peak for rank in ranks]),
        "optimizer": (GREEN, [rank.optimizer for rank in ranks]),
        "activations": (ORANGE, [rank.activation_peak for rank in ranks]),
        "buffers": (PINK, [rank.pools for rank in ranks]),
    }
    with _figure(path, 1.4 + 0.17 * len(ranks)) as figure:
        axes = figure.subplots()
        begin = [0.0] * len(ranks)
        for kind, (colour, sizes) in kinds.items():
            values = [size / GIB for size in sizes]
            begin = _stack(axes, values, begin, label=kind, color=colour)
        axes.axvline(result.problem.usable_bytes / GIB, ls="--", color=GREY, label="usable")
        axes.set_yticks(range(len(ranks)), [f"rank {index}" for index in range(len(ranks))])
        axes.invert_yaxis()
        axes.set_xlabel("allocated bytes at the peak (GiB); reserved bytes decide the verdict")
        figure.suptitle(title, fontsize=8)
        figure.legend(loc="outside lower center", ncols=6)


def _stack(
    axes: "Axes", values: Sequence[float], begin: Sequence[float], **look: Any
) -> list[float]:
    """Draw one segment of each horizontal bar from `begin` on, and return where the segments
    end."""
    axes.barh(range(len(values)), values, left=begin, **look)
    return [start + length for start, length in zip(begin, values, strict=True)]


@contextmanager
def _figure(path: Path, height: float) -> "Iterator[Figure]":
    from matplotlib import rc_context, rc_file  # noqa: PLC0415 (slow to load)
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415

    with rc_context():
        rc_file(data_dir("config") / "figures.mplstyle", use_default_template=False)
        figure = Figure(figsize=(TEXT_IN, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, dpi=200, metadata=None)


def _title(rows: Sequence[Row]) -> str:
    if not rows:
        return "no row"
    job = rows[0]
    names = ("tp", "cp", "pp", "vpp", "dp", "ulysses")
    degrees = "  ".join(f"{key} {job[key]}" for key in names) + f"  zero {job['zero_stage']}"
    alike = all(row[key] == job[key] for row in rows for key in (*names, "zero_stage"))
    return (
        f"{job['model']}, {job['seq_len']:,} tokens, {job['gpus']} x {job['gpu']}, "
        f"{job['system']}\n{degrees if alike else 'every layout'} | simulated, rematbench "
        f"{job['rematbench']}, constants of {job['constants']}"
    )


def _speeds(axes: "Axes", rows: Sequence[Row]) -> None:
    for index, row in enumerate(rows):
        speed = row["tokens_per_s_per_gpu"]
        low, high = row["low_tokens_per_s_per_gpu"], row["high_tokens_per_s_per_gpu"]
        room = row["headroom_bytes"] / GIB
        colour = BLUE if row["tied_with_best"] or not index else GREY
        axes.plot([room, room], [low, high], color=colour, lw=0.6)
        marker = "s" if row.get("alone") else "o"
        axes.plot(room, speed, marker, color=colour, mfc="white" if row["outside"] else colour)
        axes.annotate(
            str(index + 1), (room, speed), xytext=(3, 3), textcoords="offset points", fontsize=7
        )
    axes.set_xlabel("headroom of the fullest device (GiB)")
    axes.set_ylabel("tokens/s/GPU")
    said = "lines: 80 % band; blue: tied with 1; hollow: outside of the published range"
    squares = "; squares: a package alone" if any(row.get("alone") for row in rows) else ""
    axes.set_title(said + squares, fontsize=6, loc="left")
    axes.set_ylim(bottom=0)
    if not rows:
        axes.text(0.5, 0.5, "nothing fits", transform=axes.transAxes, ha="center")


def _steps(axes: "Axes", rows: Sequence[Row]) -> None:
    places = range(len(rows))
    begin = [0.0] * len(rows)
    for part, (colour, label, hatch) in PARTS.items():
        values = [row[f"{part}_s"] or 0.0 for row in rows]
        if any(value > LEAST_S for value in values):
            begin = _stack(axes, values, begin, label=label, color=colour, hatch=hatch, lw=0.3)
    axes.set_yticks(places, [f"{i + 1}  {row['name']}" for i, row in enumerate(rows)], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of the step")
