"""The matrix: best layouts by search, two tables that never mix, verdicts with reasons."""

import json
import math
import shlex
from itertools import product
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from rematbench.cli.app import command_line
from rematbench.costs.states import room_bytes
from rematbench.evidence.bands import ratio_band, shipped
from rematbench.evidence.job_evidence import methods_of
from rematbench.evidence.peaks import reserve_bytes
from rematbench.evidence.published.sheets import read_sheet
from rematbench.host.console import CommandError
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.load import calibration, load_cluster
from rematbench.inputs.paths import data_dir
from rematbench.paper.matrix.best import (
    ANSWERED,
    ANY,
    BEST,
    CELL,
    OPEN,
    SAME,
    Answers,
    Worker,
    cell_job,
    searched,
)
from rematbench.paper.matrix.spec import MatrixSpec, Work, load_matrix
from rematbench.paper.matrix.sweep import NOT_RUN, Line, run_matrix
from rematbench.paper.matrix.verdicts import by_cell, judged, speed, summary
from rematbench.paper.tables.matrix import fastest_table, layout_text, matrix_tables, shortage
from rematbench.paper.tables.pareto import pareto_table
from tests.problems import all_methods

REGISTRY = all_methods()
RUN, app = CliRunner(), command_line()
ARMS = ("keep all", "full recomputation", "balanced", "balanced + offload", "mst")


def declared() -> MatrixSpec:
    return load_matrix(data_dir("config") / "paper.yaml")


def small(**changes: object) -> MatrixSpec:
    spec = declared()
    arms = tuple(arm for arm in spec.arms if arm.name in ARMS)
    base = replace(
        spec, works=spec.works[:1], clusters=("h800-80gb",), seq_lens=(16384,), arms=arms
    )
    return replace(base, **changes)


@pytest.fixture(scope="module")
def ran() -> list[Line]:
    (lines,) = run_matrix(small(), REGISTRY)
    return lines


@pytest.fixture(scope="module")
def tiny_ran() -> tuple[MatrixSpec, list[Line]]:
    """A cell of a small model on four devices, and its lines."""
    spec = declared()
    names = ("full recomputation", "balanced + offload", "memo")
    arms = (arm for arm in spec.arms if arm.name in names)
    small_spec = replace(
        spec, works=(Work(model="gpt-1.3b", gpus=4),), clusters=("a800-80gb",), seq_lens=(16384,),
        tokens_per_step=16384 * 16,
        arms=tuple(replace(a, settings={"steps": 4} if "offload" in a.name else {}) for a in arms),
    )  # fmt: skip
    (lines,) = run_matrix(small_spec, REGISTRY)
    return small_spec, lines


def answers_of(spec: MatrixSpec) -> list[dict[str, str]]:
    """The answers of the matrix's one cell, as read from a file."""
    work = (spec.works[0], spec.seq_lens[0])
    return [{key: str(value) for key, value in row.items()} for row in Worker(spec)(work)]


def test_the_declared_matrix_is_what_the_paper_needs() -> None:
    spec = declared()
    assert [work.model for work in spec.works] == [
        "llama3-8b", "llama-65b", "llama2-70b", "llama-175b",
    ]  # fmt: skip
    assert spec.seq_lens == tuple(1024 * n for n in (4, 16, 64, 128, 256, 1024))
    assert len(spec.clusters) == 3
    run = {name for arm in spec.all_arms(REGISTRY) for name in arm.method.split("+")}
    assert run == {name for name, one in REGISTRY.methods.items() if not one.waits}
    spec.check("suite")


def test_mistakes_in_a_declaration_are_one_line() -> None:
    with pytest.raises(ConfigError, match="suite: baseline: no arm 'nobody'"):
        small(baseline="nobody").check("suite")
    with pytest.raises(ConfigError, match="tokens_per_step: 4194304 is not a multiple of seq_len"):
        small(seq_lens=(5000,)).check("suite")
    with pytest.raises(ConfigError, match="matrix: models: no model 'gpt'"):
        small().restricted(["gpt"], [])


def test_one_layout_in_one_table_and_none_better_in_the_other(ran: list[Line]) -> None:
    """A searched layout is the best within the gap, of those that leave the reserve free."""
    same = [line for line in ran if line["table"] == SAME and line["status"] != NOT_RUN]
    assert len({tuple(line[key] for key in OPEN) for line in same}) == 1
    assert {line["pp"] >= small().same_layout_pp for line in same} == {True}
    for line in judged(same, small()):
        (best,) = [one for one in ran if one["table"] == BEST and one["arm"] == line["arm"]]
        if "gap" not in best:
            assert REGISTRY.has_planner(line["arm"].split("+"))  # at the one layout only
            assert speed(best) == speed(line)
            continue
        assert best["gap"] <= small().within
        if line.get("fits") != "tight":
            assert speed(best) >= (1 - small().within) * speed(line)


def test_the_fastest_plan_of_all_is_no_slower_than_any_arm(ran: list[Line]) -> None:
    (found,) = [line for line in ran if line["table"] == ANY]
    assert speed(found) >= max(speed(line) for line in ran if line["table"] == BEST)
    assert found["gap"] <= small().within


def test_committed_answers_are_simulated_and_the_rest_is_searched(
    tiny_ran: tuple[MatrixSpec, list[Line]],
) -> None:
    """Both give the same lines; an answer whose step costs no longer confirm is told."""
    spec, lines = tiny_ran
    found = answers_of(spec)
    asked = [(row["table"], row["arm"]) for row in found]
    arms = {arm.name for arm in spec.arms}
    assert {(BEST, name) for name in arms} | {(SAME, spec.baseline), (ANY, "")} <= set(asked)
    assert len(asked) == len(set(asked))
    (again,) = run_matrix(spec, REGISTRY, found[1:])
    assert again == lines
    slow = [{**row, "step_s": str(1.01 * float(row["step_s"]))} for row in found]
    with pytest.raises(CommandError, match="the cost model has changed; search again"):
        next(run_matrix(spec, REGISTRY, slow))


def test_an_answer_to_another_question_is_searched_again(
    tiny_ran: tuple[MatrixSpec, list[Line]],
) -> None:
    """An arm with another method under its name, and a fastest plan that knew fewer methods."""
    spec, lines = tiny_ran
    found = answers_of(spec)
    other = [
        replace(arm, method="full_recompute", settings={}) if "+" in arm.method else arm
        for arm in spec.arms
    ]
    (again,) = run_matrix(replace(spec, arms=tuple(other)), REGISTRY, found)
    best = {line["arm"]: line["name"] for line in again if line["table"] == BEST}
    assert best["balanced + offload"] == best["full recomputation"] == "full_recompute"
    poor = [{**row, "asked": "", "step_s": "1e9"} if row["table"] == ANY else row for row in found]
    (again,) = run_matrix(spec, REGISTRY, poor)
    assert again == lines


def test_a_damaged_answer_is_one_line(tiny_ran: tuple[MatrixSpec, list[Line]]) -> None:
    spec, _ = tiny_ran
    first, *_ = answers_of(spec)
    for wrong in ({"tp": "x"}, {"partition": "1,2"}, {"layouts": ""}, {"pp": "3"}):
        with pytest.raises(CommandError, match="a800-80gb 16384 best layout"):
            next(run_matrix(spec, REGISTRY, [{**first, **wrong}]))


def test_an_arm_without_a_plan_anywhere_says_why() -> None:
    """pp_offload needs three pipeline ranks, which two devices do not have; no bytes are short."""
    spec = declared()
    arms = tuple(arm for arm in spec.arms if arm.name in ("full recomputation", "offload only"))
    small_spec = replace(
        spec, works=(Work(model="gpt-1.3b", gpus=2),), clusters=("a800-80gb",), seq_lens=(4096,),
        arms=arms, tokens_per_step=4096 * 4,
    )  # fmt: skip
    (lines,) = run_matrix(small_spec, REGISTRY)
    (line,) = [one for one in lines if (one["table"], one["arm"]) == (BEST, "offload only")]
    assert (line["status"], "needs pp >= 3" in line["reason"]) == ("unsupported", True)


def test_every_question_of_the_declared_matrix_has_its_committed_answer() -> None:
    """Also the same question: a changed arm or job would be searched on every run.  A method of a
    user's own, in methods/, has no committed answer."""
    spec = declared()
    rows = read_sheet(data_dir("config").parent / "results" / "searched" / "cells.csv", ANSWERED)
    (known,) = {row["asked"].split()[0] for row in rows if row["table"] == ANY}
    shipped = {name: REGISTRY.methods[name] for name in known.split(",")}
    registry = replace(REGISTRY, methods=shipped)
    committed = {tuple(row[key] for key in (*CELL, "table", "arm")): row["asked"] for row in rows}
    assert len(committed) == len(rows)
    assert all(row["gap"] for row in rows)
    wanted = {}
    for work, cluster, seq_len in product(spec.works, spec.clusters, spec.seq_lens):
        answers = Answers(cell_job(spec, work, cluster, seq_len), spec, registry, {})
        arms = [arm.name for arm in spec.all_arms(registry) if searched(arm, seq_len, registry)]
        keys = [(BEST, name) for name in arms] + [(SAME, spec.baseline), (ANY, "")]
        where = (work.model, cluster, str(seq_len))
        wanted |= {(*where, *key): answers.question(*key) for key in keys}
    assert committed == wanted


def test_a_cell_is_what_simulate_says(ran: list[Line]) -> None:
    """Shared programs and weighing first change no number."""
    for line in ran:
        if line["table"] == BEST and line["status"] == "ok":
            command = shlex.split(line["run_with"])[1:]
            told = RUN.invoke(app, [*command, "--json"])
            assert told.exit_code == 0, told.output
            got = json.loads(told.stdout)
            assert got["tokens_per_s_per_gpu"] == pytest.approx(line["tokens_per_s_per_gpu"])
            assert got["headroom_bytes"] == line["headroom_bytes"]


def test_parts_of_the_fastest_add_up_to_its_step(ran: list[Line]) -> None:
    for table in (SAME, BEST):
        own = [line for line in ran if line["table"] == table]
        best = max(own, key=speed)
        parts = [value for key, value in best.items() if key.startswith("part_")]
        assert sum(parts) == pytest.approx(1.0)


def test_what_does_not_fit_says_by_how_much(ran: list[Line]) -> None:
    for line in ran:
        if line["status"] == "oom":
            short = line.get("device_short_bytes", 0) + line.get("host_short_bytes", 0)
            assert short > 0
            assert f"{short / 2**30:,.1f} GiB" in shortage(line) or " and " in shortage(line)


def test_ties_lie_within_the_error_of_ratios_and_the_rest_outside(ran: list[Line]) -> None:
    rows = judged(ran, small())
    for table in (SAME, BEST):
        own = [row for row in rows if row["table"] == table and speed(row)]
        best = max(own, key=speed)
        assert best["rank"] == "best"
        where = [layout_text(best), best.get("partition")]
        for row in own:
            alike = [layout_text(row), row.get("partition")] == where
            assert alike or table == BEST
            least = speed(best) * math.exp(-ratio_band(one_layout=alike))
            if row is not best:
                assert (speed(row) >= least) == (row.get("rank") == "tie")


def test_every_speed_has_a_band_and_tuned_methods_leave_the_reserve(ran: list[Line]) -> None:
    rows = [row for row in judged(ran, small()) if row["status"] == "ok"]
    for row in rows:
        room = room_bytes(load_cluster(row["cluster"]), calibration())
        reserve = reserve_bytes(room)
        assert row["low"] < speed(row) < row["high"]
        assert (row["headroom_bytes"] < reserve) == (row["fits"] == "tight")
        strange = methods_of(row["method"]) - shipped().covered.methods
        assert ("mechanism" in row["outside"]) == bool(strange)
    (tuned,) = [r for r in rows if r["arm"] == "balanced + offload" and r["table"] == BEST]
    assert tuned["headroom_bytes"] >= reserve_bytes(
        room_bytes(load_cluster(tuned["cluster"]), calibration())
    )


def test_a_share_that_a_method_chooses_is_tried_among_the_plans_of_its_layout() -> None:
    spec = small(arms=tuple(arm for arm in declared().arms if arm.name == "memo"))
    cell = cell_job(spec, spec.works[0], spec.clusters[0], spec.seq_lens[0])
    answers = Answers(cell, spec, REGISTRY, {})
    found = answers.best("memo")
    assert found.choice is not None
    site = cell.trials(found.choice)
    assert site.problem.layout == found.choice.layout
    before = len(site.trials)
    own = site.trial(answers.methods["memo"].text, REGISTRY)
    assert len(site.trials) == before > 1
    steps = [one.result.fitting_s for one in (own, *site.trials.values())]
    assert found.step_s == min(steps)


def test_the_outcome_is_counted_from_the_best_layouts(ran: list[Line]) -> None:
    spec = small()
    rows = judged(ran, spec)
    assert len(by_cell(rows)) == 1
    best = max((row for row in rows if row["table"] == BEST), key=speed)
    (base,) = [r for r in rows if r["table"] == BEST and r["arm"] == spec.baseline]
    gain = 100 * (speed(best) / speed(base) - 1)
    told = summary(rows, spec.baseline)
    assert told.startswith("Predicted, not measured: ")
    assert f"median {gain:.0f} % (from {gain:.0f} to {gain:.0f} %) faster than" in told
    assert "Something fits in 1 of 1 cells." in told
    ties = any(row.get("rank") == "tie" for row in rows if row["table"] == BEST)
    assert f"is within our error in {int(ties)} cells" in told
    (line,) = fastest_table(rows, spec).rows
    assert line["arm"] == best["arm"]


def test_all_tables_are_written(ran: list[Line], tmp_path: Path) -> None:
    rows = judged(ran, small())
    for table in matrix_tables(rows, small()):
        table.write(tmp_path)
        assert (tmp_path / f"{table.name}.md").read_text().startswith(f"### {table.title}")


def test_the_published_point_lies_near_the_front() -> None:
    """No point of the front beats balanced checkpointing in both; its cost is under a percent."""
    rows = [row for row in pareto_table(declared()).rows if row["model"] == "llama-65b"]
    (balanced,) = [row for row in rows if row["point"] == "balanced"]
    assert 0.0 < balanced["recompute_share"] < 0.02
    front = [row for row in rows if row["point"] == "front"]
    bytes_, seconds = zip(*((row["kept_bytes"], row["recompute_s"]) for row in front), strict=True)
    assert list(bytes_) == sorted(bytes_, reverse=True)
    assert list(seconds) == sorted(seconds)
