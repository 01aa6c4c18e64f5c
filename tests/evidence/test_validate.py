"""How errors are counted: what is scored, what is fitted, the floor, verdicts, promises."""

import datetime
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.evidence.accuracy import (
    FEWEST_OOMS,
    Accuracy,
    Group,
    Promise,
    by_source,
    gain_errors,
    load_accuracy,
    members,
    validate,
)
from rematbench.evidence.published.sheets import is_scored, read_sheet
from rematbench.inputs.constants import FitRule, ShapedBy
from rematbench.inputs.paths import data_dir
from rematbench.paper.tables.scores import promise_table
from tests.problems import calibration
from tests.wrong_inputs import PREDICTED

FIT = replace(
    calibration(),
    fit=(FitRule(source="Paper", model=("small",)),),
    shaped_by=(ShapedBy(source="Shaper", mechanism="none"),),
)
SPEED = "tokens_per_s_per_gpu"


def row(published: float, predicted: float, **changes: Any) -> dict[str, Any]:
    """A cell with a constant MFU factor of 0.001 per token/s."""
    own = {"source": "Paper", "table": "1", "model": "big", "peak_device_bytes": ""}
    speeds = {SPEED: str(published), f"pred_{SPEED}": str(predicted)}
    memory = {"pred_peak_device_bytes": str(2**30), "pred_usable_bytes": str(70 * 2**30)}
    return PREDICTED | own | speeds | memory | {"pred_mfu_causal": str(predicted * 0.001)} | changes


def promise(target: float, accepted: float) -> Promise:
    return Promise(
        target=target, accepted=accepted, reason="tested", date=datetime.date(2026, 11, 20)
    )


def group(metric: Any = SPEED, **promises: Promise) -> Group:
    return Group(name="g", rule=FitRule(source="Paper"), metric=metric, promises=promises)  # type: ignore[arg-type]


def report(rows: list[dict[str, Any]], one: Group) -> Any:
    return validate(rows, FIT, Accuracy(groups=(one,))).groups[0]


def test_fitted_cells_are_no_predictions() -> None:
    rows = [row(100, 150, model="small"), row(100, 110), row(100, 95)]
    found = report(rows, group())
    assert found.splits == {"fitted": 1, "in-sample": 0, "sibling": 2, "held-out": 0}
    assert found.cells == 2
    assert found.mean == pytest.approx(0.075)
    assert found.max == pytest.approx(0.10)


def test_held_out_are_cells_of_sources_without_a_fitted_cell() -> None:
    """Bytes are fitted nowhere, so a cell of the same source is held out there."""
    rows = [row(100, 110, source="Other"), row(100, 95, source="Shaper")]
    every = replace(group(), rule=FitRule(source=""))
    assert report(rows, every).splits == {"fitted": 0, "in-sample": 1, "sibling": 0, "held-out": 1}
    held = row(1, 1, peak_device_bytes="1000000000")
    assert report([held], group("peak_device_bytes")).splits["held-out"] == 1


def test_floor_is_the_constant_mfu_of_the_fitted_cells() -> None:
    rows = [row(100, 100, model="small"), row(400, 400, model="small"), row(100, 100), row(50, 50)]
    assert report(rows, group()).floor == pytest.approx((1.0 + 3.0) / 2)  # constant 200


def test_mean_must_beat_the_floor_strictly() -> None:
    rows = [row(100, 100, model="small"), row(110, 110 * (1 - 1 / 11))]
    found = report(rows, group(mean=promise(0.5, 0.5)))
    assert found.mean == pytest.approx(found.floor)
    checks = {check.statistic: check.status for check in found.checks}
    assert checks["mean"] == "met"
    assert checks["mean below floor"] in ("met", "FAIL")
    worse = [row(100, 100, model="small"), row(110, 90)]
    assert report(worse, group(mean=promise(0.5, 0.5))).status == "FAIL"


def test_dashes_suspects_and_unknown_layouts_are_never_scored() -> None:
    assert is_scored(row(1, 1))
    assert not is_scored(row(1, 1, status="dash"))
    assert not is_scored(row(1, 1, note="SUSPECT: copied"))
    assert not is_scored(row(1, 1, tp=""))


def test_in_sample_sources_are_named() -> None:
    one = replace(group(), rule=FitRule(source="Shaper"))
    assert report([row(100, 100, source="Shaper")], one).splits["in-sample"] == 1


def test_a_missing_prediction_fails() -> None:
    gone = {f"pred_{SPEED}": "", "pred_mfu_causal": "", "pred_status": "unsupported"}
    found = report([row(100, 100), row(100, 0, **gone)], group(mean=promise(0.1, 0.1)))
    assert found.missing == 1
    assert found.status == "FAIL"


def test_status_against_target_and_accepted() -> None:
    rows = [row(100, 100, model="small"), row(300, 330)]
    assert report(rows, group(mean=promise(0.11, 0.11))).status == "met"
    assert report(rows, group(mean=promise(0.05, 0.11))).status == "accepted"
    assert report(rows, group(mean=promise(0.05, 0.09))).status == "FAIL"


def test_gains_are_between_neighbours_in_published_order() -> None:
    rows = [row(400, 390), row(200, 200), row(300, 300)]
    assert gain_errors(rows) == pytest.approx([0.0, 390 / 300 - 400 / 300])


def test_verdicts_count_both_ways_and_always_fits() -> None:
    held = {"pred_device_total_bytes": str(100 * 2**30), "pred_headroom_bytes": str(-(2**30))}
    full = {**held, "pred_status": "oom"}
    rows = [row(1, 1), row(1, 1, **full), row(0, 0, status="oom", **full), row(0, 0, status="oom")]
    verdicts = validate(rows, FIT, Accuracy(groups=())).verdicts
    assert verdicts.counts == {
        ("ok", "ok"): 1,
        ("ok", "oom"): 1,
        ("oom", "oom"): 1,
        ("oom", "ok"): 1,
    }
    assert verdicts.right == verdicts.always_fits == 0.5
    assert verdicts.headroom_bytes["oom", "oom"][0] < 0
    one = group("verdict", missed_oom=promise(0, 0), false_oom=promise(0, 1))
    statuses = {c.statistic: c.status for c in report(rows, one).checks}
    assert statuses == {"missed_oom": "FAIL", "false_oom": "accepted"}


def test_own_rows_make_a_group_per_source() -> None:
    rows = [row(1, 1), row(1, 1, source="Mine", peak_device_bytes="5")]
    names = [each.name for each in by_source(rows).groups]
    assert names == ["Paper", "Mine", "Mine (peak bytes)"]


def test_a_group_reads_its_own_sheet() -> None:
    """Rows of the other sheet count in no other group and in no verdict."""
    own, other = group(), replace(group(), name="more", sheet="runs_more.csv")
    both = Accuracy(groups=(own, other))
    more = [row(1, 2), row(1, 3, status="oom")]
    rows = [row(1, 1), *({**one, "sheet": "runs_more.csv"} for one in more)]
    made = validate(rows, FIT, both)
    assert [each.mean for each in made.groups] == [0.0, 1.5]
    assert made.verdicts.cells == 1
    assert [each.name for each in validate([row(1, 1)], FIT, both).groups] == [own.name]


def test_the_committed_targets_read() -> None:
    groups = load_accuracy().groups
    assert len({each.name for each in groups}) == len(groups)
    assert all(p.accepted >= 0 for each in groups for p in each.promises.values())


def test_a_reported_statistic_is_printed_and_never_fails() -> None:
    rows = [row(1, 1), row(0, 0, status="oom")]
    one = replace(group("verdict"), reported={"missed_oom": "why", "false_oom": ""})
    made = validate(rows, FIT, Accuracy(groups=(one,)))
    assert [(c.value, c.status, c.reason) for c in made.groups[0].checks] == [
        (1.0, "reported", "why"),
        (0.0, "reported", ""),
    ]
    assert not made.failed
    assert made.groups[0].status == "-"
    first, _ = promise_table(made).rows
    assert (first["value"], first["target"], first["status"]) == (1.0, None, "reported")


def test_verdicts_are_promised_only_with_enough_cells_out_of_memory() -> None:
    cells = read_sheet(data_dir("published") / "runs.csv")
    for each in load_accuracy().groups:
        if each.metric == "verdict":
            ooms = sum(cell["status"] == "oom" for cell in members(each, cells))
            assert ooms >= FEWEST_OOMS or not each.promises, each.name
            assert each.promises or each.reported, each.name
