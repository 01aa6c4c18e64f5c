"""The content of the report: the first screen's answers, then sections of tables and figures.

Tables of other worlds (traced, executed) and of later commands appear once their files exist; a
missing file is not an error.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import get_args

import msgspec
from msgspec import Struct

from rematbench.evidence.accuracy import FEWEST_OOMS
from rematbench.evidence.bands import POOLED
from rematbench.evidence.published.sheets import read_sheet
from rematbench.evidence.quantiles import LEVEL
from rematbench.host.table import TableText
from rematbench.inputs.configfile import convert, read_mapping
from rematbench.inputs.paths import data_dir
from rematbench.plan import Schedule
from rematbench.workload import Precision

GPUS = ("H800", "A800", "A100", "H100", "H200")
GPU_NAME = re.compile(r"^NVIDIA ")
"""The maker's name in front of the GPU's name."""
NOTABLE = 3
"""Gains below this percentage of a step's seconds are not counted in the text."""
DEVICE = re.compile(r'"device": ?"NVIDIA (\w+)')
"""The GPU's name in a record, as its driver reports it."""


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the page: its tables and figures by pattern, in this order. The figures of a
    pattern come before its tables. An `open` section is visible without a click."""

    title: str
    parts: tuple[str, ...]
    text: str = ""
    open: bool = True


class ReportConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/report.yaml. `answer`: the figure of the first screen; `trust`: the
    tables next to that figure; `folded`: columns of tables that a click shows."""

    title: str
    question: str
    answer: str
    trust: Section
    sections: tuple[Section, ...]
    captions: dict[str, str]
    not_modelled: tuple[str, ...]
    folded: tuple[str, ...] = ()

    def caption(self, name: str) -> str:
        return self.captions.get(name, name.replace("_", " "))


class Part(Struct, frozen=True, kw_only=True):
    """One table (as printed) or figure of the page. `source` is the path of the raw file and
    `shown` the path of the displayed file, both below the results folder."""

    name: str
    path: Path
    shown: str
    source: str
    table: TableText | None = None

    @property
    def command(self) -> str:
        return f"./bench reproduce results/{self.source}"


FilledSection = tuple[Section, tuple[Part, ...]]


class Page(Struct, frozen=True, kw_only=True):
    """The content of the page. The first screen has sentences on what was measured, on the outcome,
    on the coverage of bands and on what was never measured, a list of facts, and the first two
    sections of `filled`; the other sections follow."""

    config: ReportConfig
    measured: str
    outcome: str
    trusted: str
    unmeasured: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    filled: tuple[FilledSection, ...]

    @property
    def answer(self) -> FilledSection:
        """The section of the figure that answers the question."""
        return self.filled[0]

    @property
    def trust(self) -> FilledSection:
        """The section that says how far to trust the answer."""
        return self.filled[1]

    @property
    def sections(self) -> list[FilledSection]:
        """The sections after the first screen that have a part or a text."""
        return [(section, parts) for section, parts in self.filled[2:] if parts or section.text]


def load_report() -> ReportConfig:
    label = "config/report.yaml"
    return convert(read_mapping(data_dir("config") / "report.yaml", label), ReportConfig, label)


def gather(config: ReportConfig, results: Path) -> tuple[FilledSection, ...]:
    """The parts of the first screen and of each section below a results folder. Each part
    appears once, in the first section that has a pattern for it."""
    pool = [
        *_parts(results, "figures", ".png", ".pdf"),
        *_parts(results, "tables", ".json", ".csv"),
    ]
    made = []
    first = Section(title=config.question, parts=(config.answer,))
    for section in (first, config.trust, *config.sections):
        parts: dict[Path, Part] = {}
        for pattern in section.parts:
            parts |= {part.path: part for part in pool if fnmatch.fnmatch(part.name, pattern)}
        pool = [part for part in pool if part.path not in parts]
        made.append((section, tuple(parts.values())))
    return tuple(made)


def _parts(results: Path, folder: str, shown: str, raw: str) -> Iterable[Part]:
    """Every table or figure below results/*/FOLDER, those of the paper first."""
    paths = sorted(results.glob(f"*/{folder}/*{shown}"))
    for path in sorted(paths, key=lambda p: p.parts[-3] != "paper"):
        if path.parts[-3] in ("expected", "smoke"):
            continue
        where = path.relative_to(results)
        table = None
        if folder == "tables":
            table = msgspec.json.decode(path.read_bytes(), type=TableText)
        yield Part(
            name=path.stem,
            path=path,
            shown=where.as_posix(),
            source=where.with_suffix(raw).as_posix(),
            table=table,
        )


def what_was_measured(tables: Path) -> str:
    """Sentences on searched plans that ran on GPUs: how much slower the first plan of a search is
    than the fastest measured plan, how much slower the best plan without a search is, and the mean
    and largest absolute errors of bytes and seconds (of the plans of gpu_layers too)."""
    advice, plans = _rows(tables / "gpu_advice.csv"), _rows(tables / "gpu_searched.csv")
    if not advice or not plans:
        return ""
    every = [*plans, *_rows(tables / "gpu_layers.csv")]
    lost, gains = _in_percent(advice, "lost"), _in_percent(advice, "gain")
    allocated = _in_percent(every, "allocated_bytes_error")
    steps = _in_percent(every, "step_s_error")
    beside = [int(row["measured"]) for row in advice]
    cards = sorted({GPU_NAME.sub("", row["device"]).split()[0] for row in advice})
    return (
        f"{len(advice)} searches on single GPUs ({' and '.join(cards)}), with every prediction "
        f"committed before its run: the best plan without a search took {min(gains):.0f} to "
        f"{max(gains):.0f} % longer than the first plan of the search ({NOTABLE} % or more in "
        f"{sum(gain >= NOTABLE for gain in gains)} of {len(gains)} jobs), which was "
        f"{mean(lost):.2f} % slower than the fastest of the {min(beside)} to {max(beside)} plans "
        f"measured of a job (mean; worst {max(lost):.1f} %), no more than noise: most plans ran "
        "once, and the same plan on another day took 0.6 to 1.5 % longer. Of all "
        f"{len(steps)} steps measured, "
        f"allocated bytes were {mean(allocated):.2f} % off (worst {max(allocated):.1f} %) and "
        f"seconds {mean(steps):.1f} % (worst {max(steps):.1f} %)."
    )


def _in_percent(rows: Sequence[Mapping[str, str]], column: str) -> list[float]:
    return [100 * abs(float(row[column])) for row in rows if row[column]]


def whether_bands_hold(tables: Path) -> str:
    """A sentence on the share of published rows inside bands learnt without their source."""
    pooled = {row["source"]: row for row in _rows(tables / "bands.csv")}
    if not (weighed := [pooled[name] for name in POOLED if name in pooled]):
        return ""
    shares = [
        f"{100 * float(row['inside']):.0f} % if {row['source'].removeprefix('all, ')}"
        for row in weighed
    ]
    return (
        f"A band should contain {100 * LEVEL:.0f} % of the speeds. Of the rows of a source, bands "
        f"learnt from all other sources contain {', '.join(shares)} ({int(weighed[0]['rows']):,} "
        "rows). A choice of layout is scored by the speed that it loses."
    )


def what_is_not_modelled(config: ReportConfig) -> list[str]:
    """What the model does not cover: precisions and schedules other than the known ones, then the
    sentences of config/report.yaml."""
    said = {"Precisions": get_args(Precision), "Schedules": get_args(Schedule)}
    words = [f"{name} other than {', '.join(known)}." for name, known in said.items()]
    return [*words, *config.not_modelled]


def never_measured(tables: Path, results: Path) -> tuple[str, ...]:
    """Sentences on GPUs that were not used, on winners outside the published range, and on why the
    page promises no success rate for its verdicts on memory."""
    winners = _rows(tables / "matrix_fastest.csv")
    outside = [row["outside"].split(", ") for row in winners if row["outside"]]
    counts = Counter(word for words in outside for word in words)
    told = ", ".join(f"{word} in {count}" for word, count in counts.most_common())
    strange = (
        f"{len(outside)} of the {len(winners)} winners above lie outside of the published range: "
        f"{told}."
    )
    verdicts = _rows(tables / "oom_verdicts.csv")
    ooms = sum(int(row["cells"]) for row in verdicts if row["published"] == "oom")
    few = (
        f"{ooms} published cells ran out of memory. The page reports whether a job fits together "
        "with its margin, but promises no success rate for this."
    )
    return (
        no_gpu_sentence(results),
        *([strange] if outside else []),
        *([few] if verdicts and ooms < FEWEST_OOMS else []),
    )


def _rows(path: Path) -> Sequence[Mapping[str, str]]:
    return read_sheet(path) if path.is_file() else ()


def no_gpu_sentence(results: Path) -> str:
    """A sentence that says on which of the papers' GPUs committed records or summaries were
    measured."""
    texts = (path.read_text(errors="replace") for path in (results / "measured").rglob("*.json*"))
    used = {gpu for text in texts for gpu in DEVICE.findall(text)} & {*GPUS}
    unused = [gpu for gpu in GPUS if gpu not in used]
    return f"GPUs used: {', '.join(sorted(used)) or 'none'}. Not used: {', '.join(unused)}."
