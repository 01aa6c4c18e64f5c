"""Pictures and samples of the documents are what the figures and commands give."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.configfile import ConfigError
from rematbench.inputs.layout import Layout
from rematbench.paper.builders.documents import MARKED, PLACES, TEXTS, with_numbers, write_documents
from rematbench.paper.catalog import table_files
from rematbench.paper.sheet.table import declared
from rematbench.problem import Problem
from tests.problems import make_problem, plan_of
from tests.typed import typed
from tests.workflow.checkout import ROOT

EXPECTED = ROOT / "results" / "expected"


@pytest.mark.full
def test_the_figure_of_the_readme_is_drawn_from_the_tables(
    tmp_path: Path, update_golden: bool
) -> None:
    """With --update-golden docs/gpu_steps.png is the figure that is drawn here."""
    tables = [str(EXPECTED / f"{name}.csv") for name in ("gpu_layers", "gpu_ratios")]
    script, drawn = ROOT / "figures" / "gpu_steps.py", tmp_path / "gpu_steps.pdf"
    subprocess.run([sys.executable, str(script), *tables, str(drawn)], check=True, timeout=120)
    committed = ROOT / "docs" / "gpu_steps.png"
    if update_golden:
        committed.write_bytes(drawn.with_suffix(".png").read_bytes())
    with Image.open(drawn.with_suffix(".png")) as new, Image.open(committed) as old:
        assert new.convert("RGB").tobytes() == old.convert("RGB").tobytes()


STEP = re.compile(r"step ([\d.]+) s, exposed waits ([\d.]+) %")
OFFLOAD = "balanced_checkpointing+pp_offload:alpha={}"
PICTURE = {"model": "llama-7b", "cluster": "a800-80gb", "system": "megatron-kwai"}
ALPHAS = (0.1, 1.0)
"""The offloaded share of the upper and of the lower half."""


def pictured() -> Problem:
    return make_problem(**PICTURE, seq_len=12288, layout=Layout(pp=4, vpp=8, dp=1, global_batch=16))


def described(path: Path) -> list[tuple[str, str]]:
    """The step and the exposed waits of each half of a timeline, as its titles say them."""
    with Image.open(path) as picture:
        return STEP.findall(str(picture.info["Description"]))


def test_the_picture_has_the_steps_that_the_simulator_gives() -> None:
    problem = pictured()
    steps = [evaluate(problem, plan_of(problem, OFFLOAD.format(a))).step_s for a in ALPHAS]
    told = [step for step, _ in described(ROOT / "docs" / "timeline.png")]
    assert told == [f"{step:.2f}" for step in steps]


@pytest.mark.full
def test_the_picture_has_the_waits_that_its_script_draws(
    tmp_path: Path, update_golden: bool
) -> None:
    """With --update-golden docs/timeline.png is the picture that is drawn here."""
    words = [word for key, value in PICTURE.items() for word in (f"--{key}", value)]
    words += ["--gpus", "4", "--seq-len", "12288", "--global-batch", "16", "--pp", "4", "--vpp"]
    traces = []
    for alpha in ALPHAS:
        run, trace = tmp_path / f"{alpha}.json", tmp_path / f"trace{alpha}.json"
        assert typed("simulate", OFFLOAD.format(alpha), *words, "8", "--out", str(run)).code == 0
        assert typed("timeline", str(run), "-o", str(trace)).code == 0
        traces.append(str(trace))
    script = ROOT / "figures" / "timeline.py"
    drawn = tmp_path / "timeline.pdf"
    subprocess.run([sys.executable, str(script), *traces, str(drawn)], check=True, timeout=120)
    committed = ROOT / "docs" / "timeline.png"
    if update_golden:
        committed.write_bytes(drawn.with_suffix(".png").read_bytes())
    assert described(drawn.with_suffix(".png")) == described(committed)


@pytest.mark.full
@pytest.mark.parametrize(
    ("page", "width", "rows"), [("docs/compare.md", "170", 5), ("README.md", "100", 8)]
)
def test_the_sample_of_compare_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, update_golden: bool, page: str, width: str, rows: int
) -> None:
    """The verdicts and the table of a page, of the methods that it shows; with --update-golden the
    page has what is printed here."""
    path = ROOT / page
    guide = path.read_text(encoding="utf-8")
    command, sample = re.findall(r"```\w+\n(.*?)```", guide, re.DOTALL)[:2]
    shown = re.findall(r"^(\S+) +(?:yes|no|tight) +-?\d", sample, re.MULTILINE)
    assert len(shown) == rows
    options = command.replace("\\\n", " ").split()
    options = options[options.index("compare") + 1 : -2]  # without the file of -o or --plot
    monkeypatch.setenv("COLUMNS", width)
    only = [word for name in shown for word in ("--only", name)]
    lines = [line.rstrip() for line in typed("compare", *options, *only).out.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("FASTEST"))
    last = max(number for number, line in enumerate(lines) if line.split()[:1] == shown[-1:])
    printed = "\n".join(lines[first : last + 1]) + "\n"
    if update_golden:
        path.write_text(guide.replace(sample, printed), encoding="utf-8")
    assert path.read_text(encoding="utf-8").count(printed) == 1


def asked() -> list[tuple[str, str]]:
    """The commands of docs/questions.md and the lines of their answers."""
    page = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
    return re.findall(r"```sh\n([^`]+)```\n\n```text\n([^`]+)```", page)


def test_the_page_of_questions_has_ten_and_its_python_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert len(asked()) == 10
    page = (ROOT / "docs/questions.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([^`]+)```", page)
    exec(code, {})
    assert asked()[0][1].splitlines()[:2] == capsys.readouterr().out.splitlines()[:2]


@pytest.mark.full
@pytest.mark.parametrize(("command", "answer"), asked())
def test_a_question_has_the_answer_that_its_command_prints(
    monkeypatch: pytest.MonkeyPatch, command: str, answer: str
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    words = shlex.split(command.replace("\\\n", " "))[3:]
    printed = iter([line.rstrip() for line in typed(*words).out.splitlines()])
    assert not [line for line in answer.splitlines() if line not in printed]


# -- marked texts of documents are those of the committed tables, and are written in their place ---


DOCUMENTS = sorted(path for place in PLACES for path in ROOT.glob(place))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_a_document_has_the_texts_of_the_committed_tables(path: Path) -> None:
    """`rematbench make results/paper/documents.txt` writes them."""
    text = path.read_text(encoding="utf-8")
    assert text.count("<!-- from: ") == text.count("<!-- end -->") == len(MARKED.findall(text))
    assert with_numbers(text, EXPECTED, path.name) == text


def test_every_text_has_its_place() -> None:
    marked = [name for path in DOCUMENTS for name, _ in MARKED.findall(path.read_text())]
    assert len(marked) == len(set(marked))
    assert TEXTS.keys() <= set(marked)


def test_a_table_is_written_between_its_markers(tmp_path: Path) -> None:
    page = "# Page\n\n<!-- from: systems -->\n\n{}\n\n<!-- end -->\n\nRest.\n"
    (tmp_path / "page.md").write_text(page.format("old"))
    assert "systems" in table_files()
    assert write_documents(tmp_path, tmp_path) == []  # no such table there
    (tmp_path / "systems.md").write_text("### Title\n\n| a |\n| - |\n\nNote.\n")
    assert write_documents(tmp_path, tmp_path) == ["page.md"]
    assert (tmp_path / "page.md").read_text() == page.format("| a |\n| - |\n\nNote.")
    assert write_documents(tmp_path, tmp_path) == []
    (tmp_path / "page.md").write_text(page.replace("systems", "no_such"))
    with pytest.raises(ConfigError, match=r"page.md: from: no_such: no such table or text"):
        write_documents(tmp_path, tmp_path)


def test_every_printed_table_is_declared_once_and_by_its_name() -> None:
    made = [name for file in table_files().values() for name in file.tables]
    assert sorted(declared().tables) == sorted(made)
