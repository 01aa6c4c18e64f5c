"""The command `expect`: the artifact's claims, checked."""

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.configfile import require_among
from rematbench.paper.expected import check, compare_folders, load_artifact
from rematbench.paper.tables.claims import in_short


def expect(
    tables: Annotated[Path, Argument(metavar="TABLES", help="The folder of the new tables.")],
    expected: Annotated[
        Path, Argument(metavar="EXPECTED", help="The folder of the committed tables.")
    ],
    update: Annotated[
        bool, Option("--update", help="Replace the expected tables by the new ones.")
    ] = False,
    claim: Annotated[
        list[str] | None, Option(metavar="C1", help="Check only this claim (repeatable).")
    ] = None,
    searches: Annotated[
        bool, Option("--searches", help="Compare only the search results of the two folders.")
    ] = False,
) -> None:
    """Check the artifact's claims against the committed tables; exit code 1 if one fails.

    A claim without its tables is NOT MADE.  --claim checks only the named claims; --searches
    compares only search results, which must equal the committed ones up to rounding.

    \b
    Example:
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
    asked = [finding for finding in findings if not claim or finding.claim.id in claim]
    for finding in asked:
        typer.echo(finding.line)
    failed = [finding for finding in asked if finding.problems]
    said = f"{len(asked) - len(failed)} of {len(asked)} claims of the artifact are as committed"
    ledger = tables / "claims.csv"
    if ledger.is_file() and not claim:
        said += f". {in_short(read_sheet(ledger))}"
    typer.echo(said)
    if failed:
        raise typer.Exit(1)
