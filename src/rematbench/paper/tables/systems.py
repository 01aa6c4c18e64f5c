"""The table of systems of the literature: which parts of each run here, in which worlds, and how
far our values are from published ones; or why nothing of it runs."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from rematbench.evidence.published.sheets import read_sheet
from rematbench.inputs.configfile import ConfigError, convert, read_mapping
from rematbench.paper.sheet.table import Table, table_of
from rematbench.plugins.discover import discover
from rematbench.worlds.records.record import read_records

INPUTS = {
    "related": "config/related.yaml",
    "methods": "results/paper/tables/methods.csv",
    "accuracy": "results/paper/tables/accuracy_by_source.csv",
    "claims": "results/paper/tables/claims.csv",
    "traced": "results/measured/traced/*.json",
    "executed": "results/measured/executed/*.json",
    "measured": "results/measured/gpu*/records/*.json",
}
READS = ("methods/*.py",)
Row = Mapping[str, Any]
MET = ("within tolerance", "met")
WORLDS = ("simulated", "traced", "executed", "measured")


class Related(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A system of the literature (config/related.yaml says what its fields mean)."""

    name: str
    source: str
    methods: tuple[str, ...] = ()
    runs: str = ""
    groups: tuple[str, ...] = ()
    claims: tuple[str, ...] = ()
    without: str = ""


def build(
    related: Path,
    methods: Path,
    accuracy: Path,
    claims: Path,
    traced: list[Path],
    executed: list[Path],
    measured: list[Path],
) -> Table:
    """The table of all systems of the file; ConfigError for a system that neither runs nor says
    why."""
    label = str(related)
    systems = [convert(one, Related, label) for one in read_mapping(related, label)["systems"]]
    ran = {"simulated": [_words(row["label"]) for row in _ran(read_sheet(methods))]}
    for world, paths in zip(WORLDS[1:], (traced, executed, measured), strict=True):
        found = (record for _, record in read_records(paths))
        ran[world] = [set(r.spec.method.split("+")) for r in found if r.status == "ok"]
    groups, rows = read_sheet(accuracy), read_sheet(claims)
    return table_of("systems", [_row(system, ran, groups, rows, label) for system in systems])


def _row(
    system: Related,
    ran: Mapping[str, Sequence[set[str]]],
    groups: Sequence[Row],
    claims: Sequence[Row],
    label: str,
) -> Row:
    here = [name for name in system.methods if name in discover().methods]
    planned = ", ".join(here) or system.runs
    if not planned and not system.without:
        raise ConfigError(label, system.name, "no part of it runs here, so say why in `without`")
    counts = {
        world: sum(not names.isdisjoint(here) for names in ran[world]) or None for world in WORLDS
    }
    published = [*_errors(system.groups, groups), *_verdicts(system.claims, claims)]
    return {
        "system": system.name,
        "planned": planned or None,
        **(counts if here else {}),
        "published": "; ".join(published) or None,
        "reason": None if planned else system.without,
        "source": system.source,
    }


def _errors(beginnings: Sequence[str], groups: Sequence[Row]) -> Iterable[str]:
    for group in groups:
        if group["name"].startswith(tuple(beginnings)) and group["mean"]:
            yield f"{group['name']}: {100 * float(group['mean']):.1f} %"


def _verdicts(beginnings: Sequence[str], claims: Sequence[Row]) -> Iterable[str]:
    """How many of the numbers that claims print are met, of those that can be compared."""
    asked = [
        row
        for row in claims
        if row["asked"] == "primary" and row["id"].startswith(tuple(beginnings))
    ]
    if compared := [row for row in asked if not row["verdict"].startswith("not comparable")]:
        met = sum(row["verdict"] in MET for row in compared)
        yield f"claims: {met} of {len(compared)} numbers met"
    elif asked:
        yield "claims: not comparable"


def _ran(rows: Iterable[Row]) -> Iterable[Row]:
    """The rows with a result; out of memory is one."""
    return (row for row in rows if row["status"] in ("ok", "oom"))


def _words(label: str) -> set[str]:
    """The methods of a row's label, which may end in a remark in brackets."""
    return set(label.partition(" (")[0].split("+"))
