"""The content of the report: the first screen's answers, then sections of tables and figures.

Tables of other worlds (traced, executed) and of later commands appear once their files exist; a
missing file is no error.
"""

import fnmatch
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from rematbench.evidence.accuracy import LEAST_OOMS
from rematbench.evidence.bands import LEVEL
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.table import TableText
from rematbench.spec.configfile import convert, read_mapping
from rematbench.spec.paths import data_dir

GPUS = ("H800", "A800", "A100", "H100", "H200")


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A section of the page: its tables and figures by pattern, in this order. The figures of a
    pattern come before its tables; an `open` section shows without a click."""

    title: str
    parts: tuple[str, ...]
    text: str = ""
    open: bool = True


class ReportConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/report.yaml. `answer`: the figure of the first screen; `trust`: the
    tables beside that figure; `folded`: columns of tables that a click shows, one below another."""

    title: str
    question: str
    answer: str
    trust: Section
    sections: tuple[Section, ...]
    captions: dict[str, str]
    not_modelled: tuple[str, ...]
    folded: tuple[str, ...] = ()

    def caption(self, name: str) -> str:
        """The caption of a figure."""
        return self.captions.get(name, name.replace("_", " "))


class Part(Struct, frozen=True, kw_only=True):
    """One table (as printed) or figure of the page. `source` is the path of its raw file and
    `shown` the path of what the page shows, both below the results folder."""

    name: str
    path: Path
    shown: str
    source: str
    table: TableText | None = None

    @property
    def command(self) -> str:
        """The command that makes the table or figure."""
        return f"./bench reproduce results/{self.source}"


Found = tuple[Section, tuple[Part, ...]]


class Page(Struct, frozen=True, kw_only=True):
    """The content of the page: the first screen, then every section with its parts. The first
    screen has the outcome, whether bands hold, what was never measured, and facts; its two sections
    come first in `found`."""

    config: ReportConfig
    outcome: str
    trusted: str
    unmeasured: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]
    found: tuple[Found, ...]

    @property
    def answer(self) -> Found:
        """The section of the figure that answers the question."""
        return self.found[0]

    @property
    def trust(self) -> Found:
        """The section that says how far to trust the answer."""
        return self.found[1]

    @property
    def sections(self) -> list[Found]:
        """The sections after the first screen that have a part or a text."""
        return [(section, parts) for section, parts in self.found[2:] if parts or section.text]


def load_report() -> ReportConfig:
    """The sections and texts of config/report.yaml."""
    label = "config/report.yaml"
    return convert(read_mapping(data_dir("config") / "report.yaml", label), ReportConfig, label)


def gather(config: ReportConfig, results: Path) -> tuple[Found, ...]:
    """The parts of the first screen and of each section, found below a results folder. Each part
    appears once, in the first section that has a pattern for it."""
    pool = [
        *_found(results, "figures", ".png", ".pdf"),
        *_found(results, "tables", ".json", ".csv"),
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


def _found(results: Path, folder: str, shown: str, raw: str) -> Iterable[Part]:
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


def whether_bands_hold(tables: Path) -> str:
    """A sentence on how many published rows lie inside bands learnt without their source."""
    found = _rows(tables / "bands.csv")
    if not found:
        return ""
    pooled = found[-1]
    return (
        f"A band is to hold {100 * LEVEL:.0f} % of speeds. Learnt from all sources but one, bands "
        f"hold {100 * float(pooled['inside']):.0f} % of what that one published (every source "
        f"weighs 1; {int(pooled['rows']):,} rows). A choice of layout is judged by what it loses."
    )


def never_measured(tables: Path, results: Path) -> tuple[str, ...]:
    """Sentences on what no GPU ran, what nobody published, and what has too few rows. The second
    sentence is about the jobs whose fastest method is shown, the third about out-of-memory cells,
    of which no rate is promised."""
    winners = _rows(tables / "matrix_fastest.csv")
    outside = [row["outside"].split(", ") for row in winners if row["outside"]]
    counts = Counter(word for words in outside for word in words)
    told = ", ".join(f"{word} in {count}" for word, count in counts.most_common())
    strange = f"{len(outside)} of the {len(winners)} winners above lie outside of what anybody "
    strange += f"published: {told}."
    verdicts = _rows(tables / "oom_verdicts.csv")
    ooms = sum(int(row["cells"]) for row in verdicts if row["published"] == "oom")
    few = f"{ooms} published cells ran out of memory: whether a job fits is reported with its "
    few += "margin, and no rate of it is promised."
    return (
        no_gpu_sentence(results),
        *([strange] if outside else []),
        *([few] if verdicts and ooms < LEAST_OOMS else []),
    )


def _rows(path: Path) -> Sequence[Mapping[str, str]]:
    return read_sheet(path) if path.is_file() else ()


def no_gpu_sentence(results: Path) -> str:
    """One sentence that says which of the papers' GPUs have an executed record here."""
    used = set()
    for path in sorted((results / "measured").rglob("*.json")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if '"executed"' in text:
            used |= {gpu for gpu in GPUS if f"NVIDIA {gpu}" in text}
    unused = [gpu for gpu in GPUS if gpu not in used]
    if used:
        return f"GPUs used: {', '.join(sorted(used))}; no {', '.join(unused)} was used."
    return (
        "No H800/A100 was used, nor any other GPU: no speed on this page was measured by us. What "
        "was executed ran on CPUs and says bytes, losses and gradients."
    )


def report_markdown(page: Page, results: Path) -> str:
    """The text of REPORT.md: the page's content with tables in Markdown and figures as links."""
    config = page.config
    lines = [f"# {config.title}", "", config.question, "", page.outcome, ""]
    lines += _markdown(page, page.answer, results)
    lines += [
        f"## {config.trust.title}",
        "",
        page.trusted,
        "",
        *_markdown(page, page.trust, results),
    ]
    lines += ["## What was never measured", "", *(f"- {text}" for text in page.unmeasured), ""]
    lines += [f"- **{key}**: {value}" for key, value in page.facts]
    for found in page.sections:
        lines += ["", f"## {found[0].title}", "", *_markdown(page, found, results)]
    lines += ["## What is not modelled", "", *(f"- {text}" for text in config.not_modelled)]
    return "\n".join(lines) + "\n"


def _markdown(page: Page, found: Found, results: Path) -> list[str]:
    section, parts = found
    lines = [section.text, ""] if section.text else []
    for part in parts:
        if part.table:
            text = part.path.with_suffix(".md").read_text(encoding="utf-8").rstrip()
            lines += [text, "", f"[CSV]({part.source}); `{part.command}`", ""]
        else:
            caption = page.config.caption(part.name)
            lines += [f"![{caption}]({part.shown})", "", f"{caption} `{part.command}`", ""]
    return lines
