"""The parts of `measure-gpu` that set rates and steps beside predictions, on the stand-in."""

import json
from pathlib import Path

import pytest

from rematbench.inputs.paths import data_dir
from rematbench.measure.records import STEP, ActionSeconds, Prediction, Rate, Turn, read_lines
from tests.campaigns import suite_text, tiny
from tests.stand_in.conftest import Run

pytestmark = pytest.mark.soak
SIZES = {"model": "tiny-llama-deep", "cluster": "h200-141gb", "gpus": 1, "global_batch": 1}


def test_rates_are_timed_by_events(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "rates.yaml"
    lists = {"clusters": ["h100-80gb", "h200-141gb"], "attention_lengths": [128]}
    lists |= {"copy_bytes": [65536]}
    problem = tiny("tiny", seq_len=64, **SIZES)
    path.write_text(suite_text([problem], copy_gemm=64, compiled=False, sustained_s=0.1, **lists))
    words = ("measure-gpu", "--part", "rates", "-o", str(tmp_path), "--suite", str(path))
    run("-m", "rematbench", *words)
    lines = read_lines(tmp_path / "rates.jsonl", Rate)
    assert {line.implementation for line in lines if line.status != "ok"} <= {"cudnn"}
    assert all(line.predicted_s for line in lines if line.what == "gemm")
    assert any(line.n and "for_s" in line.shape for line in lines)


def test_actions_are_timed_on_their_streams(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    problem = tiny("one", seq_len=64, **SIZES)
    text = suite_text([problem], methods=["full_recompute", "memo"], references={"one": "memo.0"})
    path.write_text(text)
    words = ("measure-gpu", "--part", "actions", "-o", str(tmp_path), "--suite", str(path))
    run("-m", "rematbench", *words, "--only", "one.memo")
    lines = read_lines(tmp_path / "actions.jsonl", ActionSeconds)
    assert {line.stream for line in lines if line.kind != STEP} == {"compute", "d2h", "h2d"}
    whole = next(line.seconds for line in lines if line.kind == STEP)
    assert 0.0 < sum(line.seconds for line in lines if line.stream == "compute") <= whole


def test_turns_have_the_allocators_peaks(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    head = {"methods": ["keep_all", "full_recompute", "memo"], "half_width": 100.0}
    problem = tiny("one", seq_len=64, **SIZES)
    path.write_text(suite_text([problem], references={"one": "full_recompute.0"}, **head))
    given = ("-o", str(tmp_path), "--suite", str(path))
    run("-m", "rematbench", "measure-gpu", "--predict", *given)
    run("-m", "rematbench", "measure-gpu", "--part", "layers", *given)
    turns = read_lines(tmp_path / "layers/one.jsonl", Turn)
    assert [turn.status for turn in turns] == ["ok"] * 9
    peaks = {turn.cell: turn.allocated_bytes for turn in turns}
    assert peaks["one.keep_all.0"] > peaks["one.full_recompute.0"] > 0
    assert all(turn.pinned_bytes > 1000 for turn in turns if "memo" in turn.cell)
    inputs = ("--input", f"runs={tmp_path}", "--input", f"suite={path}")
    run("-m", "rematbench", "table", "gpu_layers", *inputs, "-o", str(tmp_path))
    assert "Stand-in" in (tmp_path / "gpu_layers.md").read_text()


def test_torch_reserves_what_is_predicted_of_plans_at_full_size(run: Run) -> None:
    """What an H200 reserved, to the byte, and ran out of memory where it did: the replay of two
    steps is near, but for what operators allocate inside themselves."""
    folder = data_dir("config").parent / "results/measured/gpu-searched"
    near = ["h200-2k-80gib.beside.0", "h200-2k-64gib.searched.4", "h200-32k-96gib.searched.2"]
    out = "h200-32k-96gib.beside.0"
    words = ("-m", "tests.stand_in.turns", str(folder / "searched.jsonl"), *near, out)
    said = [line.split() for line in run(*words, STAND_IN_GPU_BYTES="150109945856")]
    status = {name: word for name, word, _, _ in said}
    assert status == {**dict.fromkeys(near, "ok"), out: "oom"}
    measured = {
        turn.cell: turn.reserved_bytes
        for path in folder.glob("searched/*.jsonl")
        for turn in read_lines(path, Turn)
        if turn.reserved_bytes
    }
    for name, _, reserved, predicted in said:
        if name != out:
            assert int(reserved) == pytest.approx(measured[name], rel=1e-3)
            assert int(predicted) == pytest.approx(int(reserved), rel=0.02)


def test_plans_of_a_search_have_turns_held_to_its_memory(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "searched.yaml"
    job = {"name": "tiny", "why": "test", "model": "tiny-llama-deep", "system": "rematbench"}
    job |= {"cluster": "h200-141gb", "seq_len": 64, "global_batch": 4, "memory_gib": [16, 6]}
    path.write_text(json.dumps({"beside": ["full_recompute"], "jobs": [job | {"rows": 1}]}))
    given = ("-o", str(tmp_path), "--suite", str(path), "--part", "searched")
    run("-m", "rematbench", "measure-gpu", "--predict", *given)
    run("-m", "rematbench", "measure-gpu", *given)
    turns = [turn for file in tmp_path.glob("searched/*.jsonl") for turn in read_lines(file, Turn)]
    assert [turn.status for turn in turns] == ["ok"] * 12
    inputs = ("--input", f"runs={tmp_path}", "-o", str(tmp_path))
    run("-m", "rematbench", "table", "gpu_advice", *inputs)
    assert "Stand-in" in (tmp_path / "gpu_advice.md").read_text()


def test_steps_by_hand_and_a_rank_alone_have_turns(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "layers.yaml"
    means = ("checkpoint", "save_on_cpu", "checkpoint+save_on_cpu")
    head = {
        "methods": ["full_recompute"],
        "half_width": 100.0,
        "references": dict.fromkeys(("one", "first"), "full_recompute.0"),
        "by_hand": [{"means": each, "problems": ["one"]} for each in means],
        "alone": ["first"],
        "variants": [{"method": "pp_offload", "settings": {"alpha": 1.0}, "problems": ["first"]}],
    }
    first = tiny("first", seq_len=64, **SIZES | {"gpus": 4, "pp": 4, "vpp": 2, "global_batch": 8})
    path.write_text(suite_text([tiny("one", seq_len=64, **SIZES), first], **head))
    given = ("-o", str(tmp_path), "--suite", str(path))
    run("-m", "rematbench", "measure-gpu", "--predict", *given)
    run("-m", "rematbench", "measure-gpu", "--part", "layers", *given)
    turns = [turn for name in ("one", "first") for turn in read_lines(
        tmp_path / f"layers/{name}.jsonl", Turn
    )]  # fmt: skip
    assert {turn.status for turn in turns} == {"ok"}
    pinned = {turn.cell: turn.pinned_bytes for turn in turns}
    both, alone = (f"one.torch.{each}" for each in ("checkpoint+save_on_cpu", "save_on_cpu"))
    assert 0 <= pinned["one.torch.checkpoint"] < pinned[both] < pinned[alone]
    assert "first.pp_offload.1" in pinned


def test_a_recomputed_layers_output_that_nobody_keeps_is_no_peak(run: Run, tmp_path: Path) -> None:
    """At 128K tokens, as on an H200: 0.9 GB lay above the prediction."""
    path = tmp_path / "layers.yaml"
    long = tiny("long", seq_len=131072, **SIZES | {"model": "llama-3.1-8b-8-layers"})
    variants = [{"method": "full_recompute+mst"}]
    references = {"long": "full_recompute+mst.0"}
    path.write_text(
        suite_text([long], methods=[], references=references, variants=variants, half_width=1e9)
    )
    given = ("-o", str(tmp_path), "--suite", str(path))
    run("-m", "rematbench", "measure-gpu", "--predict", *given)
    run("-m", "rematbench", "measure-gpu", "--part", "layers", *given)
    (line,) = read_lines(tmp_path / "predictions.jsonl", Prediction)
    turns = read_lines(tmp_path / "layers/long.jsonl", Turn)
    for turn in turns:
        assert 0 < turn.allocated_bytes / line.allocated_bytes - 1 < 0.0015
