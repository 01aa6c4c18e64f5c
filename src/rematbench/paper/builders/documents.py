"""Numbers in documents stand between markers, and `./bench reproduce` writes them there.

`<!-- from: NAME -->`, a text and `<!-- end -->` are three paragraphs of a document.  The text is
one of TEXTS, or the printed table NAME without its title.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import fill

from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.files import write_atomically
from rematbench.inputs.configfile import ConfigError
from rematbench.paper.catalog import table_files
from rematbench.paper.expected import load_artifact, measured, read_cells
from rematbench.paper.page import what_was_measured
from rematbench.paper.tables.claims import in_short

MARKED = re.compile(r"(?<=<!-- from: )(\w+) -->\n\n(.*?)\n\n(?=<!-- end -->)", re.DOTALL)
PLACES = ("*.md", "docs/*.md")
WIDTH = 110
"""The width of a line in characters."""


def write_documents(root: Path, tables: Path) -> list[str]:
    """Rewrite every marked text in the documents of a checkout from the tables of a folder; return
    the names of the documents that changed. A text whose table is missing stays as it is.
    ConfigError for a marker without a text or table of its name."""
    changed = []
    for path in sorted(path for place in PLACES for path in root.glob(place)):
        old = path.read_text(encoding="utf-8")
        new = with_numbers(old, tables, str(path.relative_to(root)))
        if new != old:
            write_atomically(path, new.encode())
            changed.append(str(path.relative_to(root)))
    return changed


def build(output: Path, values: Mapping[str, str]) -> str:
    """Rewrite the marked texts from the paper's tables, and write the names of the changed
    documents to `output`."""
    changed = write_documents(Path(), output.parent / "tables")
    output.write_text("".join(f"{name}\n" for name in changed), encoding="utf-8")
    return f"{output}: {', '.join(changed) or 'no document'} changed"


def with_numbers(document: str, tables: Path, label: str) -> str:
    """The document with its marked texts made anew from the tables of a folder."""

    known = {name for file in table_files().values() for name in file.tables}

    def text(match: re.Match[str]) -> str:
        name, old = match.groups()
        if name not in TEXTS and name not in known:
            raise ConfigError(label, f"from: {name}", "no such table or text")
        return f"{name} -->\n\n{_text(name, tables) or old}\n\n"

    return MARKED.sub(text, document)


def _text(name: str, tables: Path) -> str:
    """The text or printed table of a name; empty if the table was not made."""
    if name in TEXTS:
        return TEXTS[name](tables)
    path = tables / f"{name}.md"
    return path.read_text(encoding="utf-8").partition("\n\n")[2].rstrip() if path.is_file() else ""


def _measured(tables: Path) -> str:
    """What was measured on GPUs, and how far published numbers are predicted."""
    path = tables / "accuracy_by_source.csv"
    sentence = what_was_measured(tables)
    if not sentence or not path.is_file():
        return ""
    scored = [row["status"] == "met" for row in read_sheet(path) if row["status"]]
    return fill(
        f"**What was measured.** {sentence} Jobs on several GPUs are compared with published "
        f"numbers: {sum(scored)} of {len(scored)} groups of these are predicted within their "
        "target.",
        WIDTH,
    )


def _claims(tables: Path) -> str:
    path = tables / "claims.csv"
    return fill(f"{in_short(read_sheet(path))}.", WIDTH) if path.is_file() else ""


def _best_against_best(tables: Path) -> str:
    """The best layout of Megatron-core's options and of all methods, at the abstract's length."""
    path = tables / "searched_spaces.csv"
    if not path.is_file():
        return ""
    spaces = {row["space"]: row for row in read_sheet(path) if row["mfu_causal"]}
    package, every = spaces["megatron_core"], spaces["all"]
    ours, published = (
        [f"{100 * float(row[key]):.1f} %" for row in (package, every)]
        for key in ("mfu_causal", "published_mfu")
    )
    return fill(
        f"Best against best of all {int(every['layouts']):,} layouts, which counts for no claim: "
        f"{ours[0]} with the options of Megatron-core and {ours[1]} with all methods (the "
        f"abstract: {published[0]} and {published[1]}).",
        WIDTH,
    )


def _artifact(tables: Path) -> str:
    """The claims of the artifact: the place of each, its first table, and what `expect` counts and
    measures in the tables."""
    lines = ["| claim | what | table | ours | bound |", "| --- | --- | --- | --- | --- |"]
    for claim in load_artifact().claims:
        made = [f"{find.says}: {find.count} of {find.of}" for find in claim.finds]
        most = ""
        if claim.bound:
            bound = claim.bound
            cells = read_cells(tables / f"{bound.table}.csv")
            if cells is None:
                return ""
            made.insert(0, f"{bound.statistic} {100 * (measured(bound, cells) or 0):.2g} %")
            most = f"{100 * bound.most:g} %"
        what = f"{claim.place}: {claim.text}"
        row = (claim.id, what, f"`{claim.tables[0]}.csv`", "; ".join(made), most)
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


TEXTS: dict[str, Callable[[Path], str]] = {
    "measured": _measured,
    "claims_in_short": _claims,
    "best_against_best": _best_against_best,
    "artifact": _artifact,
}
