"""The first screen's tables: errors by kind of evidence, and losses by source."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any

import pytest

from rematbench.evidence.accuracy import left_out_errors, load_accuracy
from rematbench.evidence.decisions import Decision
from rematbench.evidence.decisions import sweeps as published_sweeps
from rematbench.evidence.job_evidence import (
    JobProperties,
    LeftOutCell,
    left_out_by_source,
    left_out_cells,
    out_of_source,
)
from rematbench.inputs.constants import is_fit
from rematbench.inputs.load import calibration
from rematbench.paper.tables.scores import (
    ALL,
    NOTHING,
    cell_table,
    evidence_table,
    out_of_source_means,
    regret_table,
)


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


def test_the_note_of_decisions_says_what_constants_saw() -> None:
    """Every source with a sweep has fitted rows; the sources named have no sweep."""
    rows = [{**row, "pred_status": "ok"} for row in out_of_source()]
    named = {key[0] for key in published_sweeps(rows)}
    fit = calibration().fit
    assert "fitted to some rows of each source" in regret_table([]).note
    for source in named:
        assert any(is_fit(row, fit) for row in rows if row["source"] == source), source
    for word in ("MosaicML", "NVIDIA"):
        assert word in regret_table([]).note
        assert any(word in row["source"] for row in rows)
        assert not any(word in source for source in named)


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
