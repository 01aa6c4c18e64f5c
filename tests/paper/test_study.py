"""Studies: files, candidate layouts, every question on a small model, commands to type."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from rematbench.evaluate.problems import make_problem
from rematbench.evidence.published.sheets import CONFIGURATION, SCORED, TABLED
from rematbench.host.console import CommandError
from rematbench.host.table import write_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.paths import data_dir
from rematbench.paper.builders.answers import build
from rematbench.paper.studies import answers
from rematbench.paper.studies.answers import StudyAnswer, ask_study, dump, load_answers
from rematbench.paper.studies.measures import part_peak_bytes, saved_layer_bytes
from rematbench.paper.studies.study import load_study
from tests.problems import all_methods, layers, problem
from tests.tables import tables
from tests.typed import typed

REGISTRY = all_methods()
KEEP = {"name": "keep", "method": "keep_all"}


def question(ask: str, workload: str = "one", *methods: dict[str, Any], **more: Any) -> Any:
    return {"ask": ask, "workloads": [workload], "methods": methods or (KEEP,), **more}


def study(tmp_path: Path, *questions: Any) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(json.dumps({**tables(__file__)["study"], "questions": questions}))
    return path


def ask(tmp_path: Path, *questions: Any) -> list[StudyAnswer]:
    return ask_study(load_study(study(tmp_path, *questions)), REGISTRY, "small.yaml")


def test_every_method_has_every_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods share the problem of a layout."""
    made = []
    monkeypatch.setattr(
        answers, "make_problem", lambda spec: made.append(spec) or make_problem(spec)
    )
    full = {"name": "full", "method": "full_recompute"}
    found = ask(tmp_path, question("run", "two", KEEP, full))
    cells = {(answer.method, answer.layout): answer for answer in found}
    assert (len(cells), len(made)) == (4, 2)
    assert {answer.status for answer in found} <= {"ok", "oom"}
    keep, full = (cells[(m, "tp 2, pp 2, micro-batch 8, zero 0")] for m in ("keep", "full"))
    assert float(full.values["step_s"]) > float(keep.values["step_s"])
    assert int(full.values["peak_device_bytes"]) < int(keep.values["peak_device_bytes"])


def test_fewest_is_the_smallest_that_fits(tmp_path: Path) -> None:
    """One layer less does not fit."""

    def second(settings: dict[str, Any], **more: str) -> StudyAnswer:
        block = {"name": "block", "method": "full_recompute", "settings": settings, **more}
        path = study(tmp_path, question("run", "two", block))
        path.write_text(path.read_text().replace('"micro_batch": 16', '"micro_batch": 32'))
        return ask_study(load_study(path), REGISTRY, "small.yaml")[1]

    tight = second({"method": "block"}, fewest="num_layers")
    count = int(tight.values["num_layers"])
    assert tight.status == "ok"
    assert count > 1
    assert second({"method": "block", "num_layers": count - 1}).status == "oom"


def test_every_question_answers(tmp_path: Path) -> None:
    words = ("longest", "saved", "parts", "attention_share", "estimate")
    found = ask(
        tmp_path,
        *(question(word, limit=2048, granularity=512) for word in words),
        question("fragmentation"),
    )
    assert all(answer.status == "ok" and answer.values for answer in found), found
    values: dict[str, Any] = {answer.ask: answer.values for answer in found}
    assert values["longest"]["seq_len"] == 2048
    assert 0 < values["attention_share"]["attention_share"] < 1
    frag = values["fragmentation"]
    assert frag["live_bytes"] <= frag["planned_bytes"] <= frag["reserved_bytes"]


def test_what_cannot_be_answered_says_why(tmp_path: Path) -> None:
    found = ask(
        tmp_path,
        question("hidden_from", limit=1024, granularity=512),
        question("run", "one", {"method": "lynx_heu"}),
    )
    assert [answer.status for answer in found] == ["failed", "unsupported"]
    assert "never hidden" in found[0].reason
    assert "no communication" in found[1].reason


def test_answers_survive_json(tmp_path: Path) -> None:
    found, path = ask(tmp_path, question("saved")), tmp_path / "answers.json"
    path.write_bytes(dump(found))
    assert load_answers([path]) == found
    path.write_bytes(b"[{}]")
    with pytest.raises(CommandError, match=r"answers.json: cannot be read"):
        load_answers([path])


def test_commands_are_runnable_words(tmp_path: Path) -> None:
    two = {"method": "full_recompute", "settings": {"method": "block", "num_layers": 2}}
    plain, _, searched = ask(tmp_path, question("run", "two", two), question("saved"))
    words = shlex.split(plain.command)
    assert words[:3] == ["rematbench", "simulate", "full_recompute"]
    for pair in (["--zero", "0"], ["--micro-batch", "8"], ["--set", "method=block"]):
        assert any(words[i : i + 2] == pair for i in range(len(words))), pair
    assert searched.command == "rematbench make small.yaml"


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no workload 'tow'; did you mean 'two'"):
        load_study(study(tmp_path, question("run", "tow")))
    with pytest.raises(ConfigError, match=r"unknown key|contains unknown field"):
        load_study(study(tmp_path, {"ask": "run", "workload": ["two"], "methods": [KEEP]}))


def test_the_command_line(tmp_path: Path) -> None:
    """Answers are written, the table of claims reads them; a mistake is one line and code 2."""
    answers = tmp_path / "answers.json"
    assert "answers in" in build(answers, {}, study(tmp_path, question("saved")))
    predictions = tmp_path / "predictions.csv"
    write_sheet(predictions, [], [*CONFIGURATION, *SCORED, *TABLED, "pred_status"])
    given = ["table", "claims", "-o", str(tmp_path), "--input", f"predictions={predictions}"]
    given += ["--input", f"published={data_dir('published') / 'claims.csv'}", "--input"]
    assert typed(*given, f"answers={answers}").code == 0
    assert (tmp_path / "claims.md").stat().st_size > 1000
    (tmp_path / "bad.json").write_text("{")
    for words in (
        [*given, f"answers={tmp_path / 'bad.json'}"],
        [*given, f"answers={tmp_path / 'none.json'}"],
    ):
        ran = typed(*words)
        assert (ran.code, len(ran.err.splitlines())) == (2, 1)


# -- measures ---------------------------------------------------------------------------------


def test_saved_bytes_are_the_tensors_of_the_layers() -> None:
    given = problem(model=layers(3))
    plan = given.base_plan
    tensors = given.layer(0).activations
    saved = [tensors[name] for name in given.layer(0).saved]
    found = saved_layer_bytes(given, plan)
    assert found["kept_bytes"] == 3 * sum(t.nbytes for t in saved)
    assert found["kept_tensor_bytes"] == 3 * sum(t.nbytes for t in saved if t.differentiable)


def test_head_bytes_fall_with_the_pieces_and_weights_stay() -> None:
    given = problem(model=layers(1), seq_len=64)
    sizes = {}
    for pieces in (1, 2, 4):
        plan = REGISTRY.resolve("mst", {"head_chunks": pieces, "mlp_chunks": 1}).plan(given)
        sizes[pieces] = int(part_peak_bytes(given, plan)["head_bytes"])  # type: ignore[arg-type]
    resident = given.head.activations["final_norm_out"].nbytes + sum(
        op.parameters * (given.system.states.param_bytes + given.system.states.grad_bytes)
        for op in given.head.ops
        if op.name == "lm_head"
    )
    assert sizes[1] > sizes[2] > sizes[4] > resident
    assert sizes[1] - resident == pytest.approx(2 * (sizes[2] - resident), rel=0.2)
    assert sizes[2] - resident == pytest.approx(2 * (sizes[4] - resident), rel=0.05)
