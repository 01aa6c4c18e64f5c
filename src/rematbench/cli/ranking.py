"""A comparison for a person: the verdict, one table, and how to read it."""

import re
from collections.abc import Sequence

from msgspec import Struct
from rich.console import Console
from rich.table import Column, Table

from rematbench import __version__
from rematbench.choose.entry import Comparison, Entry
from rematbench.cli.options import Request
from rematbench.cli.show import heading, nominal
from rematbench.host.console import gib, percent, plain, rounded
from rematbench.published.bands import Band, peak_band, ratio_band

WIDE = 150
"""From this width on names and parts of the step stand on one line."""

LONGEST = 48
"""Characters of a name that stand on one line."""

MOST_PARTS = 3
"""Parts of the step named in the table (the CSV has all)."""

HEADS = (
    "method",
    "fits",
    "headroom\nGiB",
    "step s",
    "tokens/s\n/GPU",
    "MFU %\ncausal",
    "MFU %\ndense",
    "GPU-h\nper 1e9\ntokens",
    "where the\nstep goes\n%",
    "80 %\nband;\noutside",
)
TEXTS = (0, 1, 8, 9)


class Judged(Struct, frozen=True):
    """An entry, the band of its speed, whether it fits (yes, tight, no), and whether it is within
    the error of ratios of the best (`tied`)."""

    entry: Entry
    band: Band
    fits: str
    tied: bool = False


class Ranking:
    """A comparison as it is printed: the table of what is quick, planners as they end, notes."""

    def __init__(self, out: Console, asked: Request, share: float) -> None:
        self.out, self.asked, self.share = out, asked, share
        self.wide = out.width >= WIDE
        self.said, self.widths = "", [0] * len(HEADS)

    def table(self, judged: Sequence[Judged]) -> None:
        """Heading, verdict and table."""
        for text in heading(self.asked)[:3]:
            self.out.print(plain(text))
        self.out.print()
        self.said = verdict(judged)
        self.out.print(plain(self.said), style="bold")
        if line := safest(judged):
            self.out.print(plain(line))
        self.out.print()
        made = table(judged, self.share, wide=self.wide)
        self.widths = [_width(self.out, column) for column in made.columns]
        self.out.print(made)

    def late(self, judged: Sequence[Judged]) -> None:
        """A planner's row, under the same columns."""
        row = table(judged, self.share, wide=self.wide, widths=self.widths)
        if row.row_count:
            self.out.print(row)

    def notes(
        self, found: Comparison, judged: Sequence[Judged], would_fit: Sequence[str] = ()
    ) -> None:
        """How to read the table, what is not in it, and the verdict where planners changed it."""
        self.out.print()
        if verdict(judged) != self.said:
            self.out.print(plain(f"{verdict(judged)} (a planner)"), style="bold")
        for text in (*notes(judged), *left_out(found, judged), *nominal(self.asked.problem)):
            self.out.print(plain(text))
        date = self.asked.problem.calibration.date
        self.out.print(plain(f"world: simulated (rematbench {__version__}, constants of {date})"))
        if would_fit:
            text = f"WOULD FIT: {'; or '.join(would_fit)}"
            self.out.print(plain(text), style="bold", soft_wrap=True)


def _width(out: Console, column: Column) -> int:
    """Characters that a column takes, padding apart."""
    return max(out.measure(text).maximum for text in (column.header, *column.cells))


def verdict(judged: Sequence[Judged]) -> str:
    """The best in one line, or the nearest to fitting."""
    best = judged[0].entry if judged else None
    if best is None or best.verdict is None or best.evaluation is None:
        return "NOTHING FITS: no method has a plan"
    if best.status == "oom":
        return f"NOTHING FITS: nearest is {best.name}, {best.reason}"
    return f"FASTEST: {_said(judged[0])}"


def safest(judged: Sequence[Judged]) -> str:
    """The one of a tie that leaves most of the device free, where it is not the fastest."""
    fitting = [item for item in judged if item.entry.status == "ok" and not item.entry.same_as]
    tie = [item for item in fitting if item.tied or item is fitting[0]]
    if not tie:
        return ""
    most = max(tie, key=lambda item: item.entry.verdict.headroom_bytes if item.entry.verdict else 0)
    return "" if most is tie[0] else f"SAFEST within the tie: {_said(most)}"


def _said(item: Judged) -> str:
    found, room = item.entry.evaluation, item.entry.verdict
    assert found is not None
    assert room is not None
    speed, band = found.tokens_per_s_per_gpu, item.band
    return (
        f"{item.entry.name}, {rounded(speed)} tokens/s/GPU ({rounded(band.low(speed))} to "
        f"{rounded(band.high(speed))}), {gib(room.headroom_bytes)} GiB left"
        f"{', tight' if item.fits == 'tight' else ''}"
    )


def table(
    judged: Sequence[Judged], share: float, *, wide: bool, widths: Sequence[int] = ()
) -> Table:
    """Fitting plans by speed, then those that do not fit; refusals are lines below.  `widths`: of
    the columns of the table that these rows continue, which has the heads."""
    padding = (0, 2 if wide else 1, 0, 0)
    made = Table(box=None, pad_edge=False, padding=padding, show_header=not widths)
    for index, head in enumerate(HEADS):
        made.add_column(
            head,
            justify="left" if index in TEXTS else "right",
            no_wrap=True,
            min_width=widths[index] if widths else None,
        )
    for item in judged:
        if item.entry.verdict is not None:
            made.add_row(*(plain(text) for text in texts(item, share, wide=wide)))
    return made


def texts(item: Judged, share: float, *, wide: bool) -> list[str]:
    """The cells of one row."""
    entry = item.entry
    assert entry.evaluation is not None
    assert entry.verdict is not None
    found, fits = entry.evaluation, entry.status == "ok"
    name = entry.name if wide and len(entry.name) <= LONGEST else _folded(entry)
    device, host = entry.verdict.headroom_bytes, entry.verdict.host_headroom_bytes
    short = host < 0 <= device
    fit = "host" if short else item.fits
    room = gib(host if short else device)
    if entry.same_as:
        return [name, fit, room, *["-"] * 5, f"plan of {entry.same_as}", "-"]
    if not fits:
        return [name, fit, room, *["-"] * 7]
    return [
        name,
        fit,
        room,
        f"{found.step_s:.4g}",
        rounded(found.tokens_per_s_per_gpu) + ("=" if item.tied else " "),
        f"{100 * found.mfu_causal:.1f}",
        f"{100 * found.mfu_dense:.1f}",
        rounded(entry.gpu_hours_per_1e9_tokens or 0.0),
        parts(entry, share, ", " if wide else "\n"),
        banded(item.band, " " if wide else "\n"),
    ]


def banded(band: Band, between: str = " ") -> str:
    """The half-width, and what of the job nobody published."""
    words = (f"+-{100 * band.half_width:.0f} %", *band.outside)
    return between.join(words)


def _folded(entry: Entry) -> str:
    """A name with a line for each method and its settings; a plus inside a value stays."""
    methods = "|".join(re.escape(name) for name in entry.candidate.methods)
    lines = re.split(rf"\+(?=(?:{methods})(?:[:+]|$))", entry.name)
    return "\n+".join(lines).replace(":", ":\n  ").replace(",", ",\n  ")


def parts(entry: Entry, least: float, between: str = ", ") -> str:
    """The step's largest parts in percent, those of at least a share."""
    assert entry.evaluation is not None
    shares = {part: value / entry.evaluation.step_s for part, value in entry.parts_s.items()}
    largest = sorted((-share, part) for part, share in shares.items() if share >= least)
    return between.join(f"{part} {-100 * share:.0f}" for share, part in largest[:MOST_PARTS])


def notes(judged: Sequence[Judged]) -> list[str]:
    """How to read the table: ties, parts, rules of the evidence."""
    fitting = [item for item in judged if item.entry.status == "ok"]
    if not fitting:
        return []
    lines = [*_tie_lines(fitting)]
    lines.append(
        "where the step goes: compute and recompute of the busiest rank, its pipeline bubble, and "
        "what copies, tp, cp, dp and pp traffic add to the step (exposed, not their length)"
    )
    outside = dict.fromkeys(w for item in fitting for w in item.band.outside.values())
    lines.append(
        "80 % band: of published speeds, 80 % lie as near to what constants say that never saw "
        "their source, where as many things lie outside of what others published"
    )
    lines += [f"outside: {'; '.join(outside)}"] if outside else []
    lines.append(
        "tight: less left than published peaks lie above predicted ones "
        f"({percent(peak_band())}, 80 % of them)"
    )
    return lines


def _tie_lines(fitting: Sequence[Judged]) -> list[str]:
    if not any(item.tied and not item.entry.same_as for item in fitting):
        return []
    return [
        f"= a tie: slower than {fitting[0].entry.name} by less than the error of ratios of speeds "
        f"at one layout on one stack ({percent(ratio_band())}, from published pairs)"
    ]


def left_out(found: Comparison, judged: Sequence[Judged]) -> list[str]:
    """What is not in the table, and why."""
    lines = [
        f"{item.entry.status}: {item.entry.name}: {item.entry.reason}"
        for item in judged
        if item.entry.verdict is None
    ]
    lines += [f"unavailable: {path}: {reason}" for path, reason in found.unavailable.items()]
    if found.repeated:
        lines.append(f"left out: {found.repeated} with the plan of a row above")
    return lines
