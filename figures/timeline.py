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
from matplotlib.figure import Figure
from matplotlib.patches import Patch

LANES = ("compute", "d2h", "h2d")
HEIGHT = {"compute": 1.0, "d2h": 0.4, "h2d": 0.4}
FORWARD, BACKWARD, REBUILD = style.SKY, style.BLUE, style.ORANGE
OTHER, D2H, H2D, EXPOSED = style.GREY, style.GREEN, style.PINK, style.RED
COLORS = {"F": FORWARD, "B": BACKWARD, "W": BACKWARD, "R": REBUILD}
Span = tuple[float, float]
Lanes = dict[tuple[int, str, str], list[Span]]
Trace = dict[str, Any]
MOST_WHOLE = 2
"""All ranks are drawn for at most so many steps; for more steps, the first and the last rank."""
MIDDLE, PART = 0.3, 0.05
"""Where the enlarged part begins, and its length, as shares of the longest step."""


def main() -> None:
    *sources, target = style.arguments(None, "TIMELINE.json... FIGURE.pdf")
    style.apply()
    traces = [json.loads(Path(source).read_text()) for source in sources]
    figure = compared(traces) if len(traces) > MOST_WHOLE else whole(traces)
    figure.legend(handles=legend(), loc="outside upper center", ncols=7, columnspacing=1.0)
    style.save(figure, target)


def whole(traces: list[Trace]) -> Figure:
    """All ranks of few steps, one above the other."""
    ranks = [list(range(count(trace))) for trace in traces]
    figure, axes = plt.subplots(
        len(traces), 1, figsize=(style.TEXT_IN, 0.8 + 0.5 * sum(map(len, ranks))), sharex=True,
        squeeze=False, height_ratios=[*map(len, ranks)],
    )  # fmt: skip
    for axis, trace, shown in zip(axes[:, 0], traces, ranks, strict=True):
        panel(axis, trace, shown, LANES)
    axes[-1, 0].set_xlabel("seconds")
    axes[0, 0].set_xlim(0, max(trace["otherData"]["step_s"] for trace in traces))
    return figure


def compared(traces: list[Trace]) -> Figure:
    """The first and the last rank of many steps: the whole step, and an enlarged part that shows
    single passes.  Steps without copies have no lanes for them."""
    lanes = [used(trace) for trace in traces]
    heights = [1.0 + 0.9 * (len(each) > 1) for each in lanes]
    figure, axes = plt.subplots(
        len(traces), 2, figsize=(style.TEXT_IN, 0.8 + 0.66 * sum(heights)), squeeze=False,
        sharex="col", height_ratios=heights, width_ratios=(1.25, 1.0),
    )  # fmt: skip
    longest = max(trace["otherData"]["step_s"] for trace in traces)
    for (left, right), trace, own in zip(axes, traces, lanes, strict=True):
        shown = sorted({0, count(trace) - 1})
        panel(left, trace, shown, own)
        panel(right, trace, shown, own, labelled=False)
    axes[0, 0].set_xlim(0, longest)
    axes[0, 1].set_xlim(MIDDLE * longest, (MIDDLE + PART) * longest)
    axes[0, 1].set_title(f"{PART * longest:.1f} s of it", loc="left", fontsize=7)
    for axis in axes[-1]:
        axis.set_xlabel("seconds")
    return figure


def count(trace: Trace) -> int:
    """The number of ranks of a step."""
    return 1 + max(event["pid"] for event in trace["traceEvents"])


def used(trace: Trace) -> tuple[str, ...]:
    """The lanes on which something happens."""
    busy = {lane for _, lane, _ in spans(trace["traceEvents"])}
    return tuple(lane for lane in LANES if lane in busy)


def panel(
    axis: Axes, trace: Trace, ranks: list[int], drawn: tuple[str, ...], *, labelled: bool = True
) -> None:
    """One step: a lane of compute and, if they are `drawn`, lanes of copies for each of the ranks;
    the title (if `labelled`) has the share of exposed waits of all ranks."""
    lanes = spans(trace["traceEvents"])
    for (rank, lane, color), parts in lanes.items():
        if rank in ranks and lane in drawn:
            draw(axis, height(ranks.index(rank), lane, drawn), lane, color, parts)
    names = [(place, lane) for place in range(len(ranks)) for lane in drawn]
    axis.set_yticks([height(place, lane, drawn)[0] for place, lane in names])
    labels = [f"rank {ranks[at]}" if lane == "compute" else lane.upper() for at, lane in names]
    axis.set_yticklabels(labels if labelled else [""] * len(labels))
    for label, (_, lane) in zip(axis.get_yticklabels(), names, strict=True):
        label.set_fontsize(7 if lane == "compute" else 5)
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    axis.set_ylim(pitch(drawn) * len(ranks) - 0.4, -0.6)
    if not labelled:
        return
    step = trace["otherData"]["step_s"]
    lost = sum(end - start for key, parts in lanes.items() if key[2] == EXPOSED
               for start, end in parts)  # fmt: skip
    share = f"step {step:.2f} s, exposed waits {100 * lost / count(trace) / step:.1f} %"
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
    """Spans, with those joined whose gap is below a microsecond."""
    out: list[Span] = []
    for start, end in parts:
        if out and start - out[-1][1] < 1e-6:
            out[-1] = (out[-1][0], max(end, out[-1][1]))
        else:
            out.append((start, end))
    return out


def pitch(drawn: tuple[str, ...]) -> float:
    """The distance between two ranks on the vertical axis."""
    return 2.1 if len(drawn) > 1 else 1.25


def height(place: int, lane: str, drawn: tuple[str, ...]) -> Span:
    """Centre and height of a lane of the rank at a place on the vertical axis."""
    offsets = {"compute": 0.0, "d2h": 0.78, "h2d": 1.22}
    return pitch(drawn) * place + offsets[lane], HEIGHT[lane]


def draw(axis: Axes, where: Span, lane: str, color: str, parts: list[Span]) -> None:
    """Bars of one colour at a centre and a height."""
    centre, tall = where
    bars = [(start, end - start) for start, end in parts]
    thin = lane != "compute" or color == EXPOSED
    axis.broken_barh(
        bars, (centre - tall / 2, tall), color=color, lw=0.2 if thin else 0, rasterized=True,
        zorder=3 if thin else 2,
    )  # fmt: skip


if __name__ == "__main__":
    main()
