"""A record measured again: every byte must be the committed one's, rounding may not be."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from rematbench.cli.real import as_committed
from rematbench.worlds.records.measured import Comparison, Measured
from rematbench.worlds.records.record import Record, read_record, write_record
from rematbench.worlds.reruns import differences

MEASURED = Path(__file__).resolve().parents[2] / "results" / "measured"


@cache
def executed() -> Record:
    return read_record(MEASURED / "executed" / "tp2.memo.1.json")


def changed(change: Callable[[Measured], Measured]) -> list[str]:
    """What a change of the measured numbers differs in."""
    found = executed().measured
    assert found is not None
    return differences(replace(executed(), measured=change(found)), executed())


def first_rank(found: Measured, **fields: int) -> Measured:
    return replace(found, ranks=(replace(found.ranks[0], **fields), *found.ranks[1:]))


def test_dates_and_hosts_are_no_difference() -> None:
    made = replace(executed().provenance, written="1970-01-01T00:00:00+00:00", platform="another")
    assert differences(replace(executed(), provenance=made), executed()) == []


@pytest.mark.parametrize(
    "field",
    [
        "boundary_peak_bytes",
        "activation_peak_bytes",
        "host_peak_bytes",
        "state_bytes",
        "offload_bytes",
    ],
)
def test_one_byte_is_a_difference(field: str) -> None:
    found = executed().measured
    value = getattr(found.ranks[0], field)
    lines = changed(lambda found: first_rank(found, **{field: value + 1}))
    assert lines == [f"rank 0: {field} {value + 1}, committed {value}"]


def test_a_plan_and_a_status_are_compared() -> None:
    other = replace(executed(), plan_hash="0", status="failed", reason="nan")
    assert [line.split()[0] for line in differences(other, executed())] == [
        "status",
        "reason",
        "plan_hash",
    ]
    assert differences(replace(executed(), measured=None), executed())


@pytest.mark.parametrize(("share", "differ"), [(1e-13, False), (1e-8, True)])
def test_losses_may_differ_by_rounding_only(share: float, differ: bool) -> None:
    def moved(found: Measured) -> Measured:
        return replace(found, losses=tuple(loss * (1 + share) for loss in found.losses))

    lines = changed(moved)
    assert bool(lines) is differ
    assert all(line.startswith("losses of step 0: ") and "(bound " in line for line in lines)


def test_a_verdict_is_compared() -> None:
    def lossy(found: Measured) -> Measured:
        assert isinstance(found.comparison, Comparison)
        worse = replace(found.comparison, bitwise=False, gradient_error=1.0)
        return replace(found, comparison=worse)

    assert changed(lossy) == ["lossless False, committed True"]


def test_a_folder_is_compared_record_by_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, old = tmp_path / "new", tmp_path / "old"
    for folder in (new, old):
        write_record(executed(), folder / "a.json")
        write_record(executed(), folder / "b.json")
    assert as_committed(["a", "b"], new, old)
    found = executed().measured
    assert found is not None
    broken = replace(executed(), measured=first_rank(found, actions=1))
    write_record(broken, new / "b.json")
    assert not as_committed(["a", "b"], new, old)
    assert "b: rank 0: actions 1, committed" in capsys.readouterr().err
    (new / "b.json").unlink()
    assert not as_committed(["a", "b"], new, old)
    assert "b.json: cannot be read" in capsys.readouterr().err


def test_what_has_changed_is_said_where_a_number_has() -> None:
    spec = replace(executed().spec, cluster_hash="0", calibration_hash="1")
    assert differences(replace(executed(), spec=spec), executed()) == []
    said = differences(replace(executed(), spec=spec, status="failed"), executed())
    assert said[-1] == "changed since: cluster, calibration"
