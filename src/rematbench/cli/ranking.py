"""Output of `compare` on a terminal: the verdict, one table, and how to read the table."""

import re
from collections.abc import Iterable, Sequence

from msgspec import Struct
from rich.console import Console, ConsoleDimensions, JustifyMethod
from rich.table import Table

from rematbench import __version__
from rematbench.advise.compare.entry import Compared, Entry
from rematbench.advise.compare.judged import Judged, Order
from rematbench.cli.options import Request
from rematbench.cli.show import FRAGMENTS, UNTIMED, heading, nominal
from rematbench.evaluate.band import Band
from rematbench.evidence.bands import peak_band, ratio_band
from rematbench.host.console import GIB, gib, percent, plain, rounded
from rematbench.worlds.packages.flags import Engines

WIDE = 150
"""Terminal width in columns from which names and parts of the step are on one line."""

UNBOUNDED = 1000
"""The terminal width of `--wide`: more columns than any row has."""

LONGEST = 48
"""The most characters of a name on one line."""

RUNS_ON = "runs\non"

MOST_PARTS = 3
"""The most parts of the step in the table's cell (the CSV file has all)."""


class ShownTable(Struct, frozen=True, kw_only=True):
    """The facts that a table needs: the job, the engines that can run its plans, the order (tokens
    to train, price), and the least share of a step that is named."""

    asked: Request
    engines: Engines
    order: Order = Order()
    share: float


class Head(Struct, frozen=True):
    """A column: its heading, whether it holds words, and its place in the order in which columns
    are dropped for room (the highest first; 0: never)."""

    text: str
    words: bool = False
    given_up: int = 0


def heads(shown: ShownTable) -> tuple[Head, ...]:
    """The columns of the table, in order."""
    host = f"{shown.asked.problem.cluster.host_bytes / GIB:.0f}"
    days = (Head("days"),) if shown.order.tokens else ()
    cost = (Head("cost"),) if shown.order.tokens and shown.order.price else ()
    return (
        Head("method", words=True),
        Head("fits", words=True),
        Head("headroom\nGiB"),
        Head("step s"),
        Head("tokens/s\n/GPU"),
        Head("MFU %\ncausal", given_up=3),
        Head("MFU %\ndense", given_up=5),
        Head(f"host GiB\nper node\nof {host}", given_up=1),
        Head("GPU-h\nper 1e9\ntokens", given_up=7),
        *days,
        *cost,
        Head("where the\nstep goes\n%", words=True, given_up=2),
        Head(RUNS_ON, words=True, given_up=6),
        Head("80 %\nband;\noutside", words=True, given_up=4),
    )


class Ranking:
    """Prints a comparison: the table of quick methods, then planners as they end, then notes."""

    def __init__(self, out: Console, shown: ShownTable, *, wide: bool = False) -> None:
        self.out, self.shown = out, shown
        if wide:
            # Width and height, because the width alone of a dumb terminal cannot be set.
            self.out.size = ConsoleDimensions(UNBOUNDED, self.out.height)
        self.folded = out.width < WIDE
        self.said = ""
        self.heads = heads(shown)
        self.kept: list[int] = []
        self.widths: list[int] = []

    def table(self, judged: Sequence[Judged]) -> None:
        """Print heading, verdict and table."""
        for text in heading(self.shown.asked)[:-1]:
            self.out.print(plain(text))
        self.out.print()
        if judged:
            self.said = verdict(judged)
            self.out.print(plain(self.said), style="bold")
            for line in (safest(judged), runnable(judged, self.shown.engines)):
                if line:
                    self.out.print(plain(line))
            self.out.print()
        self._print(self._rows(judged))

    def late(self, judged: Sequence[Judged]) -> None:
        """Print a planner's rows under the same columns."""
        self._print(self._rows(judged))

    def _gap(self) -> int:
        return 1 if self.folded else 2

    def _rows(self, judged: Sequence[Judged]) -> list[list[str]]:
        """The rows of the entries that have a verdict; refusals are lines below the table."""
        return [
            texts(item, self.shown, folded=self.folded)
            for item in judged
            if item.entry.verdict is not None
        ]

    def _print(self, rows: Sequence[Sequence[str]]) -> None:
        """Print rows under the columns that fit beside the first printed rows; no cell is cut."""
        if not rows:
            return
        first, gap = not self.kept, self._gap()
        texts = [[head.text for head in self.heads], *rows] if first else rows
        widths = [max(map(len, "\n".join(each).split("\n"))) for each in zip(*texts, strict=True)]
        if first:
            self.kept = kept(self.heads, widths, self.out.width, gap)
            self.widths = [widths[index] for index in self.kept]
        made = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=first)
        for index, least in zip(self.kept, self.widths, strict=True):
            head = self.heads[index]
            justify: JustifyMethod = "left" if head.words else "right"
            made.add_column(head.text, justify=justify, no_wrap=True, min_width=least)
        for row in rows:
            made.add_row(*(plain(row[index]) for index in self.kept))
        taken = (max(w, widths[i]) for i, w in zip(self.kept, self.widths, strict=True))
        width = self.out.width
        self.out.width = max(width, sum(taken) + gap * (len(self.kept) - 1))
        self.out.print(made, crop=False)
        self.out.width = width

    def notes(
        self, found: Compared, judged: Sequence[Judged], would_fit: Sequence[str] = ()
    ) -> None:
        """Print how to read the table, what it lacks, and the verdict where planners changed it."""
        self.out.print()
        if verdict(judged) != self.said:
            self.out.print(plain(f"{verdict(judged)} (a planner)"), style="bold")
        problem = self.shown.asked.problem
        dropped = [head.text for i, head in enumerate(self.heads) if i not in self.kept]
        if self.kept and dropped:
            names = ", ".join(text.replace("\n", " ") for text in dropped)
            line = f"no room for: {names} (--wide shows them, -o FILE.csv has them)"
            self.out.print(plain(line))
        if RUNS_ON not in dropped:
            self.out.print(plain(f"runs on: {self.shown.engines.legend()}"))
        for text in (*notes(judged), *left_out(found, judged), *nominal(problem)):
            self.out.print(plain(text))
        date = problem.calibration.date
        self.out.print(plain(f"world: simulated (rematbench {__version__}, constants of {date})"))
        if would_fit:
            text = f"WOULD FIT: {'; or '.join(would_fit)}"
            self.out.print(plain(text), style="bold", soft_wrap=True)


def kept(heads: Sequence[Head], widths: Sequence[int], room: int, gap: int) -> list[int]:
    """Indices of the columns that stay: droppable columns go in order until the rest fits."""
    found = list(range(len(heads)))
    early = sorted((i for i in found if heads[i].given_up), key=lambda i: heads[i].given_up)
    while early and sum(widths[i] + gap for i in found) - gap > room:
        found.remove(early.pop())
    return found


def verdict(judged: Sequence[Judged]) -> str:
    """The fastest plan that fits in one line, or the plan that is nearest to fitting."""
    best = judged[0].entry if judged else None
    if best is None or best.verdict is None or best.evaluation is None:
        return "NOTHING FITS: no method has a plan"
    if best.status == "oom":
        return f"NOTHING FITS: nearest is {best.name}, {best.reason}"
    return f"FASTEST: {_said(judged[0])}"


def safest(judged: Sequence[Judged]) -> str:
    """The plan of a tie with most free device memory, in one line; empty if it is the fastest."""
    fitting = [item for item in judged if item.entry.status == "ok" and not item.entry.same_as]
    tie = [item for item in fitting if item.tied or item is fitting[0]]
    if not tie:
        return ""
    most = max(tie, key=lambda item: item.entry.verdict.headroom_bytes if item.entry.verdict else 0)
    return "" if most is tie[0] else f"SAFEST within the tie: {_said(most)}"


def runnable(judged: Sequence[Judged], engines: Engines) -> str:
    """The fastest plan that an engine here runs, in one line; empty if it is the fastest of all, or
    if none runs."""
    fitting = [item for item in judged if item.entry.status == "ok" and not item.entry.same_as]
    runs = (item for item in fitting if item.entry.plan and engines.of(item.entry.plan))
    first = next(runs, None)
    return "" if first is None or first is fitting[0] else f"FASTEST that runs: {_said(first)}"


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


def texts(item: Judged, shown: ShownTable, *, folded: bool) -> list[str]:
    """The cells of one row of the table."""
    entry, order = item.entry, shown.order
    assert entry.evaluation is not None
    assert entry.verdict is not None
    found, fits = entry.evaluation, entry.status == "ok"
    between = "\n" if folded else ", "
    lines = folded_name(entry.name, entry.candidate.methods)
    name = lines if folded or len(entry.name) > LONGEST else entry.name
    device, host = entry.verdict.headroom_bytes, entry.verdict.host_headroom_bytes
    short = host < 0 <= device
    fit = "host" if short else item.fits
    room = gib(host if short else device)
    pinned = f"{found.host_node_bytes / GIB:.1f}"
    asked = bool(order.tokens) + bool(order.tokens and order.price)
    if entry.same_as:
        where = f"plan of {entry.same_as}"
        return [name, fit, room, *["-"] * 4, pinned, *["-"] * (1 + asked), where, "-", "-"]
    if not fits:
        return [name, fit, room, *["-"] * 4, pinned, *["-"] * (4 + asked)]
    assert entry.plan is not None
    totals = (order.days(entry, shown.asked.problem.layout.gpus), order.cost(entry))
    return [
        name,
        fit,
        room,
        f"{found.step_s:.4g}",
        rounded(found.tokens_per_s_per_gpu) + ("=" if item.tied else " "),
        f"{100 * found.mfu_causal:.1f}",
        f"{100 * found.mfu_dense:.1f}",
        pinned,
        rounded(entry.gpu_hours_per_1e9_tokens or 0.0),
        *(rounded(value) for value in totals if value is not None),
        parts(entry, shown.share, between),
        " ".join(name[0].upper() for name in shown.engines.of(entry.plan)) or "-",
        banded(item.band, between if folded else " "),
    ]


def banded(band: Band, between: str = " ") -> str:
    """A band's half-width, and the properties of the job that are outside of published rows."""
    words = (f"+-{100 * band.half_width:.0f} %", *band.outside)
    return between.join(words)


def folded_name(text: str, methods: Iterable[str]) -> str:
    """A composition's name, a line per method and setting; a plus inside a value stays."""
    names = "|".join(re.escape(name) for name in methods)
    lines = re.split(rf"\+(?=(?:{names})(?:[:+]|$))", text)
    return "\n+".join(lines).replace(":", ":\n  ").replace(",", ",\n  ")


def parts(entry: Entry, least: float, between: str = ", ") -> str:
    """The largest parts of the step in percent; parts below the share `least` are left out."""
    assert entry.evaluation is not None
    shares = {part: value / entry.evaluation.step_s for part, value in entry.parts_s.items()}
    largest = sorted((-share, part) for part, share in shares.items() if share >= least)
    return between.join(f"{part} {-100 * share:.0f}" for share, part in largest[:MOST_PARTS])


def notes(judged: Sequence[Judged]) -> list[str]:
    """Lines that explain the table: ties, parts of the step, bands and their evidence."""
    fitting = [item for item in judged if item.entry.status == "ok"]
    if not fitting:
        return []
    lines = [*_tie_lines(fitting)]
    lines.append(
        "where the step goes: compute and recompute of the busiest rank, its pipeline bubble, and "
        "what copies, tp, cp, dp and pp traffic and waiting for the host add to the step (exposed, "
        "not their length)"
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
    return lines + _retry_lines(fitting)


def _retry_lines(fitting: Sequence[Judged]) -> list[str]:
    """Lines that name the rows with allocator retries, and the rows whose retries fail."""
    tried = [(item.entry.name, item.entry.retries) for item in fitting]
    known = [(name, found) for name, found in tried if found is not None and found.per_step]
    counts = [f"{name} {found.per_step:,}" for name, found in known if not found.fails]
    short = [name for name, found in known if found.fails]
    lines = [f"allocator retries a step ({UNTIMED}): {'; '.join(counts)}"] if counts else []
    return lines + ([f"{FRAGMENTS}: {'; '.join(short)}"] if short else [])


def _tie_lines(fitting: Sequence[Judged]) -> list[str]:
    if not any(item.tied and not item.entry.same_as for item in fitting):
        return []
    return [
        f"= a tie: slower than {fitting[0].entry.name} by less than the error of ratios of speeds "
        f"at one layout on one stack ({percent(ratio_band())}, from published pairs)"
    ]


def left_out(found: Compared, judged: Sequence[Judged]) -> list[str]:
    """Lines that name what the table leaves out, with the reasons."""
    lines = [
        f"{item.entry.status}: {item.entry.name}: "
        f"{item.entry.reason.removeprefix(f'{item.entry.name}: ')}"
        for item in judged
        if item.entry.verdict is None
    ]
    lines += [f"unavailable: {path}: {reason}" for path, reason in found.unavailable.items()]
    if found.repeated:
        lines.append(f"left out: {found.repeated} with the plan of a row above")
    return lines
