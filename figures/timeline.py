"""One step on every pipeline rank: compute, copies to and from the host, and exposed waits.

usage: timeline.py TIMELINE.json... FIGURE.pdf
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import style
from matplotlib.axes import Axes
from matplotlib.patches import Patch

LANES = ("compute", "d2h", "h2d")
HEIGHT = {"compute": 1.0, "d2h": 0.4, "h2d": 0.4}
FORWARD, BACKWARD, REBUILD = style.SKY, style.BLUE, style.ORANGE
OTHER, D2H, H2D, EXPOSED = style.GREY, style.GREEN, style.PINK, style.RED
COLORS = {"F": FORWARD, "B": BACKWARD, "W": BACKWARD, "R": REBUILD}
Span = tuple[float, float]
Lanes = dict[tuple[int, str, str], list[Span]]


def main() -> None:
    *sources, target = style.arguments(None, "TIMELINE.json... FIGURE.pdf")
    style.apply()
    traces = [json.loads(Path(source).read_text()) for source in sources]
    ranks = [1 + max(event["pid"] for event in trace["traceEvents"]) for trace in traces]
    figure, axes = plt.subplots(
        len(traces), 1, figsize=(style.TEXT_IN, 0.8 + 0.5 * sum(ranks)), sharex=True,
        squeeze=False, height_ratios=ranks,
    )  # fmt: skip
    for axis, trace, count in zip(axes[:, 0], traces, ranks, strict=True):
        panel(axis, trace, count)
    axes[-1, 0].set_xlabel("seconds")
    axes[0, 0].set_xlim(0, max(trace["otherData"]["step_s"] for trace in traces))
    figure.legend(handles=legend(), loc="outside upper center", ncols=7, columnspacing=1.0)
    style.save(figure, target)


def panel(axis: Axes, trace: dict[str, Any], ranks: int) -> None:
    """One step: a lane of compute and two lanes of copies per rank; the title has the share of
    exposed waits."""
    lanes = spans(trace["traceEvents"])
    for (rank, lane, color), parts in lanes.items():
        draw(axis, rank, lane, color, parts)
    names = [(rank, lane) for rank in range(ranks) for lane in LANES]
    axis.set_yticks([height(rank, lane)[0] for rank, lane in names])
    labels = [f"rank {rank}" if lane == "compute" else lane.upper() for rank, lane in names]
    axis.set_yticklabels(labels)
    for index, label in enumerate(axis.get_yticklabels()):
        label.set_fontsize(7 if index % len(LANES) == 0 else 5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.set_ylim(2.1 * ranks - 0.4, -0.6)
    step = trace["otherData"]["step_s"]
    lost = sum(end - start for key, parts in lanes.items() if key[2] == EXPOSED
               for start, end in parts)  # fmt: skip
    share = f"step {step:.2f} s, exposed waits {100 * lost / ranks / step:.1f} %"
    title = f"{trace['otherData']['title']} (simulated)\n{share}"
    axis.set_title(title, loc="left", fontsize=7)


def legend() -> list[Patch]:
    looks = {
        "forward": FORWARD,
        "backward": BACKWARD,
        "recompute": REBUILD,
        "optimizer, split, join": OTHER,
        "to host": D2H,
        "from host": H2D,
        "exposed wait": EXPOSED,
    }
    return [Patch(color=color, label=label) for label, color in looks.items()]


def spans(events: list[dict[str, Any]]) -> Lanes:
    """Spans in seconds by (rank, lane, colour); neighbours that touch are merged."""
    found: Lanes = defaultdict(list)
    for event in events:
        look = look_of(event)
        if look:
            lane, color = look
            start = event["ts"] * 1e-6
            found[event["pid"], lane, color].append((start, start + event["dur"] * 1e-6))
    return {key: merged(sorted(parts)) for key, parts in found.items()}


def look_of(event: dict[str, Any]) -> tuple[str, str] | None:
    """Lane and colour of an event, or None for an event that is not drawn.  A wait for a copy or a
    collective is exposed; a wait for another rank is pipeline bubble and is not drawn."""
    match event.get("cat"):
        case "compute":
            return "compute", COLORS.get(event["name"][0], OTHER)
        case "d2h":
            return "d2h", D2H
        case "h2d":
            return "h2d", H2D
        case "wait" if "(pp_" not in event["name"] and event["name"] != "waits":
            return "compute", EXPOSED
    return None


def merged(parts: list[Span]) -> list[Span]:
    """Spans without the gaps below a microsecond."""
    out: list[Span] = []
    for start, end in parts:
        if out and start - out[-1][1] < 1e-6:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def height(rank: int, lane: str) -> Span:
    """Centre and height of a lane of a rank on the vertical axis."""
    offsets = {"compute": 0.0, "d2h": 0.78, "h2d": 1.22}
    return 2.1 * rank + offsets[lane], HEIGHT[lane]


def draw(axis: Axes, rank: int, lane: str, color: str, parts: list[Span]) -> None:
    centre, tall = height(rank, lane)
    bars = [(start, end - start) for start, end in parts]
    thin = lane != "compute" or color == EXPOSED
    axis.broken_barh(
        bars, (centre - tall / 2, tall), color=color, lw=0.2 if thin else 0, rasterized=True,
        zorder=3 if thin else 2,
    )  # fmt: skip


if __name__ == "__main__":
    main()
