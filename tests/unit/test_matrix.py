"""The matrix: one candidate list for all arms, two tables that never mix, verdicts with reasons."""

import math
from pathlib import Path

import pytest
from msgspec.structs import replace

from rematbench.choose.outcome import run_method
from rematbench.matrix.layouts import KEPT, RULES, candidates
from rematbench.matrix.spec import MatrixSpec
from rematbench.matrix.sweep import BEST, NOT_RUN, SAME, Line, run_matrix
from rematbench.matrix.tables import fastest_table, matrix_tables, shortage
from rematbench.matrix.verdicts import by_cell, judged, outcome, speed
from rematbench.published.bands import leaving_reserve, ratio_band, reserve_bytes, shipped
from rematbench.published.evidence import methods_of
from rematbench.runs.suite import load_suite
from rematbench.spec.configfile import ConfigError
from rematbench.spec.load import load_cluster, load_model, load_system
from rematbench.spec.paths import data_dir
from rematbench.studies.front import pareto_table
from tests.problems import all_methods, make_problem

REGISTRY = all_methods()
ARMS = ("keep all", "full recomputation", "balanced", "balanced + offload", "mst")


def declared() -> MatrixSpec:
    found = load_suite(data_dir("config") / "paper.yaml").matrix
    assert found is not None
    return found


def small(**changes: object) -> MatrixSpec:
    spec = declared()
    arms = tuple(arm for arm in spec.arms if arm.name in ARMS)
    base = replace(
        spec, works=spec.works[:1], clusters=("h800-80gb",), seq_lens=(16384,), arms=arms
    )
    return replace(base, **changes)


@pytest.fixture(scope="module")
def ran() -> tuple[list[Line], list[Line]]:
    ((lines, told),) = run_matrix(small(), REGISTRY)
    return lines, told


def test_the_declared_matrix_is_what_the_paper_needs() -> None:
    spec = declared()
    assert [work.model for work in spec.works] == [
        "llama3-8b", "llama-65b", "llama2-70b", "llama-175b",
    ]  # fmt: skip
    assert spec.seq_lens == tuple(1024 * n for n in (4, 16, 64, 128, 256, 1024))
    assert len(spec.clusters) == 3
    run = {name for arm in spec.all_arms(REGISTRY) for name in arm.method.split("+")}
    assert run == set(REGISTRY.methods)
    assert spec.problems() == []


def test_mistakes_in_a_declaration_are_one_line() -> None:
    spec = small(baseline="nobody", seq_lens=(5000,))
    assert spec.problems() == [
        "baseline: no arm 'nobody'",
        "tokens_per_step 4194304 is no multiple of seq_len 5000",
    ]
    with pytest.raises(ConfigError, match="no 'gpt'"):
        next(run_matrix(small(), REGISTRY, ["gpt"]))


@pytest.mark.parametrize("seq_len", [4096, 262144])
def test_candidates_are_few_equal_for_all_arms_and_each_has_a_fate(seq_len: int) -> None:
    spec = declared()
    found = candidates(
        spec, spec.works[1], load_model("llama-65b"), load_cluster("h800-80gb"),
        load_system(spec.system), seq_len,
    )  # fmt: skip
    assert {one.fate for one in found} <= {KEPT, *RULES}
    kept = [one for one in found if one.fate == KEPT]
    assert 3 <= len(kept) <= 24
    assert any(one.layout.pp >= spec.same_layout_pp for one in kept)
    for one in kept:
        assert one.layout.gpus == spec.works[1].gpus
        assert one.layout.global_batch * seq_len == spec.tokens_per_step


def test_one_layout_in_one_table_and_none_better_in_the_other(
    ran: tuple[list[Line], list[Line]],
) -> None:
    lines, told = ran
    same = [line for line in lines if line["table"] == SAME and line["status"] != NOT_RUN]
    assert len({(line["tp"], line["cp"], line["pp"], line["vpp"]) for line in same}) == 1
    for line in same:
        (best,) = [one for one in lines if one["table"] == BEST and one["arm"] == line["arm"]]
        assert speed(best) >= speed(line)
    assert sum(line["fate"] == KEPT for line in told) <= 24


def test_a_cell_is_what_simulate_says(ran: tuple[list[Line], list[Line]]) -> None:
    """Shared programs and weighing first change no number."""
    spec = small()
    for line in ran[0]:
        if line["table"] != BEST or line["status"] != "ok" or line["arm"] not in ARMS:
            continue
        arm = next(arm for arm in spec.arms if arm.name == line["arm"])
        listed = candidates(
            spec, spec.works[0], load_model("llama3-8b"), load_cluster("h800-80gb"),
            load_system(spec.system), 16384,
        )  # fmt: skip
        lay = next(
            one.layout for one in listed
            if all(getattr(one.layout, key) == line[key] for key in ("tp", "cp", "pp", "vpp"))
        )  # fmt: skip
        problem = make_problem(
            model="llama3-8b", cluster="h800-80gb", system=spec.system, layout=lay, seq_len=16384
        )
        got = run_method(leaving_reserve(problem), arm.resolved(REGISTRY))
        assert got.evaluation is not None
        assert got.evaluation.tokens_per_s_per_gpu == line["tokens_per_s_per_gpu"]
        assert got.evaluation.reserved_bytes == line["reserved_bytes"]


def test_parts_of_the_fastest_add_up_to_its_step(ran: tuple[list[Line], list[Line]]) -> None:
    for table in (SAME, BEST):
        own = [line for line in ran[0] if line["table"] == table]
        best = max(own, key=speed)
        parts = [value for key, value in best.items() if key.startswith("part_")]
        assert sum(parts) == pytest.approx(1.0)


def test_what_does_not_fit_says_by_how_much(ran: tuple[list[Line], list[Line]]) -> None:
    for line in ran[0]:
        if line["status"] == "oom":
            short = line.get("device_short_bytes", 0) + line.get("host_short_bytes", 0)
            assert short > 0
            assert f"{short / 2**30:,.1f} GiB" in shortage(line) or " and " in shortage(line)


def test_ties_lie_within_the_error_of_ratios_and_the_rest_outside(
    ran: tuple[list[Line], list[Line]],
) -> None:
    rows = judged(ran[0], small())
    for table in (SAME, BEST):
        own = [row for row in rows if row["table"] == table and speed(row)]
        best = max(own, key=speed)
        assert best["rank"] == "best"
        least = speed(best) * math.exp(-ratio_band(one_layout=table == SAME))
        for row in own:
            if row is not best:
                assert (speed(row) >= least) == (row.get("rank") == "tie")


def test_every_speed_has_a_band_and_tuned_methods_leave_the_reserve(
    ran: tuple[list[Line], list[Line]],
) -> None:
    rows = [row for row in judged(ran[0], small()) if row["status"] == "ok"]
    for row in rows:
        reserve = reserve_bytes(row["usable_bytes"])
        assert row["low"] < speed(row) < row["high"]
        assert (row["headroom_bytes"] < reserve) == (row["fits"] == "tight")
        strange = methods_of(row["method"]) - shipped().covered.methods
        assert ("mechanism" in row["outside"]) == bool(strange)
    (tuned,) = [r for r in rows if r["arm"] == "balanced + offload" and r["table"] == BEST]
    assert tuned["headroom_bytes"] >= reserve_bytes(tuned["usable_bytes"])


def test_the_outcome_is_counted_from_the_best_layouts(
    ran: tuple[list[Line], list[Line]],
) -> None:
    spec = small()
    rows = judged(ran[0], spec)
    found = outcome(rows, spec.baseline)
    assert found.cells == len(by_cell(rows)) == 1
    assert found.clear + found.tied == found.fitting == 1
    best = max((row for row in rows if row["table"] == BEST), key=speed)
    (base,) = [r for r in rows if r["table"] == BEST and r["arm"] == spec.baseline]
    assert found.gains == (speed(best) / speed(base) - 1,)
    assert "not measured" in found.sentence
    (line,) = fastest_table(rows, spec).rows
    assert line["arm"] == best["arm"]


def test_all_tables_are_written(ran: tuple[list[Line], list[Line]], tmp_path: Path) -> None:
    rows = judged(ran[0], small())
    for table in matrix_tables(rows, ran[1], small()):
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
