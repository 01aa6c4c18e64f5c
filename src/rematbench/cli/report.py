"""The last commands of `./bench reproduce`: report and expect."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench import __version__
from rematbench.cli.matrix import SUITE
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.console import CommandError
from rematbench.inputs.configfile import require_among
from rematbench.inputs.load import calibration
from rematbench.paper.expected import check, compare_folders, load_artifact
from rematbench.paper.html import matrix_grids, page_html
from rematbench.paper.matrix.spec import load_matrix
from rematbench.paper.matrix.sweep import TABLES
from rematbench.paper.matrix.verdicts import summary
from rematbench.paper.page import (
    Page,
    gather,
    load_report,
    never_measured,
    report_markdown,
    what_was_measured,
    whether_bands_hold,
)
from rematbench.paper.tables.matrix import NAMES, equal_terms
from rematbench.plugins.discover import discover

RESULTS = Path("results")
MOST_BYTES = 5_000_000


def report(
    suite: SUITE,
    results: Annotated[
        Path, Option(metavar="DIR", help="Folder that holds the tables and figures.")
    ] = RESULTS,
) -> None:
    """Write results/index.html (one self-contained page) and results/REPORT.md.

    \b
    Example:
      rematbench report config/paper.yaml
    """
    spec, config = load_matrix(suite), load_report()
    tables = results / suite.stem / "tables"
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
    for name, content in (("index.html", text), ("REPORT.md", report_markdown(page, results))):
        (results / name).write_text(content, encoding="utf-8")
    typer.echo(f"{results / 'index.html'}: {len(text.encode()) / 1e6:.1f} MB; {page.outcome}")


def _rows(path: Path) -> int:
    return len(read_sheet(path)) if path.is_file() else 0


def _count(folder: Path, what: str) -> str:
    found = len(list(folder.rglob("*.json"))) if folder.is_dir() else 0
    return f"{found} {what} (committed)" if found else "no record in this checkout"


def expect(
    tables: Annotated[Path, Argument(metavar="TABLES", help="results/paper/tables")],
    expected: Annotated[Path, Argument(metavar="EXPECTED", help="results/expected")],
    update: Annotated[
        bool, Option("--update", help="Replace the expected tables by these.")
    ] = False,
    claim: Annotated[
        list[str] | None, Option(metavar="C1", help="Check only this claim (repeatable).")
    ] = None,
    searches: Annotated[
        bool, Option("--searches", help="Compare only the search results of the two folders.")
    ] = False,
) -> None:
    """Check the artifact's claims against the committed tables; exit code 1 if one fails.

    A claim whose tables are not there says NOT MADE; with --claim that is no failure of others.
    Searches (--searches) must be as committed but for the rounding of sums of seconds.

    \b
    Example:
      rematbench expect results/paper/tables results/expected
      rematbench expect results/paper/tables results/expected --claim C1
    """
    if searches:
        for line in compare_folders(tables, expected):
            typer.echo(line)
        return
    artifact = load_artifact()
    require_among(claim or (), [one.id for one in artifact.claims], ("", "--claim", "claim"))
    if update:
        expected.mkdir(parents=True, exist_ok=True)
        for name in dict.fromkeys(name for claim in artifact.claims for name in claim.tables):
            (expected / f"{name}.csv").write_bytes((tables / f"{name}.csv").read_bytes())
    findings = check(artifact, tables, expected)
    for finding in findings:
        typer.echo(finding.line)
    asked = [finding for finding in findings if not claim or finding.claim.id in claim]
    failed = [finding for finding in asked if finding.problems]
    typer.echo(f"{len(asked) - len(failed)} of {len(asked)} claims pass")
    if failed:
        raise typer.Exit(1)
