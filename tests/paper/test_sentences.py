"""Sentences, pictures and samples of the documents say what tables, records and commands say."""

import csv
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import fields
from PIL import Image

from rematbench.evaluate.evaluation import evaluate
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import FlatSystem
from rematbench.paper.page import GPUS, gpus_used, load_report, what_was_measured
from rematbench.problem import Problem
from rematbench.workload import Workload
from tests.problems import make_problem, plan_of
from tests.typed import typed
from tests.workflow.checkout import ROOT

EXPECTED = ROOT / "results" / "expected"


def words(name: str) -> str:
    """A document on one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def rows(name: str) -> list[dict[str, str]]:
    with (EXPECTED / f"{name}.csv").open(newline="", encoding="utf-8") as sheet:
        return list(csv.DictReader(sheet))


# -- numbers of docs/claims.md --------------------------------------------------------------------


def test_best_against_best_is_what_the_searched_spaces_say() -> None:
    spaces = {row["space"]: row for row in rows("searched_spaces") if row["mfu_causal"]}
    megatron, every = spaces["megatron_core"], spaces["all"]
    told = (
        f"of all {int(every['layouts']):,} layouts, which counts for no claim: "
        f"{100 * float(megatron['mfu_causal']):.1f} % with the options of Megatron-core and "
        f"{100 * float(every['mfu_causal']):.1f} % with all methods"
    )
    assert told in words("docs/claims.md")


def test_the_one_problem_where_lynxs_heuristic_is_slower_is_what_the_table_says() -> None:
    steps: dict[str, dict[str, float]] = {}
    for row in rows("methods"):
        if row["status"] == "ok" and row["label"] in ("lynx_heu", "lynx_opt"):
            steps.setdefault(row["problem"], {})[row["label"]] = float(row["step_s"])
    gaps = sorted(100 * (s["lynx_heu"] / s["lynx_opt"] - 1) for s in steps.values() if len(s) == 2)
    assert len(gaps) > 2
    assert gaps[-2] <= 0.3
    told = f"agree within 0.3 % on all problems but one ({gaps[-1]:.1f} %)"
    assert told in words("docs/claims.md")


# -- the first screen of the README ---------------------------------------------------------------


def test_the_readme_says_what_the_gpu_tables_say() -> None:
    sentence = what_was_measured(EXPECTED)
    assert sentence in words("README.md")
    lost = [100 * float(row["lost"]) for row in rows("gpu_advice")]
    assert f"{sum(lost) / len(lost):.2f} % slower" in sentence
    assert f"worst {max(lost):.1f} %" in sentence


def test_the_readme_says_what_is_predicted_of_nvidias_70b() -> None:
    with (ROOT / "results/published/runs_more.csv").open(newline="", encoding="utf-8") as sheet:
        (row,) = (
            each
            for each in csv.DictReader(sheet)
            if (each["model"], each["gpus"]) == ("llama-3.1-70b", "256")
            and "dgxc" in each["source"]
        )
    problem = make_problem(
        model="llama-3.1-70b",
        cluster="h100-80gb",
        system="nemo-24.12",
        seq_len=8192,
        layout=Layout(tp=4, cp=2, pp=4, vpp=5, dp=8, global_batch=512),
    )
    predicted = 512 * 8192 / 256 / evaluate(problem, problem.base_plan).step_s
    sentence = (
        f"NVIDIA publishes {float(row['tokens_per_s_per_gpu']):,.0f} tokens/s/GPU for "
        f"Llama-3.1-70B on 256 H100, and the prediction is {predicted:,.0f}."
    )
    assert sentence in words("README.md")


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


# -- GPUs, and what is not modelled ----------------------------------------------------------------


def test_the_readme_names_the_gpus_of_the_records() -> None:
    row = next(line for line in (ROOT / "README.md").read_text().splitlines() if "ed, GPU" in line)
    used = gpus_used(ROOT / "results")
    assert used
    assert {gpu for gpu in GPUS if gpu in row} == used


INPUTS = {
    "CUDA graphs": (FlatSystem, "cuda_graphs"),
    "packed": (Workload, "document_len"),
    "context parallel": (FlatSystem, "cp_kind"),
    "parameters in host memory": (FlatSystem, "parameters_on_host"),
    "expandable": (FlatSystem, "expandable_segments"),
}
"""Words for what a job can say, each with its field."""


def test_nothing_that_a_job_can_say_is_said_to_be_refused() -> None:
    refused = " ".join(load_report().not_modelled)
    for word, (kind, name) in INPUTS.items():
        assert name in {field.name for field in fields(kind)}
        assert word.lower() not in refused.lower()


# -- the picture and the sample of the README and of docs/compare.md -------------------------------

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
def test_the_sample_of_compare_is_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, update_golden: bool
) -> None:
    """The verdicts and the table of docs/compare.md, of the methods that it shows; with
    --update-golden the guide has what is printed here."""
    path = ROOT / "docs" / "compare.md"
    guide = path.read_text(encoding="utf-8")
    command, sample = re.findall(r"```\w+\n(.*?)```", guide, re.DOTALL)[:2]
    shown = re.findall(r"^(\S+) +(?:yes|no|tight) +-?\d", sample, re.MULTILINE)
    assert len(shown) == 5
    options = command.replace("\\\n", " ").split()
    options = options[options.index("compare") + 1 : options.index("-o")]
    monkeypatch.setenv("COLUMNS", "170")
    only = [word for name in shown for word in ("--only", name)]
    lines = [line.rstrip() for line in typed("compare", *options, *only).out.splitlines()]
    first = next(number for number, line in enumerate(lines) if line.startswith("FASTEST"))
    last = max(number for number, line in enumerate(lines) if line.split()[:1] == shown[-1:])
    printed = "\n".join(lines[first : last + 1]) + "\n"
    if update_golden:
        path.write_text(guide.replace(sample, printed), encoding="utf-8")
    assert path.read_text(encoding="utf-8").count(printed) == 1
    assert "\n".join(lines[first : first + 2]) in (ROOT / "README.md").read_text(encoding="utf-8")
