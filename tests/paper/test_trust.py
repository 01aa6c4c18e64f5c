"""The first screen's tables: errors by kind of evidence, and losses by source."""

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
import pytest

from rematbench.evidence.accuracy import left_out_errors, load_accuracy
from rematbench.evidence.decisions import Decision
from rematbench.evidence.job_evidence import (
    JobProperties,
    LeftOutCell,
    left_out_by_source,
    left_out_cells,
    out_of_source,
)
from rematbench.inputs.configfile import ConfigError, read_mapping
from rematbench.inputs.load import calibration
from rematbench.paper.sheet.table import Table
from rematbench.paper.tables import systems
from rematbench.paper.tables.scores import (
    ALL,
    NOTHING,
    cell_table,
    evidence_table,
    out_of_source_means,
    regret_table,
)
from tests.problems import all_methods
from tests.workflow.checkout import ROOT


def known(source: str, error: float, stack: str = "s", seq_len: int = 4096) -> LeftOutCell:
    at = JobProperties(
        stack=stack, generation="hopper", gpus=8, seq_len=seq_len, methods=frozenset()
    )
    return LeftOutCell(source=source, job=at, log_error=error, layout=(source,), sweep=(source,))


def test_a_row_counts_at_each_thing_that_no_other_source_has() -> None:
    alike = [known("a", 0.1), known("b", -0.3), known("b", 0.1)]
    strange = known("c", 0.8, stack="own", seq_len=9)
    rows = {row["outside"]: row for row in evidence_table([*alike, strange]).rows}
    assert (rows[NOTHING]["sources"], rows[NOTHING]["rows"]) == (2, 3)
    assert rows[NOTHING]["mean"] == pytest.approx((0.1 + 0.2) / 2)
    for kind in ("stack", "context"):
        assert (rows[kind]["rows"], rows[kind]["mean"], rows[kind]["error"]) == (1, 0.8, 0.8)
        assert rows[kind]["half_width"] < 0.8  # the band that a and b teach
    assert rows["generation"] | {"outside": ""} == rows["scale"] | {"outside": ""}
    assert rows["scale"]["sources"] == 0
    assert rows["scale"]["error"] is None
    assert rows[ALL]["rows"] == 4


def sweeps(source: str, *losses: float, **both: Any) -> Iterator[Decision]:
    for lost in losses:
        job = {"source": f"{source}, 2024", "cluster": "c"}
        yield Decision(job=job, rows=4, correlation=1.0, left_out=lost, floor=0.5, **both)


def test_losses_are_means_over_sweeps() -> None:
    found = [*sweeps("A", 0.1, 0.3, regret=0.0), *sweeps("B", 0.8, regret=None)]
    first, second, both, mean = regret_table(found).rows
    assert (first["source"], first["sweeps"], first["left_out"]) == ("A", 2, 0.2)
    assert (second["source"], second["regret"]) == ("B", None)
    assert (both["sweeps"], both["left_out"], both["regret"]) == (2, pytest.approx(0.2), 0.0)
    assert (mean["sweeps"], mean["regret"]) == (3, None)
    assert mean["left_out"] == pytest.approx(0.4)
    alike = regret_table([*found[:2], *sweeps("B", 0.8, regret=0.3)]).rows
    assert len(alike) == 3
    assert (alike[-1]["sweeps"], alike[-1]["regret"]) == (3, pytest.approx(0.1))
    assert not regret_table([]).rows


def test_a_cell_is_drawn_in_the_groups_of_its_own_sheet() -> None:
    """Groups of another sheet may match every source."""
    rows = [{**row, "sheet": ""} for row in out_of_source() if row["sheet"] == "runs.csv"]
    accuracy = load_accuracy()
    own = {g.name.partition(",")[0] for g in accuracy.groups if g.sheet == "runs.csv"}
    drawn = cell_table(rows, calibration(), accuracy).rows
    assert drawn
    assert {row["source_name"] for row in drawn} <= own


def test_both_means_out_of_source_are_told() -> None:
    """Groups of the accuracy table are not the sources of left_out.csv: both means, each named."""
    rows = out_of_source()
    groups = left_out_errors(rows, load_accuracy(), calibration())
    sources = left_out_by_source(rows)
    assert set(sources) == {cell.source for cell in left_out_cells()}
    assert len(sources) > len({row["source"] for row in rows if row["sheet"] == "runs.csv"})
    assert out_of_source_means(groups, rows) == (
        f"Left out: {100 * fmean(groups.values()):.1f} % on average over {len(groups)} groups, "
        f"{100 * fmean(sources.values()):.1f} % over {len(sources)} sources, each of weight 1."
    )
    row = {"source": "a", "tokens_per_s_per_gpu": "10", "pred_tokens_per_s_per_gpu": "12"}
    slow = {**row, "pred_tokens_per_s_per_gpu": "9"}
    assert left_out_by_source([row, slow])["a"] == pytest.approx(0.15)


# -- the table of systems: what runs says so, and what does not says why ---------------------------


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
    return [msgspec.convert(one, systems.Related) for one in given["systems"]]


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
