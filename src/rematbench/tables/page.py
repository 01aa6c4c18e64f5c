"""The report: one self-contained page and REPORT.md, from the tables and figures that exist.

Tables of other worlds (traced, executed) and of later commands appear once their files exist; a
missing file is no error.
"""

import base64
import fnmatch
import html
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from rematbench.spec.configfile import convert, read_mapping
from rematbench.spec.paths import data_dir

LONG = 40
"""A cell with more letters is prose and gets room."""

GPUS = ("H800", "A800", "A100", "H100", "H200")


class Section(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the page: tables and figures by pattern, in this order; `open` without a click."""

    title: str
    tables: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    text: str = ""
    open: bool = True


class ReportConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config/report.yaml.  `folded`: columns that a click shows, below one another."""

    title: str
    sections: tuple[Section, ...]
    captions: dict[str, str]
    not_modelled: tuple[str, ...]
    folded: tuple[str, ...] = ()


class Part(Struct, frozen=True, kw_only=True):
    """One table (its Markdown) or figure, where it lies, and the command that makes it."""

    kind: str
    name: str
    path: Path
    command: str


class Page(Struct, frozen=True, kw_only=True):
    """The page's content: the outcome, facts of the first screen, sections with their parts."""

    config: ReportConfig
    outcome: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[tuple[Section, tuple[Part, ...]], ...]
    grids: str = ""


def load_report() -> ReportConfig:
    """The committed sections and texts."""
    label = "config/report.yaml"
    return convert(read_mapping(data_dir("config") / "report.yaml", label), ReportConfig, label)


def gather(config: ReportConfig, results: Path) -> list[tuple[Section, tuple[Part, ...]]]:
    """Sections with the tables and figures found below a results folder, each once."""
    tables = list(_found(results, "tables", ".md"))
    figures = list(_found(results, "figures", ".png"))
    made, taken = [], set()
    for section in config.sections:
        parts = []
        for patterns, pool in ((section.tables, tables), (section.figures, figures)):
            for pattern in patterns:
                for part in pool:
                    if part.path not in taken and fnmatch.fnmatch(part.name, pattern):
                        taken.add(part.path)
                        parts.append(part)
        made.append((section, tuple(parts)))
    return made


def _found(results: Path, folder: str, suffix: str) -> Iterator[Part]:
    """Everything of a kind below results/*/FOLDER, the paper's first."""
    paths = sorted(results.glob(f"*/{folder}/*{suffix}"))
    for path in sorted(paths, key=lambda p: p.parts[-3] != "paper"):
        if path.parts[-3] in ("expected", "smoke"):
            continue
        suffix_made = "csv" if folder == "tables" else "pdf"
        target = f"results/{path.parts[-3]}/{folder}/{path.stem}.{suffix_made}"
        yield Part(
            kind="table" if folder == "tables" else "figure",
            name=path.stem,
            path=path,
            command=f"./bench reproduce {target}",
        )


def no_gpu_sentence(results: Path) -> str:
    """One sentence on which of the papers' GPUs have an executed record here."""
    used = set()
    for path in sorted((results / "measured").rglob("*.json")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if '"executed"' in text:
            used |= {gpu for gpu in GPUS if f"NVIDIA {gpu}" in text}
    unused = [gpu for gpu in GPUS if gpu not in used]
    if used:
        return f"GPUs used: {', '.join(sorted(used))}; no {', '.join(unused)} was used."
    return "No H800/A100 was used, nor any other GPU: no speed on this page was measured by us."


def parse(markdown: str) -> tuple[str, list[str], list[list[str]], str]:
    """(title, heads, rows, note) of a table that table.py wrote."""
    lines = markdown.splitlines()
    title = lines[0].removeprefix("### ")
    pipes = [_split(line) for line in lines if line.startswith("|")]
    note = " ".join(line for line in lines[1:] if line and not line.startswith("|"))
    return title, pipes[0] if pipes else [], pipes[2:], note


def _split(line: str) -> list[str]:
    hidden = line.replace("\\|", "\x00").strip().strip("|")
    return [cell.strip().replace("\x00", "|") for cell in hidden.split("|")]


def table_html(
    heads: Sequence[str], rows: Sequence[Sequence[str]], folded: Sequence[str] = ()
) -> str:
    """A table in a box that scrolls by itself; numbers to the right; `folded` columns in one at the
    end, behind a click."""
    shown = [i for i, head in enumerate(heads) if head not in folded]
    hidden = [i for i, head in enumerate(heads) if head in folded]
    head = "".join(f"<th>{html.escape(heads[i])}</th>" for i in shown)
    lines = []
    before: Sequence[str] = ()
    for row in rows:
        more = _more([(heads[i], row[i]) for i in hidden if row[i]])
        cells = "".join(_cell(row[i], repeated=_repeats(row, before, i)) for i in shown)
        lines.append(f"<tr>{cells}{more if hidden else ''}</tr>")
        before = row
    names = html.escape(", ".join(heads[i] for i in hidden))
    last = f'<th title="{names}">more</th>' if hidden else ""
    return (
        f'<div class="wide"><table><thead><tr>{head}{last}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _more(pairs: Sequence[tuple[str, str]]) -> str:
    """Folded cells of one row."""
    if not pairs:
        return "<td></td>"
    inner = "".join(f"<p><b>{html.escape(k)}</b> {html.escape(v)}</p>" for k, v in pairs)
    return f'<td class="more"><details><summary>show</summary>{inner}</details></td>'


def _repeats(row: Sequence[str], before: Sequence[str], column: int) -> bool:
    """Whether a long text and every cell to its left repeat the line above."""
    return len(row[column]) > LONG and list(row[: column + 1]) == list(before[: column + 1])


def _cell(text: str, *, repeated: bool = False) -> str:
    """One cell; a repetition of the line above is a ditto, and names may break after `_`."""
    if repeated:
        return f'<td class="ditto" title="{html.escape(text, quote=True)}">&Prime;</td>'
    plain = text.replace(",", "").replace("%", "").strip()
    number = plain.lstrip("+-").replace(".", "", 1).isdigit()
    kind = ' class="n"' if number else ' class="t"' if len(text) > LONG else ""
    return f"<td{kind}>{html.escape(text).replace('_', '_<wbr>')}</td>"


def picture(path: Path) -> str:
    """A PNG as data, so that the page needs no other file."""
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"data:image/png;base64,{data}"


def report_markdown(page: Page, results: Path) -> str:
    """REPORT.md: the same content, tables as they are, figures as links."""
    lines = [f"# {page.config.title}", "", page.outcome, ""]
    lines += [f"- **{key}**: {value}" for key, value in page.facts]
    for section, parts in page.sections:
        if not parts and not section.text:
            continue
        lines += ["", f"## {section.title}", ""]
        lines += [section.text, ""] if section.text else []
        for part in parts:
            where = part.path.relative_to(results).as_posix()
            if part.kind == "table":
                csv = where.removesuffix(".md") + ".csv"
                lines += [part.path.read_text(encoding="utf-8").rstrip(), ""]
                lines += [f"[CSV]({csv}); `{part.command}`", ""]
            else:
                caption = page.config.captions.get(part.name, part.name.replace("_", " "))
                lines += [f"![{caption}]({where})", "", f"{caption} `{part.command}`", ""]
    lines += ["## What is not modelled", ""]
    lines += [f"- {text}" for text in page.config.not_modelled]
    return "\n".join(lines) + "\n"


def facts(counts: Mapping[str, str], results: Path) -> tuple[tuple[str, str], ...]:
    """Lines of the first screen: what ran where, versions, and the GPUs that were not used."""
    return (*counts.items(), ("GPUs", no_gpu_sentence(results)))
