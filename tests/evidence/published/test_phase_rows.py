"""Phases of published steps with states in host memory, and the table of their errors."""

from collections.abc import Sequence
from statistics import median
from typing import Any

import pytest

from rematbench.evidence.accuracy import Accuracy, load_accuracy, validate
from rematbench.evidence.published.host_rows import node_count, row_problem
from rematbench.evidence.published.phase_rows import hosted_rows, phase_rows, phases, whole_plan
from rematbench.evidence.published.update_rows import INTERLEAVED, sheet_rows
from rematbench.inputs.load import calibration
from rematbench.inputs.paths import data_dir
from rematbench.paper.tables import offloaded_front
from rematbench.paper.tables.offloaded_updates import PHASES, updates_table


def test_phases_grow_with_micro_batches_and_leave_the_update() -> None:
    """With M micro-batches a step has M forwards and M backwards, and one update."""
    same = [row for row in sheet_rows() if row["note"].startswith("act-output-7B-scale-GA")]
    few, many = (
        next(row for row in same if row["variant"] == "deepspeed_async" and row[key] == value)
        for key, value in (("global_batch", "4"), ("global_batch", "16"))
    )
    steps = []
    for row in (few, many):
        given = row_problem(row)
        steps.append(phases(given, whole_plan(row, given)))
    one, four = steps
    assert four.forward_s == pytest.approx(4 * one.forward_s, rel=0.02)
    assert four.backward_s == pytest.approx(4 * one.backward_s, rel=0.02)
    assert one.update_s == pytest.approx(four.update_s, rel=0.02)


def test_updates_in_the_accuracy_table_meet_their_bars() -> None:
    groups = tuple(one for one in load_accuracy().groups if one.sheet == "offloaded_states.csv")
    reports = validate([], calibration(), Accuracy(groups=groups), hosted=hosted_rows()).groups
    assert {report.metric: report.status for report in reports} == {
        "host_used_gib": "met",
        "update_s": "met",
    }
    (updates,) = (report for report in reports if report.metric == "update_s")
    assert (updates.cells, updates.splits["fitted"], updates.constants) == (41, 39, 5)


@pytest.mark.full
def test_forwards_of_one_node_are_predicted_and_backwards_are_not() -> None:
    """The bar of both, a median of 8 %, was set before any error was seen.  It is missed by all
    forwards, because the network of several nodes is not known, and by backwards
    (docs/decisions/evidence.md)."""
    alone = [row for row in phase_rows() if node_count(row) == 1]
    quick = [row for row in alone if row["gradient_copy"] == "async"]
    assert _median(alone, "forward") < 0.08 < _median(phase_rows(), "forward") < 0.14
    assert 0.08 < _median(quick, "backward") < 0.29


def _median(rows: Sequence[dict[str, Any]], phase: str) -> float:
    return median(abs(row[f"pred_{phase}_s"] / float(row[f"{phase}_s"]) - 1.0) for row in rows)


@pytest.mark.full
def test_the_table_has_every_row_in_every_phase() -> None:
    lines = updates_table(phase_rows()).rows
    for phase in PHASES:
        assert sum(line["rows"] for line in lines if line["phase"] == phase) == 106
    updates = [line for line in lines if line["phase"] == "update"]
    assert all(line["split"] == "fitted" for line in updates if line["pieces"] == INTERLEAVED)


@pytest.mark.full
def test_the_planner_is_faster_than_deep_optimizer_states_at_its_bytes() -> None:
    """At no more device bytes than a published run on the H100 with a part of the states, a plan of
    the front has a shorter update than was published."""
    lines = offloaded_front.build(data_dir("published") / "offloaded_states.csv").rows
    h100 = [line for line in lines if line["cluster"] == "h100-80gb-dos"]
    runs = [line for line in h100 if line["series"] == "Deep Optimizer States"]
    assert {line["world"] for line in runs} == {"published", "simulated"}
    for run in (line for line in runs if line["world"] == "published" and line["share"] < 1.0):
        front = [
            line["update_s"]
            for line in h100
            if line["series"] == offloaded_front.FRONT
            and line["parameters"] == run["parameters"]
            and line["peak_device_bytes"] <= run["peak_device_bytes"]
        ]
        assert min(front) < run["update_s"]
