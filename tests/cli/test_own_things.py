"""What people bring: methods that fail, models of a hub, sheets, scripts; what they start from."""

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import rematbench
from rematbench.evaluate.result import evaluate_method
from rematbench.evidence.predict import predict_rows
from rematbench.host.table import write_sheet
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.paths import data_dir
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import entry_of
from rematbench.plugins.registry import Composition
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import cells
from tests.method_files import method_file
from tests.tables import tables
from tests.typed import typed
from tests.wrong_inputs import ROW

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["--model", "llama-7b", "--cluster", "a800-80gb", "--gpus", "4", "--seq-len", "4096",
         "--global-batch", "8", "--tp", "2", "--system", "megatron-core"]  # fmt: skip
WRONG = {
    "return 3": "mine: plan returned 3, neither a Plan nor Unsupported",
    "return base.rules[7]": "mine: plan raised IndexError: tuple index out of range (mine.py, "
    "line 23)",
    "return base.with_rules(Rule(Select(activations=('gate_ot',)), Offload()))": "mine: rule "
    "matches no saved tensor: Select(activations=('gate_ot',)); did you mean 'gate_out'?",
}


def own(folder: Path, what: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(method_file("mine", what))
    return path


@pytest.mark.parametrize("what", WRONG)
def test_a_method_that_fails_is_one_line(tmp_path: Path, what: str) -> None:
    own(tmp_path, what)
    ran = typed("simulate", "mine", *WORDS, "--methods", str(tmp_path))
    assert ran.code == 1
    assert ran.out.splitlines()[-1] == f"FAILED: {WRONG[what]}"
    planned = typed("plan", "mine", *WORDS, "--methods", str(tmp_path), "--actions")
    assert (planned.code, planned.err.count("\n")) == (2, 1)
    assert planned.err.endswith(f"{WRONG[what].removeprefix('mine: rule ')}\n")


def test_a_parameter_named_as_a_class_variable_of_the_contract_declares_nothing(
    tmp_path: Path,
) -> None:
    path = own(tmp_path, "return base")
    fields = "".join(
        f"    {name}: int = 1\n" for name in ("share", "pieces", "planner", "by_layer")
    )
    text = path.read_text()
    path.write_text(text.replace("    name: Class", f"{fields}    name: Class"))
    words = ["--methods", str(tmp_path), "--method", "mine", "--top", "1", "--limit", "0"]
    ran = typed("search", *WORDS, "--micro-batch", "1", "--pp", "1", "--notes", *words)
    assert ran.code in (0, None), ran.err
    assert "mine:" not in ran.out.partition("not searched")[0]


def test_a_slip_beside_a_name_that_matches_is_told(tmp_path: Path) -> None:
    """What only other models save (`act_out` here) may be named, what none saves may not."""
    fine = "return base.with_rules(Rule(Select(activations=('fc2_in', 'act_out')), Offload()))"
    own(tmp_path, fine)
    assert typed("simulate", "mine", *WORDS, "--methods", str(tmp_path)).code == 0
    own(tmp_path, fine.replace("'act_out'", "'act_out', 'gate_ot'"))
    ran = typed("simulate", "mine", *WORDS, "--methods", str(tmp_path))
    assert ran.code == 1
    assert ran.out.splitlines()[-1] == (
        "FAILED: mine: rule names an activation that no model saves: "
        "Select(activations=('fc2_in', 'act_out', 'gate_ot')); did you mean 'gate_out'?"
    )


def test_a_broken_file_of_mine_is_mentioned_when_another_is_run(tmp_path: Path) -> None:
    path = own(tmp_path, "return 3")
    path.write_text(path.read_text().replace("ClassVar[str]", "ClassVar[str"))
    ran = typed("simulate", "keep_all", *WORDS, "--methods", str(tmp_path))
    assert ran.code == 0
    assert ran.err.startswith(f"unavailable: {path}: SyntaxError")
    slip = typed("simulate", "mne", *WORDS, "--methods", str(tmp_path))
    assert slip.err.count("\n") == 1
    assert "did you mean 'mine'?" in slip.err
    asked = typed("simulate", str(path), *WORDS)
    assert f"use --methods {tmp_path}" in asked.err


def test_a_table_says_once_which_method_failed(tmp_path: Path) -> None:
    own(tmp_path, "return 3")
    ran = typed("compare", *WORDS, "--methods", str(tmp_path), "--only", "mine")
    told = [line for line in ran.out.splitlines() if "plan returned 3" in line]
    assert told == ["failed: mine: plan returned 3, neither a Plan nor Unsupported"]
    assert typed("simulate", "keep_all", *WORDS).err == ""


def test_a_method_that_raises_while_planning_does_not_end_the_suite(tmp_path: Path) -> None:
    raises = "from rematbench.plan import PlanError\nraise PlanError('no such plan')"
    own(tmp_path, raises)
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE)
    found = {cell.name: cell.plan for cell in cells(load_suite(suite), [tmp_path])}
    assert found["tiny.mine.0"] == Unsupported("no such plan")
    assert isinstance(found["tiny.keep_all.0"], Plan)


SUITE = """
problems:
  - {name: tiny, why: small, model: tiny-llama, cluster: this-machine, system: rematbench,
     gpus: 1, seq_len: 64, global_batch: 1}
variants:
  - {method: mine}
"""

# -- sheets -----------------------------------------------------------------------------------


def test_a_missing_dp_follows_from_the_gpus() -> None:
    whole, empty = ({**ROW, "gpus": "16", "dp": dp} for dp in ("2", ""))
    odd = {**empty, "gpus": "12"}
    nothing = {**empty, "gpus": ""}
    found = predict_rows([whole, empty, odd, nothing], processes=1)
    assert found[0]["pred_status"] == "ok"
    assert {**found[1], "dp": "2"} == found[0]
    assert found[2]["pred_reason"] == "gpus 12 is not a multiple of tp x cp x pp = 8"
    assert "no value for dp" in found[3]["pred_reason"]


def test_rows_without_a_prediction_are_named(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    wrong = {**ROW, "seq_len": "long"}
    write_sheet(rows, [ROW, *[wrong] * 4])
    ran = typed("predict", str(rows), "-o", str(out), "--processes", "1")
    first, *named, more = ran.out.splitlines()
    assert "5 rows (4 failed, 1 ok)" in first
    told = "failed: column seq_len: 'long' is not a number"
    assert named == [f"row {n}: {told}" for n in (2, 3, 4)]
    assert more == "and 1 more rows (see column pred_reason)"


def test_a_model_that_is_unknown_is_said(tmp_path: Path) -> None:
    rows, out = tmp_path / "rows.csv", tmp_path / "out.csv"
    write_sheet(rows, [{**ROW, "model": "llama7b"}, {**ROW, "model": "llama-7b"}])
    ran = typed("predict", str(rows), "-o", str(out), "--processes", "1")
    first, said = ran.out.splitlines()
    assert "2 rows (2 ok)" in first
    assert said.startswith(
        "unknown model 'llama7b'; did you mean 'llama-7b'?: its shapes come from the row"
    )


# -- the Python door --------------------------------------------------------------------------

PROBLEM = rematbench.Problem(
    model="llama-7b", cluster="a800-80gb", system="megatron-core", gpus=4, seq_len=4096,
    global_batch=8, tp=2,
)  # fmt: skip


def test_simulate_is_the_command() -> None:
    run = rematbench.simulate(PROBLEM, "memo:alpha=0.3", checked=True)
    told = json.loads(typed("simulate", "memo:alpha=0.3", *WORDS, "--json").out)
    assert (run.status, run.fits) == ("ok", True)
    assert (run.step_s, run.headroom_bytes) == (told["step_s"], told["headroom_bytes"])
    assert run.tokens_per_s_per_gpu == told["tokens_per_s_per_gpu"]
    assert run.band == (told["band"]["low"], told["band"]["high"])
    assert len(run.outside) == len(told["band"]["outside"])
    assert run.command == told["run_with"]
    assert run.proof is not None
    assert repr(run).startswith("Result(method='memo:alpha=0.3', status='ok', reason='', step_s=")
    assert len(repr(run)) < 250  # a line of a notebook, not the whole problem
    assert run.stages()["device_peak_bytes"].max() == told["peak_device_bytes"]["max"]


def test_a_method_may_be_a_name_a_file_or_an_object(tmp_path: Path) -> None:
    path = data_dir("config") / "examples" / "recompute_mlp.py"
    named = rematbench.load_method("recompute_mlp", folder=path.parent)
    for method in (rematbench.load_method(str(path)), named, entry_of(path).cls()):
        run = rematbench.simulate(PROBLEM, method)
        assert isinstance(method, Composition) or method.name == "recompute_mlp"
        assert run.evaluation == evaluate_method(run.problem, named).evaluation
    policy = rematbench.load_method("selective_recompute:mlp", problem=PROBLEM)
    by_name = rematbench.simulate(PROBLEM, "selective_recompute:mlp")
    assert rematbench.simulate(PROBLEM, policy).evaluation == by_name.evaluation
    assert by_name.status == "ok"
    tuned = rematbench.load_method("memo", alpha="0.25")
    assert rematbench.simulate(PROBLEM, tuned).method == "memo:alpha=0.25"
    with pytest.raises(rematbench.MethodError, match="did you mean 'memo'"):
        rematbench.load_method("mem")
    with pytest.raises(rematbench.MethodError, match=r"^no file nothere\.py$"):
        rematbench.load_method("nothere.py")
    with pytest.raises(rematbench.MethodError, match="an object with plan, not 3"):
        rematbench.simulate(PROBLEM, 3)  # type: ignore[arg-type]
    with pytest.raises(rematbench.MethodError, match="mine: plan returned 3"):
        rematbench.load_method(str(own(tmp_path, "return 3"))).plan(run.job.problem)


@pytest.mark.parametrize(("wrong", "told"), tables(__file__)["wrong"])
def test_a_wrong_problem_is_one_line(wrong: dict[str, object], told: str) -> None:
    given = {f: getattr(PROBLEM, f) for f in PROBLEM.__struct_fields__} | wrong
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # told below
        rematbench.simulate(rematbench.Problem(**given), "keep_all")  # type: ignore[arg-type]
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_problem_with_a_field_amiss_is_one_line() -> None:
    given = {f: getattr(PROBLEM, f) for f in PROBLEM.__struct_fields__}
    lacks = {f: value for f, value in given.items() if f not in ("system", "gpus")}
    for wrong, told in (
        (lacks, "missing arguments: system, gpus"),
        ({**given, "micro_bach": 2}, "no field 'micro_bach'; did you mean 'micro_batch'?"),
        ({**lacks, "systme": "x"}, "did you mean 'system'?"),
    ):
        with pytest.raises(ConfigError) as caught:
            rematbench.Problem(**wrong)
        assert str(caught.value).startswith("Problem: ")
        assert str(caught.value).endswith(told)
    with pytest.raises(ConfigError, match="pass 'llama-7b' as a keyword argument"):
        rematbench.Problem("llama-7b")  # type: ignore


def test_a_layout_is_checked_where_code_makes_it() -> None:
    with pytest.raises(LayoutError, match="tp: 0: expected int >= 1"):
        Layout(tp=0)
    with pytest.raises(LayoutError, match="sp: 1: expected bool"):
        Layout(sp=1)  # type: ignore[arg-type]


SCRIPT = """
import sys
from rematbench import Problem, compare, simulate
print("started")
problem = Problem(model="llama-7b", cluster="a800-80gb", system="megatron-core", gpus=4,
                  seq_len=4096, global_batch=8, tp=2)
table = compare(problem, only=["keep_all", "memo"], also=["memo:alpha=0.3"], limit_s=60)
table.to_csv(sys.argv[1], index=False)
assert simulate(problem, table["name"][0]).step_s == table["step_s"][0]
"""


def test_a_script_without_a_guard_runs_once(tmp_path: Path) -> None:
    """Worker processes import no main module."""
    script, made = tmp_path / "script.py", tmp_path / "made.csv"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(made)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr
    table = pd.read_csv(made)
    assert set(table["name"]) == {"keep_all", "memo", "memo:alpha=0.3"}
    assert table["gpus"].eq(4).all()


def test_the_snippet_of_the_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs/python.md").read_text()
    (snippet,) = (block.partition("```")[0] for block in text.split("```python\n")[1:]
                  if block.startswith("from rematbench import"))  # fmt: skip
    exec(compile(snippet, "docs/python.md", "exec"), {})  # our own text
    told = capsys.readouterr().out
    assert told.startswith("True ")
    assert "rematbench simulate memo:alpha=0.25 --model llama-7b" in told
    assert "device_peak_bytes" in told
    assert "memo:alpha=0.5" in told


def test_names_are_lists() -> None:
    with pytest.raises(ConfigError, match="expected a list of names, not 'memo'"):
        rematbench.compare(PROBLEM, only="memo")
    with pytest.raises(ConfigError, match="methods: expected a list of names, not 'memo'"):
        rematbench.search(PROBLEM, methods="memo")
    for within in (-1, 1, "a"):
        with pytest.raises(
            ConfigError, match="within: expected a number of at least 0 and less than 1, not"
        ):
            rematbench.search(PROBLEM, within=within)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"fixed: expected a mapping of degree names"):
        rematbench.search(PROBLEM, fixed=[1])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="processes: expected a whole number above 0, not 0"):
        rematbench.compare(PROBLEM, processes=0)
    with pytest.raises(ConfigError, match=r"expected a rematbench\.Problem"):
        rematbench.simulate("llama-7b", "memo")  # type: ignore[arg-type]


# -- files to start from ----------------------------------------------------------------------


def test_the_examples_run_where_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = typed("examples", str(tmp_path / "work"))
    assert ran.code == 0, ran.err
    monkeypatch.chdir(tmp_path / "work")
    commands = [line.split()[1:] for line in ran.out.splitlines() if line.startswith("  rem")]
    assert {words[0] for words in commands} == {
        *("simulate", "compare", "methods", "predict", "validate")
    }
    for words in commands:
        if words[0] != "compare":  # its options are those of simulate
            done = typed(*words)
            assert done.code in (0, None), done.err
    with Path("predictions.csv").open() as file:
        found = pd.read_csv(file)
    assert found["pred_status"].eq("ok").all()
    key = "tokens_per_s_per_gpu"
    errors = (found[f"pred_{key}"] / found[key] - 1.0).dropna().abs()
    assert errors.lt(0.10).all()  # a row that nobody takes for a broken tool
    assert (found["model"].iloc[0], found["gpus"].iloc[0]) == ("llama-3.1-70b", 256)
    again = typed("examples", ".")
    assert again.code == 2
    assert "nothing was written" in again.err
    assert "recompute_mlp.py" in again.err


def test_the_example_method_is_that_of_the_guide() -> None:
    text = (data_dir("config") / "examples" / "recompute_mlp.py").read_text()
    assert f"```python\n{text}```" in (ROOT / "docs/own_method.md").read_text()


def test_a_folder_that_does_not_exist_is_refused_before_the_work(tmp_path: Path) -> None:
    missing = tmp_path / "typo" / "run.json"
    ran = typed("simulate", "keep_all", *WORDS, "--out", str(missing))
    assert ran.code == 2
    assert ran.err.endswith(f"cannot be written (no folder {missing.parent})\n")
    assert not missing.parent.exists()


def test_a_timeline_takes_a_name_with_a_point(tmp_path: Path) -> None:
    """What ends in .json is a record; `memo:alpha=0.3` is none."""
    out = tmp_path / "trace.json"
    ran = typed("timeline", "memo:alpha=0.3", *WORDS, "-o", str(out))
    assert ran.code in (0, None), ran.err
    assert out.stat().st_size > 0


@pytest.mark.parametrize("command", ["stages", "timeline"])
def test_a_run_with_a_stack_of_ones_own_is_shown_with_its_file(
    tmp_path: Path, command: str
) -> None:
    stack = tmp_path / "mine.yaml"
    stack.write_text(
        "name: mine\nversion: mine\nbase: megatron-core\n"
        "fused_loss: {value: true, source: a test}\n"
    )
    words = [*WORDS[:-1], str(stack)]
    (tmp_path / "elsewhere").mkdir()
    run, out = str(tmp_path / "elsewhere" / "run.json"), ("-o", str(tmp_path / "out"))
    assert typed("simulate", "keep_all", *words, "-o", run)[0] == 0
    code, _, err = typed(command, run, *out)
    assert code == 2
    assert "--system" in err
    assert typed(command, run, *out, "--system", str(stack))[0] == 0
