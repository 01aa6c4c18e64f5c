"""Predictions before a measurement, turns in random order, ratios and their tables; no torch."""

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rematbench.evaluate.evaluator import SINGLE_EVALUATOR
from rematbench.evaluate.result import evaluate_plan
from rematbench.host.console import CommandError
from rematbench.host.gpu_state import GpuState, read_state
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.paths import data_dir
from rematbench.measure import layer_suite, predicted_steps
from rematbench.measure.layer_suite import HandCell, LayerSuite
from rematbench.measure.parts import layers
from rematbench.measure.parts.checks import Finding, Summary
from rematbench.measure.parts.layers import TurnLog
from rematbench.measure.predicted_steps import PREDICTED
from rematbench.measure.records import Prediction, Turn, append_line, by_cell, read_lines
from rematbench.paper.tables.gpu_checks import checks_table
from rematbench.paper.tables.gpu_layers import build, layer_rows, layers_table, ratios_table
from rematbench.plan import Plan
from rematbench.worlds.records.record import Provenance, RecordError
from rematbench.worlds.records.suite_cells import Cell
from tests.campaigns import suite_text, tiny

H100 = "NVIDIA H100 80GB HBM3"


def made(device: str, written: str = "2026-01-02T00:00:00+00:00") -> Provenance:
    return Provenance(rematbench="", python="", platform="", written=written, device=device)


class Machine:
    name = H100

    def about(self, calibration: object) -> dict[str, Any]:
        return {"gpu": GpuState(), "provenance": made(self.name)}


@pytest.fixture
def suite(tmp_path: Path) -> LayerSuite:
    sizes = {"model": "tiny-llama-deep", "gpus": 1, "global_batch": 1, "cluster": "h100-80gb"}
    problems = [
        tiny("short", seq_len=32, **sizes),
        tiny("long", seq_len=64, hbm_bytes=1_200_000_000, **sizes),
    ]
    path = tmp_path / "suite.yaml"
    text = suite_text(
        problems,
        methods=["keep_all", "full_recompute"],
        references=dict.fromkeys(("short", "long"), "full_recompute.0"),
        variants=[{"method": "memo", "problems": ["short"], "settings": {"alpha": 0.5}}],
    )
    path.write_text(text)
    return layer_suite.load_layers(path)


def foretold(suite: LayerSuite, folder: Path) -> list[Cell]:
    found = layer_suite.layer_cells(suite)
    lines = [predicted_steps.predict(cell) for cell in found]
    predicted_steps.write_predictions(lines, folder / PREDICTED, anew=False)
    return found


def test_a_suite_runs_its_methods_and_variants_and_names_its_references(
    suite: LayerSuite, tmp_path: Path
) -> None:
    assert list(layer_suite.layer_names(suite)) == [
        *("short.full_recompute.0", "short.keep_all.0", "short.memo.1"),
        *("long.full_recompute.0", "long.keep_all.0"),
    ]
    path = tmp_path / "suite.yaml"
    path.write_text(path.read_text().replace('"long": "full_recompute.0"', '"long": "mst.0"'))
    with pytest.raises(ConfigError, match="references: long: no cell of the suite is named"):
        layer_suite.load_layers(path)
    path.write_text(path.read_text().replace('["keep_all"', '["kep_all"'))
    with pytest.raises(ConfigError, match="did you mean 'keep_all'"):
        layer_suite.load_layers(path)


@pytest.mark.parametrize(
    ("suite", "run"),
    [("layers", "gpu-mended"), ("attention", "gpu-attention"), ("whole", "gpu-whole")],
)
def test_shipped_predictions_are_of_every_cell_and_references_fit(suite: str, run: str) -> None:
    shipped = layer_suite.load_layers(data_dir("config") / f"gpu_{suite}.yaml")
    names = layer_suite.layer_names(shipped)
    folder = data_dir("config").parent / "results/measured" / run
    known = {line.cell: line for line in read_lines(folder / PREDICTED, Prediction)}
    assert known.keys() == names.keys() - layer_suite.by_hand_names(shipped).keys()
    for problem, reference in shipped.references.items():
        assert known[f"{problem}.{reference}"].status == "ok"


def test_predictions_are_not_overwritten_and_stale_ones_are_refused(
    suite: LayerSuite, tmp_path: Path
) -> None:
    path = tmp_path / PREDICTED
    with pytest.raises(CommandError, match="no predictions"):
        predicted_steps.read_predictions(path, [])
    found = foretold(suite, tmp_path)
    lines = read_lines(path, Prediction)
    assert [line.status for line in lines] == ["ok", "ok", "ok", "oom", "oom"]
    before = path.read_bytes()
    later = [replace(line, provenance=made("", "2030")) for line in lines]
    assert "unchanged" in predicted_steps.write_predictions(later, path, anew=False)
    assert lines[0].step_s is not None
    nearly = [replace(lines[0], step_s=lines[0].step_s * (1 + 1e-12)), *lines[1:]]
    assert "unchanged" in predicted_steps.write_predictions(nearly, path, anew=False)
    other = [replace(lines[0], step_s=1.0), *lines[1:]]
    with pytest.raises(CommandError, match=f"the prediction of {lines[0].cell} changed"):
        predicted_steps.write_predictions(other, path, anew=False)
    with pytest.raises(CommandError, match=r"long\.keep_all\.0"):
        predicted_steps.write_predictions(lines[:-1], path, anew=False)
    assert path.read_bytes() == before
    assert predicted_steps.read_predictions(path, found)[lines[0].cell] == lines[0]
    predicted_steps.write_predictions([replace(lines[0], run_id="x"), *lines[1:]], path, anew=True)
    with pytest.raises(CommandError, match="other constants or plans"):
        predicted_steps.read_predictions(path, found)


def turn(cell: str, number: int, *seconds: float, **more: Any) -> Turn:
    known = {"run_id": "", "plan_hash": "", "place": 0, "status": "ok", "provenance": made(H100)}
    return Turn(**known | {"cell": cell, "round": number, "step_s": seconds} | more)


def test_a_ratio_is_paired_by_round_with_students_interval() -> None:
    reference = [turn("r", n, s) for n, s in ((1, 2.0), (2, 2.2), (3, 2.4), (4, 9.0))]
    mine = [turn("m", n, s) for n, s in ((1, 1.0), (2, 1.0), (3, 1.0))]
    found = layers.ratio(mine, reference)
    assert found is not None
    assert (found.mean, found.n) == (pytest.approx(2.2), 3)
    assert found.half_width == pytest.approx(4.302653 * 0.2 / 3**0.5)  # t of two degrees
    assert layers.ratio(mine, []) is None
    assert not layers.is_settled(mine, reference, 0.2)
    assert layers.is_settled(mine, reference, 0.3)
    assert not layers.is_settled(mine[:2], reference, 0.3)
    assert layers.is_settled(mine, [], 0.0)  # the reference did not run


def rounds(suite: LayerSuite, folder: Path, steps: Any, until_s: float = 60.0) -> TurnLog:
    every = [cell for cell in layer_suite.layer_cells(suite) if cell.name.startswith("short")]
    taken = TurnLog(folder / "layers", Machine(), every)  # type: ignore[arg-type]
    unsettled = partial(layers._unsettled, suite)
    layers._rounds(list(every), unsettled, taken, steps, time.monotonic() + until_s, {})
    return taken


def test_rounds_mix_the_cells_until_ratios_are_known_and_go_on_after_a_break(
    suite: LayerSuite, tmp_path: Path
) -> None:
    def steps(cell: Cell) -> tuple[str, str, dict[str, Any]]:
        plan = cell.plan
        assert isinstance(plan, Plan)
        if plan.rules and "memo" in plan.fit:
            return "oom", "full", {}
        return "ok", "", {"step_s": (1.0, 1.0), "allocated_bytes": 5}

    taken = rounds(suite, tmp_path, steps)
    found = by_cell(taken.turns)
    failed = [name for name, turns in found.items() if turns[-1].status == "oom"]
    assert {name: len(turns) for name, turns in found.items()} == {
        name: 1 if name in failed else layers.FEWEST for name in found
    }
    assert read_lines(tmp_path / "layers/short.jsonl", Turn) == taken.turns
    again = rounds(suite, tmp_path, steps)
    assert again.rounds == taken.rounds + 1  # settled: one round more, and done
    assert rounds(suite, tmp_path, steps, until_s=-1.0).rounds == again.rounds
    Machine.name, kept = "another", Machine.name
    with pytest.raises(CommandError, match="not from this run"):
        rounds(suite, tmp_path, steps)
    Machine.name = kept


def test_a_turn_that_would_take_too_long_does_not_begin(suite: LayerSuite, tmp_path: Path) -> None:
    every = [cell for cell in layer_suite.layer_cells(suite) if cell.name.startswith("short")]
    taken = TurnLog(tmp_path / "layers", Machine(), every)  # type: ignore[arg-type]
    until, least = time.monotonic() + 60.0, dict.fromkeys((cell.name for cell in every), 61.0)
    unsettled = partial(layers._unsettled, suite)
    layers._rounds(list(every), unsettled, taken, lambda *_: ("ok", "", {}), until, least)
    assert taken.turns == []


def test_what_torch_would_pin_is_held_against_the_hosts_memory(
    suite: LayerSuite, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch 2.11 pins blocks of powers of two."""
    cell = next(cell for cell in layer_suite.layer_cells(suite) if "memo" in cell.name)
    line = replace(predicted_steps.predict(cell), host_bytes=123 << 30, pinned_bytes=135 << 30)
    monkeypatch.setattr(predicted_steps, "free_bytes", lambda: 124 << 30)
    assert predicted_steps.refusal(line, cell) == "pins 135 GiB, but the host has 124 GiB free"
    assert predicted_steps.refusal(replace(line, pinned_bytes=0), cell) == ""
    monkeypatch.setattr(predicted_steps, "free_bytes", lambda: -1)  # not known
    assert predicted_steps.refusal(line, cell) == ""


def test_torchs_allocator_holds_what_is_predicted_also_of_a_plan_that_places(
    suite: LayerSuite,
) -> None:
    """MEMO places its activations itself; our runtime leaves that to torch."""
    cell = next(cell for cell in layer_suite.layer_cells(suite) if "memo" in cell.name)
    assert isinstance(cell.plan, Plan)
    placed = evaluate_plan(cell.problem, cell.plan).evaluation
    assert placed is not None
    lowered = SINGLE_EVALUATOR.lowered(cell.problem, cell.plan)
    assert lowered.program.planned
    found = predicted_steps.predict(cell).reserved_bytes
    assert found == lowered.peaks.reserved_bytes > placed.reserved_bytes


def test_tables_set_the_measured_beside_the_predicted(suite: LayerSuite, tmp_path: Path) -> None:
    foretold(suite, tmp_path)
    known = {line.cell: line for line in read_lines(tmp_path / PREDICTED, Prediction)}
    slow, fast = known["short.full_recompute.0"], known["short.keep_all.0"]
    turns = [
        turn(line.cell, n, 1.1 * line.step_s, allocated_bytes=2 * line.allocated_bytes)
        for line in (slow, fast)
        for n in (1, 2)
    ]
    turns.append(turn("long.keep_all.0", 0, status="refused", reason="predicted oom: 1 GiB short"))
    rows = layer_rows(suite, tmp_path, turns)
    by_name = {(row["problem"], row["method"]): row for row in rows}
    row = by_name["short", "keep_all"]
    assert row["step_s_error"] == pytest.approx(0.1)
    assert row["allocated_bytes_error"] == pytest.approx(1.0)
    assert row["ratio"] == pytest.approx(slow.step_s / fast.step_s)
    assert row["ratio_error"] == pytest.approx(0.0, abs=1e-12)
    assert 0.0 < row["mfu_causal"] < row["mfu_dense"]
    shown = layers_table(rows)
    assert "time 10.00 % of 2 (expected: at most 5 %), allocated bytes 100.00 % of 2" in shown.note
    assert "refused: predicted oom: 1 GiB short" in shown.markdown()
    assert not shown.note.startswith("This was a trial run on a CPU")
    assert "NOT every prediction" in shown.note  # predicted today, measured in January 2026
    assert len(ratios_table(rows).rows) == 2


def test_a_step_by_hand_stands_beside_the_others_without_a_prediction(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    sizes = {"model": "tiny-llama-deep", "seq_len": 32, "gpus": 1, "cluster": "h100-80gb"}
    given: dict[str, Any] = {
        "methods": ["keep_all", "full_recompute"],
        "references": {"one": "full_recompute.0"},
        "by_hand": [
            {"means": means, "problems": ["one"]} for means in ("checkpoint", "save_on_cpu")
        ],
    }
    problems = [tiny("one", global_batch=1, **sizes)]
    path.write_text(suite_text(problems, **given))
    found = layer_suite.load_layers(path)
    cells = {cell.name: cell for cell in layer_suite.layer_cells(found)}
    assert list(layer_suite.layer_names(found)) == list(cells)
    by_hand = cells["one.torch.save_on_cpu"]
    assert isinstance(by_hand, HandCell)
    lines = [predicted_steps.predict(cell) for name, cell in cells.items() if "torch" not in name]
    predicted_steps.write_predictions(lines, tmp_path / PREDICTED, anew=False)
    known = predicted_steps.read_predictions(tmp_path / PREDICTED, cells.values())
    assert predicted_steps.stands_for(by_hand) == "one.keep_all.0"
    assert predicted_steps.stands_for(cells["one.torch.checkpoint"]) == "one.full_recompute.0"
    much = replace(known["one.keep_all.0"], allocated_bytes=1 << 60)
    assert "pins" in predicted_steps.refusal(much, by_hand)
    short = replace(known["one.full_recompute.0"], status="oom", reason="short")
    assert "oom" in predicted_steps.refusal(short, cells["one.torch.checkpoint"])
    turns = [turn(name, 1, 2.0 if "torch" in name else 1.0) for name in cells]
    rows = {row["cell"]: row for row in layer_rows(found, tmp_path, turns)}
    row = rows["one.torch.save_on_cpu"]
    assert (row["method"], row["ratio"]) == ("torch by hand, save_on_cpu", 0.5)
    assert row["predicted_step_s"] is row["step_s_error"] is row["predicted_ratio"] is None
    assert "time" in layers_table(list(rows.values())).note
    given["by_hand"][0]["problems"] = ["on"]
    path.write_text(suite_text(problems, **given))
    with pytest.raises(ConfigError, match="by_hand: checkpoint"):
        layer_suite.load_layers(path)


def test_a_pipelines_first_rank_is_predicted_alone_and_has_no_mfu(tmp_path: Path) -> None:
    path = tmp_path / "suite.yaml"
    sizes = {"model": "tiny-llama-deep", "seq_len": 32, "cluster": "h100-80gb"}
    given = {"methods": ["keep_all"], "references": {"first": "keep_all.0"}}
    problem = tiny("first", global_batch=8, gpus=4, pp=4, **sizes)
    path.write_text(suite_text([problem], **given))
    with pytest.raises(ConfigError, match="first: 4 GPUs"):
        layer_suite.load_layers(path)
    path.write_text(suite_text([problem | {"gpus": 8}], **given, alone=["first"]))
    with pytest.raises(ConfigError, match="first: 8 GPUs"):
        layer_suite.load_layers(path)
    path.write_text(suite_text([problem], **given, alone=["fist"]))
    with pytest.raises(ConfigError, match="did you mean 'first'"):
        layer_suite.load_layers(path)
    path.write_text(suite_text([problem], **given, alone=["first"]))
    found = layer_suite.load_layers(path)
    (cell,) = layer_suite.layer_cells(found)
    assert isinstance(cell.plan, Plan)
    line, whole = predicted_steps.predict(cell), evaluate_plan(cell.problem, cell.plan).evaluation
    assert whole is not None
    assert line.step_s is not None
    assert line.step_s < whole.step_s
    assert line.allocated_bytes == whole.ranks[0].device_peak
    append_line(tmp_path / PREDICTED, line)
    (row,) = layer_rows(found, tmp_path, [turn(cell.name, 1, 1.0)])
    assert "mfu_causal" not in row


def test_the_last_of_several_folders_counts_for_what_it_has(tmp_path: Path, suite: Any) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        foretold(suite, folder)
    names = ("short.full_recompute.0", "short.keep_all.0", "long.full_recompute.0")
    for name in names:
        append_line(one / "layers/all.jsonl", turn(name, 1, 1.0))
    append_line(two / "layers/all.jsonl", turn(names[0], 1, 2.0))
    refused = turn(names[1], 0, status="refused", reason="predicted oom")
    append_line(two / "layers/all.jsonl", refused)
    rows = build([one, two], tmp_path / "suite.yaml")[0].rows
    assert {row["cell"]: (row["run"], row["step_s"]) for row in rows} == {
        names[0]: ("two", 2.0),
        names[1]: ("one", 1.0),  # what was refused later was measured before
        names[2]: ("one", 1.0),
    }
    known = {"written": "2026-01-02T", "device": H100, "parts": ()}
    said = [Finding(claim="a", holds=True, text="1"), Finding(claim="b", holds=False, text="2")]
    later = [Finding(claim="a", holds=None, text="no record"), replace(said[1], holds=True)]
    runs = {"x/one": said, "x/two": later}
    shown = checks_table({k: Summary(**known, findings=tuple(v)) for k, v in runs.items()})
    assert [(r["claim"], r["holds"], r["run"]) for r in shown.rows] == [
        ("a", "yes", "one"),
        ("b", "yes", "two"),
    ]


def test_a_file_of_lines_survives_a_kill_and_names_a_wrong_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append_line(path, turn("a", 1, 1.0))
    path.write_bytes(path.read_bytes() + b'{"cell": "a", "ro')
    assert [line.cell for line in read_lines(path, Turn)] == ["a"]
    append_line(path, turn("b", 1, 1.0))
    assert [line.cell for line in read_lines(path, Turn)] == ["a", "b"]
    path.write_bytes(b"{}\n")
    with pytest.raises(RecordError, match="line 1"):
        read_lines(path, Turn)


def test_a_gpus_state_is_read_from_nvidia_smi() -> None:
    state = read_state("580.65.06, 1980, 2619, 312.45, 700.00, 41\n")
    assert (state.driver, state.sm_clock_mhz, state.power_w) == ("580.65.06", 1980.0, 312.45)
    assert state.temperature_c == 41.0
    assert read_state("1, [N/A], 2619, [Not Supported], 700, 41").sm_clock_mhz is None
