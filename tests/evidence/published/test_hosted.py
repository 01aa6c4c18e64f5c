"""Published steps with states in host memory: which rows are compared, their fitted constants, and
the bars of their phases and bytes."""

from collections import Counter
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import pytest

from rematbench.costs.states import zero3_host_states
from rematbench.engine.lowering.states.host_states import rank_tensors
from rematbench.evaluate.evaluation import evaluate, host_node_bytes
from rematbench.evidence.accuracy import Accuracy, load_accuracy, validate
from rematbench.evidence.hosted import (
    HOSTED,
    INTERLEAVED,
    SERIAL,
    HostKind,
    fitted_rates,
    hosted_cases,
    is_host_fitted,
    is_update_fitted,
    phases,
    placed_states,
    states_bytes,
    timed,
)
from rematbench.evidence.published.row_cases import read_case
from rematbench.evidence.published.words import committed
from rematbench.inputs.load import calibration, load_cluster
from rematbench.inputs.paths import data_dir
from rematbench.inputs.system import with_facts
from rematbench.paper.tables import offloaded_front
from rematbench.paper.tables.offloaded_updates import PHASES, updates_table
from rematbench.plan import Plan
from tests.engine.test_host_states import of_row, published
from tests.predicted import read_of
from tests.problems import all_methods

NODES = ("polaris-a100-40gb-bound", "h100-80gb-dos")


def errors(rows: Sequence[dict[str, Any]], phase: str = "update") -> list[float]:
    return [abs(float(row[f"pred_{phase}_s"]) / float(row[f"{phase}_s"]) - 1.0) for row in rows]


def test_every_row_of_a_named_node_is_compared() -> None:
    rows = committed(HOSTED)
    assert len(rows) == 108
    assert len(hosted_cases()) == 106
    counts = Counter(row["table"] for row, _ in hosted_cases())
    assert counts == {SERIAL: 80, INTERLEAVED: 26}
    assert {row["host_used_gib"] for row, _ in hosted_cases() if row["table"] == INTERLEAVED} == {
        ""
    }


def fitted_other_bytes(node: str) -> int:
    """The median, over the rows of a node's smallest model, of the bytes beyond the states."""
    rows = [(r, c) for r, c in hosted_cases() if r["table"] == SERIAL and is_host_fitted(r)]
    used = [(float(r["host_used_gib"]) * 2**30, c) for r, c in rows if c.cluster == node]
    return int(median(nbytes - states_bytes(case) for nbytes, case in used))


@pytest.mark.parametrize("node", NODES)
def test_the_constants_of_a_node_are_those_of_its_fitted_rows(node: str) -> None:
    cluster = load_cluster(node)
    rate = fitted_rates()[HostKind(node, cluster.gpus_per_node)]
    assert cluster.host_update_parameters_per_s == pytest.approx(rate, rel=1e-3)
    assert cluster.host_other_bytes == fitted_other_bytes(node)
    common = calibration().common
    assert common.host_other_bytes == pytest.approx(fitted_other_bytes("h100-80gb-dos"), rel=1e-3)


def test_the_two_shares_are_those_of_the_interleaved_rows() -> None:
    """By least squares of relative errors of an update: what the host's pieces take one after
    another, and the copies up of visits."""
    parts = []
    for row, case in hosted_cases():
        if row["table"] == INTERLEAVED:
            problem = timed(case).problem()
            plan, count = placed_states(case, problem)
            counts, cost = plan.state("optimizer").counts(count), problem.cost
            serial_s = cost.host_update_s(counts["host"]) + cost.host_cast_s(counts["host"])
            serial_s += cost.copy_s(problem.system.states.param_bytes * counts["host"], "h2d")
            visits = problem.system.states.optimizer_bytes * counts["visit"]
            parts.append([serial_s, cost.copy_s(visits, "h2d")] / np.float64(row["update_s"]))
    found, *_ = np.linalg.lstsq(np.array(parts), np.ones(len(parts)), rcond=None)
    common = calibration().common
    shares = (common.host_beside_share, common.visit_delay_share)
    assert shares == pytest.approx(found, rel=2e-3)


def test_updates_one_after_another_are_predicted() -> None:
    """The bars, 5 and 10 %, were set before any error was seen."""
    rows = read_of(HOSTED)
    held = [row for row in rows if row["table"] == SERIAL and not is_update_fitted(row)]
    ratios = [row for row in held if row["host_ratio"] != "1"]
    assert len(held) == 41
    assert len(ratios) == 18
    for some in (held, ratios):
        assert median(errors(some)) < 0.05
        assert max(errors(some)) < 0.10


def test_interleaved_updates_are_met_with_two_constants() -> None:
    """The bar of all rows, 6 %, was set before any error was seen.  K = 2 alone misses it: one node
    is predicted too slow and the other too fast, and a constant of a node would be a third."""
    rows = [row for row in read_of(HOSTED) if row["table"] == INTERLEAVED]
    assert len(rows) == 26
    assert median(errors(rows)) < 0.06
    by_interleave = {k: [row for row in rows if row["update_interleave"] == k] for k in "25"}
    assert median(errors(by_interleave["5"])) < 0.06
    assert median(errors(by_interleave["2"])) < 0.07


def test_ratio_and_interleave_count_sub_groups() -> None:
    (case,) = [c for r, c in hosted_cases() if r["variant"] == "dos" and r["host_ratio"] == "0.5"]
    plan, count = placed_states(case, case.problem())
    counts = plan.state("optimizer").counts(count)
    assert counts["device"] / count == pytest.approx(0.5, abs=0.05)
    hosted = counts["host"] + counts["visit"]
    assert counts["visit"] / hosted == pytest.approx(1 / 2, abs=0.05)


def test_sub_groups_explain_how_much_a_node_uses() -> None:
    """Eight sizes of sub-groups from 1e7 to 3e9 parameters, one model and one GPU: what is beyond
    the states differs by 2.3 GiB although blocks of powers of two make the states differ by 11."""
    rows = [(r, c) for r, c in hosted_cases() if "subg-size-motivation" in r["note"]]
    rows = [(row, case) for row, case in rows if row["table"] == SERIAL]
    assert len({row["subgroup_parameters"] for row, _ in rows}) == 8
    states = [states_bytes(case) / 2**30 for _, case in rows]
    used = [float(row["host_used_gib"]) for row, _ in rows]
    rest = [all_ - held for all_, held in zip(used, states, strict=True)]
    assert max(states) - min(states) > 10
    assert max(rest) - min(rest) < 2.5


@pytest.mark.parametrize("row", published(), ids=lambda row: f"{row['cluster']}-{row['model']}")
def test_a_simulated_job_has_the_same_bytes(row: dict[str, str]) -> None:
    """The states of a row are those of the plan that `simulate` prints, without the temporary copy
    of an update, which no log shows."""
    given, _ = of_row(row)
    facts = {"fused_linears": True, "optimizer_on_host": True}
    system = with_facts(given.system, **facts, sub_group_parameters=int(row["subgroup_parameters"]))
    found = type(given)(given.workload, given.cluster, system, given.layout, given.calibration)
    ranks = evaluate(found, found.base_plan).ranks
    tensors = rank_tensors(found, found.base_plan, 0)
    copy = zero3_host_states(tensors, found.layout.dp, system).update
    own = next(
        one
        for one in committed(HOSTED)
        if (one["note"], one["step_s"]) == (row["note"], row["step_s"])
    )
    states = states_bytes(read_case(own, all_methods()))
    assert host_node_bytes(found, ranks) == states + copy * found.layout.gpus


def test_phases_grow_with_micro_batches_and_leave_the_update() -> None:
    """With M micro-batches a step has M forwards and M backwards, and one update."""
    same = [(r, c) for r, c in hosted_cases() if r["note"].startswith("act-output-7B-scale-GA")]
    steps = []
    for batch in ("4", "16"):
        case = next(
            c for r, c in same if (r["variant"], r["global_batch"]) == ("deepspeed_async", batch)
        )
        problem = case.problem()
        base = placed_states(case, problem)[0]
        plan = all_methods().resolve("full_recompute").plan(problem, base)
        assert isinstance(plan, Plan)
        steps.append(phases(problem, plan))
    one, four = steps
    assert four.forward_s == pytest.approx(4 * one.forward_s, rel=0.02)
    assert four.backward_s == pytest.approx(4 * one.backward_s, rel=0.02)
    assert one.update_s == pytest.approx(four.update_s, rel=0.02)


def test_promises_of_the_sheet_are_met_out_of_sample() -> None:
    groups = tuple(one for one in load_accuracy().groups if one.sheet == HOSTED)
    bytes_, updates = validate(read_of(HOSTED), calibration(), Accuracy(groups=groups)).groups
    assert (bytes_.metric, updates.metric) == ("host_used_gib", "update_s")
    assert {check.status for one in (bytes_, updates) for check in one.checks} == {"met"}
    assert (bytes_.cells, bytes_.splits["fitted"], bytes_.constants, bytes_.missing) == (
        34,
        46,
        2,
        0,
    )
    assert (updates.cells, updates.splits["fitted"], updates.constants) == (41, 39, 5)


@pytest.mark.full
def test_forwards_of_one_node_are_predicted_and_backwards_are_not() -> None:
    """The bar of both, a median of 8 %, was set before any error was seen.  It is missed by all
    forwards, because the network of several nodes is not known, and by backwards
    (docs/decisions/evidence.md)."""
    rows = read_of(HOSTED)
    alone = [row for row in rows if row["node"].endswith(" x1")]
    quick = [row for row in alone if row["gradient_copy"] == "async"]
    assert median(errors(alone, "forward")) < 0.08 < median(errors(rows, "forward")) < 0.14
    assert 0.08 < median(errors(quick, "backward")) < 0.29


@pytest.mark.full
def test_the_table_has_every_row_in_every_phase() -> None:
    lines = updates_table(read_of(HOSTED)).rows
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
