"""The page with every table and figure: results/index.html."""

from collections.abc import Mapping
from pathlib import Path

from rematbench import __version__
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.console import CommandError
from rematbench.inputs.load import calibration
from rematbench.paper.html import matrix_grids, page_html
from rematbench.paper.matrix.spec import load_matrix
from rematbench.paper.matrix.sweep import TABLES
from rematbench.paper.matrix.verdicts import summary
from rematbench.paper.page import (
    Page,
    gather,
    load_report,
    never_measured,
    what_was_measured,
    whether_bands_hold,
)
from rematbench.paper.tables.matrix import NAMES, equal_terms
from rematbench.plugins.discover import discover

MOST_BYTES = 5_000_000


def build(output: Path, values: Mapping[str, str], suite: Path) -> str:
    spec, config = load_matrix(suite), load_report()
    results = Path("results")
    tables = results / "paper" / "tables"
    lines = [
        {**line, "table": table}
        for table in TABLES
        for line in read_sheet(tables / f"{NAMES[table]}.csv", ["arm"])
    ]
    constants = calibration()
    facts = {
        "Published": f"{_rows(results / 'published' / 'runs.csv')} cells copied from papers and "
        "artifacts (not run by us)",
        "Simulated": f"{_rows(tables / 'runs.csv')} runs of methods, "
        f"{len(lines)} results of the matrix, {_rows(tables / 'predictions.csv')} "
        "predicted cells; on a CPU",
        "Traced": _count(results / "measured/traced", "records of the real code on fake tensors"),
        "Executed": _count(results / "measured" / "executed", "records of the real code"),
        "Equal terms": equal_terms(spec),
        "Versions": f"rematbench {__version__}, constants of {constants.date}",
    }
    page = Page(
        config=config,
        measured=what_was_measured(tables),
        outcome=summary(lines, spec.baseline),
        trusted=whether_bands_hold(tables),
        unmeasured=never_measured(tables, results),
        facts=tuple(facts.items()),
        filled=gather(config, results),
    )
    registry = discover()
    names = {arm.name: arm.resolved(registry).text for arm in spec.all_arms(registry)}
    text = page_html(page, matrix_grids(tables, names))
    if len(text.encode()) > MOST_BYTES:
        raise CommandError(
            f"the page has {len(text.encode()):,} bytes; the limit is {MOST_BYTES:,}"
        )
    output.write_text(text, encoding="utf-8")
    return f"{output}: {len(text.encode()) / 1e6:.1f} MB; {page.outcome}"


def _rows(path: Path) -> int:
    return len(read_sheet(path)) if path.is_file() else 0


def _count(folder: Path, what: str) -> str:
    found = len(list(folder.rglob("*.json"))) if folder.is_dir() else 0
    return f"{found} {what} (committed)" if found else "no record in this checkout"
