"""Seconds of actions: every action of a step with work counts once, and the step is the same."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the executed world needs torch")

import torch

from rematbench.engine.lowering.lower import lower
from rematbench.host.gpu_state import GpuState
from rematbench.measure.layer_suite import layer_names, load_layers
from rematbench.measure.parts import actions
from rematbench.measure.records import STEP, ActionSeconds, Prediction, read_lines
from rematbench.measure.torch.action_seconds import WITHOUT_WORK, TimedExecutor, between, by_key
from rematbench.measure.torch.turns import Turns
from rematbench.paper.tables.gpu_checks import actions_table
from tests.campaigns import suite_text, tiny
from tests.worlds.torch import cases

CPU = torch.device("cpu")


def test_a_timed_step_is_the_step_and_counts_every_action_with_work() -> None:
    case = cases.case("one", "offload")
    timed = Turns(CPU, GpuState).executor(case.problem, case.plan, TimedExecutor)
    plain = Turns(CPU, GpuState).executor(case.problem, case.plan)
    assert isinstance(timed, TimedExecutor)
    whole, taken = timed.timed_step()
    plain.run_step()
    assert float(timed.loss) == float(plain.loss)
    program = lower(case.plan, case.problem).ranks[0]
    issued = [action for action, _, _ in program.actions() if action.kind not in WITHOUT_WORK]
    assert [one.action for one in taken] == issued
    assert all(one.seconds >= 0.0 for one in taken)
    assert sum(one.seconds for one in taken) <= whole
    keys = by_key(taken)
    assert sum(map(len, keys.values())) == len(issued)
    assert {key.stream for key in keys} == {"compute", "d2h", "h2d"}
    assert {key.unit for key in keys if key.op == "fc1"} == {"L"}
    again = by_key(timed.timed_step()[1])
    assert {key: len(own) for key, own in again.items()} == {k: len(v) for k, v in keys.items()}
    assert between(1.0, 1.5) == 0.5


def test_the_part_has_a_line_for_each_kind_of_action_and_the_whole_step(tmp_path: Path) -> None:
    path, out = tmp_path / "suite.yaml", tmp_path / "actions.jsonl"
    sizes = {"model": "tiny-llama-deep", "gpus": 1, "global_batch": 1, "cluster": "h200-141gb"}
    text = suite_text(
        [tiny("one", seq_len=32, **sizes)],
        methods=["keep_all", "full_recompute", "memo"],
        references={"one": "full_recompute.0"},
    )
    path.write_text(text)
    suite = load_layers(path)
    actions.measure_actions(suite, (), out, "cpu", 60.0)
    lines = read_lines(out, ActionSeconds)
    steps = Counter(line.cell for line in lines if line.kind == STEP)
    assert steps == {"one.full_recompute.0": 1, "one.keep_all.0": 1}  # what is usual
    assert all(line.predicted_s > 0.0 for line in lines if line.kind in ("F", "B", "W", STEP))
    rebuilt = {line.op for line in lines if line.kind == "R"}
    assert "attention" in rebuilt
    table = actions_table(lines)
    rows = [row for row in table.rows if row["cell"] == "one.keep_all.0"]
    sizes_of = [abs(row["difference_s"]) for row in rows]
    assert sizes_of == sorted(sizes_of, reverse=True)
    assert "without waits: one.full_recompute.0 " in table.full_note
    assert "times mean nothing" in table.full_note
    late = tmp_path / "late.jsonl"
    actions.measure_actions(suite, ("one.memo",), late, "cpu", -1.0)
    assert not late.exists()


def test_every_method_has_its_lines(tmp_path: Path) -> None:
    """A plan of mini-sequences allocates by an action, which takes no time and has none predicted;
    on a GPU its cell failed by that."""
    path, out = tmp_path / "suite.yaml", tmp_path / "actions.jsonl"
    sizes = {"model": "tiny-llama-deep", "gpus": 1, "global_batch": 1, "cluster": "h200-141gb"}
    names = ["keep_all", "full_recompute", "mst", "memo", "balanced_checkpointing"]
    text = suite_text(
        [tiny("one", seq_len=64, **sizes)],
        methods=names,
        references={"one": "full_recompute.0"},
        variants=[{"method": "memo+mst"}],
    )
    path.write_text(text)
    suite = load_layers(path)
    actions.measure_actions(suite, ("one",), out, "cpu", 60.0)
    steps = {line.cell: line.status for line in read_lines(out, ActionSeconds) if line.kind == STEP}
    assert steps == dict.fromkeys(layer_names(suite), "ok")


def test_a_cell_that_fails_or_is_refused_leaves_a_line_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "suite.yaml", tmp_path / "actions.jsonl"
    sizes = {"model": "tiny-llama-deep", "gpus": 1, "global_batch": 1, "cluster": "h200-141gb"}
    names = ["keep_all", "full_recompute", "memo"]
    given = {"methods": names, "references": {"one": "full_recompute.0"}}
    path.write_text(suite_text([tiny("one", seq_len=32, **sizes)], **given))
    real, refused = actions._lines, actions.refusal

    def lines(cell: Any, *rest: Any) -> list[ActionSeconds]:
        if "keep_all" in cell.name:
            raise MemoryError("full")
        return real(cell, *rest)

    def refusal(line: Prediction, cell: Any) -> str:
        return "pins too much" if "memo" in line.cell else refused(line, cell)

    monkeypatch.setattr(actions, "_lines", lines)
    monkeypatch.setattr(actions, "refusal", refusal)
    actions.measure_actions(load_layers(path), [f"one.{name}" for name in names], out, "cpu", 60.0)
    steps = {line.cell: line for line in read_lines(out, ActionSeconds) if line.kind == STEP}
    assert {name: line.status for name, line in steps.items()} == {
        "one.keep_all.0": "oom",
        "one.memo.0": "refused",
        "one.full_recompute.0": "ok",
    }
    note = actions_table(read_lines(out, ActionSeconds)).full_note
    assert "one.memo.0 refused: pins too much" in note
    assert "one.keep_all.0 oom: MemoryError: full" in note
