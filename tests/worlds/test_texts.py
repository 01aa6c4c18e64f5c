"""What the texts say of the committed records is what the records say."""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from rematbench.worlds.records.measured import Comparison
from rematbench.worlds.records.record import Record, read_record
from tests.worlds.test_records import MEASURED, PATHS, ROOT, record

EXECUTED = re.sub(r"\s+", " ", (ROOT / "docs" / "executed.md").read_text(encoding="utf-8"))
README = (ROOT / "README.md").read_text(encoding="utf-8")


def short(number: float) -> str:
    """Two digits, as the texts write them: 1.3e-7."""
    digits, power = f"{number:.1e}".split("e")
    return f"{digits}e{int(power)}"


def compared(precision: str) -> Iterator[Comparison]:
    for path in PATHS:
        found = record(path)
        if found.spec.precision == precision and found.measured and found.measured.comparison:
            yield found.measured.comparison


def peaks(world: str) -> float:
    """The largest total above the simulated one, in per cent; executed in bf16 only, whose states
    the simulation has."""
    errors = [
        rank.peak_error
        for found in map(record, PATHS)
        if found.world == world and found.spec.precision == "bf16" and found.measured is not None
        for rank in found.measured.ranks
    ]
    assert errors
    assert min(errors) > -0.005
    return 100.0 * max(errors)


def test_total_peaks() -> None:
    said = (
        f"{peaks('traced'):.1f} % above it in the traced records, at most {peaks('executed'):.1f} %"
    )
    assert f"at most {said} in the executed ones" in EXECUTED


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_how_far_methods_are_from_keep_all(precision: str) -> None:
    every = list(compared(precision))
    first = max(each.first_gradient_error or 0.0 for each in every)
    steps, losses = (max(getattr(e, n) for e in every) for n in ("gradient_error", "loss_error"))
    name = "float64" if precision == "fp64" else precision
    said = f"gradients {short(first)} at step 1, {short(steps)} over the steps"
    if precision == "fp64":
        said = f"gradients {short(steps)}"
    separator = "," if precision == "fp64" else ";"
    assert f"| {name} | bitwise | {said}{separator} losses {short(losses)} |" in EXECUTED


def newest(folder: Path) -> str:
    def written(found: Record) -> datetime:
        return datetime.fromisoformat(found.provenance.written)

    return max(written(read_record(path)) for path in folder.rglob("*.json")).date().isoformat()


@pytest.mark.parametrize(("row", "folder"), [("traced", "traced"), ("executed, CPU", "executed")])
def test_dates(row: str, folder: str) -> None:
    (line,) = (line for line in README.splitlines() if line.startswith(f"| {row} |"))
    assert line.endswith(f"| {newest(MEASURED / folder)} |")
