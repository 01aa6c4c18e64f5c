"""The table of systems: what runs says so, and what does not says why."""

import re
from pathlib import Path

import msgspec
import pytest

from rematbench.inputs.configfile import ConfigError, read_mapping
from rematbench.paper.sheet.table import Table
from rematbench.paper.tables import systems
from tests.problems import all_methods
from tests.workflow.checkout import ROOT

FILE = ROOT / "config" / "related.yaml"
EXPECTED, MEASURED = ROOT / "results" / "expected", ROOT / "results" / "measured"


def made(related: Path = FILE) -> Table:
    methods, accuracy, claims = (
        EXPECTED / f"{name}.csv" for name in ("methods", "accuracy_by_source", "claims")
    )
    traced, executed, measured = (
        sorted(MEASURED.glob(f"{name}/*.json")) for name in ("traced", "executed", "gpu*/records")
    )
    return systems.build(related, methods, accuracy, claims, traced, executed, measured)


def declared() -> list[systems.Related]:
    given = read_mapping(FILE, str(FILE))
    return list(msgspec.convert(given, systems.RelatedFile).systems)


def test_every_system_runs_or_says_why() -> None:
    rows = {row["system"]: row for row in made().rows}
    assert len(rows) == len(declared())
    for row in rows.values():
        assert (row["planned"] is None) == bool(row["reason"]), row["system"]
        assert row["reason"] is None or row["reason"].startswith(("not yet: ", "refused: "))


def test_every_method_belongs_to_a_system() -> None:
    named = {name for system in declared() for name in system.methods}
    assert set(all_methods().methods) - named == {"keep_all"}


def test_a_method_of_activations_was_traced_and_executed() -> None:
    """Methods that are tried only where they are named have few records; tests run them."""
    registry = all_methods()
    states = {name for name, entry in registry.methods.items() if entry.waits}
    moving = {system.name for system in declared() if set(system.methods) & states}
    for row in made().rows:
        if "simulated" in row and row["system"] not in moving:
            assert row["traced"], row["system"]
            assert row["executed"], row["system"]


def test_errors_and_verdicts_are_those_of_the_tables() -> None:
    rows = {row["system"]: row["published"] for row in made().rows}
    assert re.search(r"ATC'24 Table 8, gains: \d\.\d %", rows[ATC])
    assert re.search(r"claims: \d+ of \d+ numbers met", rows["MEMO"])
    assert rows["KARMA"] == "claims: not comparable"


ATC = "balanced checkpointing and pipeline offload"


def test_a_system_that_neither_runs_nor_says_why_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "related.yaml"
    path.write_text("systems: [{name: new, source: here, methods: [no_such_method]}]\n")
    with pytest.raises(ConfigError, match=r"new.*say why"):
        made(path)
