"""`smoke` from a clean checkout, twice; editing a method; the commands of the README and of the
guides."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.targets import targets as all_targets
from tests.installed import needs
from tests.workflow.checkout import GUIDES, ROOT, Checkout
from tests.worlds.slurm.slow import leave_methods

TEXT = "\n".join((ROOT / page).read_text() for page in GUIDES)
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
METHOD = [block for block in PYTHON if "def plan" in block]
SHELL = re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)
NAME = "recompute_mlp"
MINE = ("mine/predictions.csv", "mine/pareto.png", "mine/timeline.png", "mine/stage_memory.png")


@pytest.fixture(scope="module")
def smoked(tmp_path_factory: pytest.TempPathFactory, short: bool) -> Checkout:
    """A checkout with the method of docs/own_method.md, after one `snakemake smoke`; in the short
    run with no other methods than its figures need."""
    checkout = Checkout(tmp_path_factory.mktemp("checkout"))
    if short:
        leave_methods(checkout.path, {"balanced_checkpointing", "pp_offload"})
    (method,) = METHOD
    (checkout.path / "methods" / f"{NAME}.py").write_text(method)
    done = checkout.snakemake("smoke")
    assert done.returncode == 0, done.stderr
    return checkout


def planned(checkout: Checkout) -> set[str]:
    """`rule: method` of the bundles that a dry run would run."""
    text = checkout.snakemake("smoke", "--dry-run").stdout
    return set(re.findall(r"wildcards: suite=smoke, method=(\S+)", text))


def test_the_method_of_the_guide_is_in_the_table(smoked: Checkout) -> None:
    table = (smoked.path / "results/smoke/tables/methods.md").read_text()
    assert f"| {NAME} " in table
    runs = read_sheet(smoked.path / "results/smoke/tables/runs.csv")
    own = [run for run in runs if run["method"] == NAME]
    assert len(own) == 2
    assert {run["status"] for run in own} <= {"ok", "oom"}
    assert all(float(run["recompute_flop"]) > 0 for run in own)


def test_no_run_has_failed_and_no_problem_lacks_a_method(smoked: Checkout) -> None:
    runs = read_sheet(smoked.path / "results/smoke/tables/runs.csv")
    assert "failed" not in {run["status"] for run in runs}
    by_problem = {problem: 0 for problem in (run["problem"] for run in runs)}
    for run in runs:
        by_problem[run["problem"]] += 1
    assert len(set(by_problem.values())) == 1


def test_figures_are_drawn_as_pdf_and_png(smoked: Checkout) -> None:
    names = {path.name for path in (smoked.path / "results/smoke/figures").iterdir()}
    assert names == {f"{n}.{s}" for n in ("stage_memory", "timeline") for s in ("pdf", "png")}


def test_a_second_run_has_nothing_to_do(smoked: Checkout) -> None:
    done = smoked.snakemake("smoke")
    assert "Nothing to be done" in done.stdout + done.stderr


@pytest.mark.full
def test_editing_a_method_reruns_its_own_bundles(smoked: Checkout) -> None:
    path = smoked.path / "methods" / "balanced_checkpointing.py"
    before = path.read_text()
    path.write_text(before + "# edited\n")
    for name in ("worlds/slurm/launch.py", "paper/tables/scores.py"):  # of no prediction
        with (smoked.path / "src/rematbench" / name).open("a") as file:
            file.write("# edited\n")
    assert planned(smoked) == {"balanced_checkpointing", "balanced_checkpointing+pp_offload"}
    path.write_text(before)
    assert planned(smoked) == set()


@pytest.mark.parametrize(
    "edited",
    [
        pytest.param("config/clusters/h100-80gb.yaml", marks=pytest.mark.full),
        "src/rematbench/engine/simulate/op_level.py",
    ],
)
def test_editing_a_fact_or_the_engine_reruns_every_bundle(smoked: Checkout, edited: str) -> None:
    path = smoked.path / edited
    before = path.read_text()
    path.write_text(before + "# edited\n")
    bundles = {
        folder.name for folder in (smoked.path / "results/smoke/records/simulated").iterdir()
    }
    assert planned(smoked) == bundles
    path.write_text(before)


def test_what_reruns_a_rule_is_made_from_no_input() -> None:
    for path in (ROOT / "workflows").glob("*.smk"):
        assert not re.search(r"lambda wildcards, \w+: *code\(", path.read_text()), path


def guide_commands() -> list[str]:
    """Every command of the guides, without those of the front door."""
    text = "\n".join(SHELL).replace("\\\n", " ")
    text = re.sub(r"^\./bench run ", "", text, flags=re.MULTILINE)
    commands: list[str] = []
    for line in text.splitlines():
        inside = bool(commands) and _here_document(commands[-1])
        if inside:
            commands[-1] += "\n" + line
        elif line.strip():
            commands.append(line)
    return [command for command in commands if not command.startswith("./bench")]


def _here_document(command: str) -> bool:
    """Whether a `cat > FILE <<'WORD'` still waits for its closing WORD."""
    opened = re.search(r"<<'(\w+)'", command)
    return opened is not None and not command.rstrip().endswith(f"\n{opened[1]}")


@pytest.mark.full
def test_the_commands_of_the_guides_run(tmp_path: Path) -> None:
    needs("torch")
    checkout = Checkout(tmp_path / "checkout")
    (checkout.path / "methods" / f"{NAME}.py").write_text(*METHOD)
    commands = guide_commands()
    used = {shlex.split(command)[1] for command in commands if command.startswith("rematbench")}
    wanted = {"methods", "simulate", "stages", "timeline", "plan", "doctor", "predict", "validate"}
    wanted |= {"compare", "search", "systems", "verify", "calibrate", "examples", "read", "table"}
    wanted |= {"fit", "row"}
    assert used == wanted | {"execute", "trace"}
    for command in commands:
        done = checkout.run(command)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    for name in (
        "run.json",
        "trace.json",
        "compare.png",
        "mine/predictions.csv",
        "mine/pareto.png",
    ):
        assert (checkout.path / name).stat().st_size > 0


def test_the_guides_only_use_targets_of_bench_and_snakemake() -> None:
    targets = set(re.findall(r"\./bench ([\w-]+)(?: (\w+))?", TEXT))
    known = {"setup", "run", "test", "reproduce", "measure"}
    assert {target for target, _ in targets} == known
    files = [ROOT / "Snakefile", *(ROOT / "workflows").glob("*.smk")]
    text = "\n".join(path.read_text() for path in files)
    rules = set(re.findall(r"^rule (\w+):", text, re.MULTILINE))
    rules |= {target.name for target in all_targets()}
    assert {word for target, word in targets if target == "reproduce" and word} <= rules


def test_workflow_files_are_short_and_wire_only() -> None:
    assert len((ROOT / "Snakefile").read_text().splitlines()) <= 40
    for path in (ROOT / "workflows").glob("*.smk"):
        text = path.read_text()
        assert len(text.splitlines()) < 100, path
        assert not re.search(r"^ +(run|script):", text, re.MULTILINE), path


# -- the benchmark of the search measures what it is for, at its smallest size ---------------------


LINES = (
    r"^(\S+) layouts, (\S+) methods", r"^bounds of (\S+) layouts in \S+ s: (\S+) a",
    r"^gap 0.5 % proved after \S+ s, (\S+) plans simulated, best (\S+) s",
    r"CPU seconds, (\S+) answers, (\S+) simulations",
)  # fmt: skip
"""Lines that it prints, whose numbers are positive: what it measures, by stage."""


@pytest.mark.full  # three CPU seconds, and the search itself: tests/advise
def test_it_runs_at_its_smallest() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.search", "--small"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in LINES:
        found = re.search(line, done.stdout, re.MULTILINE)
        assert found, (line, done.stdout)
        assert all(float(word.replace(",", "")) > 0.0 for word in found.groups()), found[0]
