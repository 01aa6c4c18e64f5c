"""What a command cannot write, and what it cannot be a rank of, is said in one line beforehand."""

import shutil
from pathlib import Path

import pytest

from rematbench.cli import measure
from rematbench.cli.real import is_launched
from rematbench.cli.targets import need_file, need_folder
from rematbench.engine.program.profile import LedgerError
from rematbench.engine.simulate.op_level import DeadlockError
from rematbench.evaluate import result as suite
from rematbench.evaluate.proof import CheckError
from rematbench.host.console import CommandError
from rematbench.inputs.paths import data_dir
from rematbench.paper.builders import answers
from rematbench.worlds import executed, traced
from tests.tables import tables
from tests.typed import typed

CONFIG = data_dir("config")
TINY = ("--model", "tiny-llama", "--cluster", "this-machine", "--gpus", "1")
RUN = (*TINY, "--seq-len", "128", "--global-batch", "1")


def said(*words: str) -> tuple[int | str | None, str]:
    """Exit code and the one line on stderr of a command."""
    ran = typed(*words)
    (line,) = ran.err.splitlines()
    return ran.code, line


def test_folders_are_made_and_those_of_files_must_be_there(tmp_path: Path) -> None:
    """A file is not a folder, nor a folder a file."""
    need_folder("-o", tmp_path / "a" / "b")
    need_file("-o", tmp_path / "a" / "record.json")
    need_file("-o", None)
    with pytest.raises(CommandError, match=r"cannot be written \(no folder .*/c\)"):
        need_file("-o", tmp_path / "c" / "record.json")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b"]
    for wrong in (tmp_path / "a", Path("/proc/no/record.json")):
        with pytest.raises(CommandError, match=r"^-o \S*: cannot be written \("):
            need_file("-o", wrong)
    (tmp_path / "file").write_text("kept")
    for wrong in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(CommandError, match=r"^-o \S*: cannot be written \("):
            need_folder("-o", wrong)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.fixture
def taken(tmp_path: Path) -> Path:
    """Where a file stands, which is no folder."""
    path = tmp_path / "file"
    path.touch()
    return path


@pytest.mark.parametrize("words", [("measure", "executed"), ("measure", "traced")])
def test_nothing_is_run_for_what_cannot_be_kept(
    words: tuple[str, ...], taken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("run")

    monkeypatch.setattr(measure, "need_torch", lambda: None)
    monkeypatch.setattr(measure, "cells", lambda *_: [_Planned()])
    for world, run in ((executed, "run_cells"), (traced, "run")):
        monkeypatch.setattr(world, run, never)
    code, line = said(*words, "-o", str(taken))
    assert code == 2
    assert f"-o {taken}: cannot be written" in line


class _Planned:
    name, plan = "problem.method.0", suite.Plan(partition=(((0,),),))


TO_O = """
table claims
predict no.csv
stages no.json
compare --model no --cluster no --gpus 1 --seq-len 1 --global-batch 1
timeline no.json
calibrate
run-cells no.yaml --store no --bundle no
cells no.yaml --store no
measure agreement
measure points
simulate no
execute no
trace no
trace megatron_core
baseline predict no
baseline run no
"""


@pytest.mark.parametrize("line", [*(f"{line} -o" for line in TO_O.strip().splitlines())])
def test_the_target_is_tried_before_all_else(line: str, taken: Path) -> None:
    """What else is wrong with a line would be said otherwise."""
    *words, flag = line.split()
    code, told = said(*words, flag, str(taken / "target"))
    assert code == 2
    assert f"{flag} {taken / 'target'}: cannot be written" in told


def test_an_error_of_the_system_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(answers, "ask_study", full)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(CONFIG / "study", tmp_path / "config" / "study")
    code, line = said("make", "results/paper/studies/mst.json")
    assert code == 2
    assert line == "rematbench make: [Errno 28] No space left on device"


@pytest.mark.parametrize(("words", "told"), tables(__file__)["wrong"])
def test_a_target_that_cannot_be_made_is_one_line(
    words: tuple[str, ...], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, line = said("make", *words)
    assert (code, told in line) == (2, True), line


def test_a_target_is_made_once_from_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").symlink_to(CONFIG)
    paths = [f"results/paper/tables/pareto.{suffix}" for suffix in ("csv", "md")]
    ran = typed("make", *paths)
    assert (ran.code, ran.out.count("pareto.csv: ")) == (0, 1), ran.err
    assert all(Path(path).stat().st_size > 0 for path in paths)
    listed = typed("make", "--list").out
    assert "results/paper/studies/{study}.json" in listed


@pytest.mark.parametrize("seconds", ["0", "-5", "inf", "1e30", "nan"])
@pytest.mark.parametrize("words", [("execute", "keep_all"), ("measure", "executed", "-o", "x")])
def test_seconds_without_a_result_have_bounds(words: tuple[str, ...], seconds: str) -> None:
    code, line = said(*words, "--timeout", seconds)
    assert code == 2
    assert "'--timeout'" in line


def test_a_rank_is_one_of_the_processes() -> None:
    meeting = ("localhost", 29500)
    assert is_launched(1, 2, meeting, 2)
    assert not is_launched(0, 1, meeting, 2)
    for rank in (-1, 2, 5):
        with pytest.raises(CommandError, match="ranks of 2 processes are 0 to 1"):
            is_launched(rank, 2, meeting, 2)


@pytest.mark.parametrize("kind", [CheckError, DeadlockError, LedgerError])
def test_an_unsound_program_is_one_line_that_says_whose_fault_it_is(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsound(program: object) -> None:
        raise kind("rank 0: q is never freed")

    monkeypatch.setattr(suite, "check", unsound)
    code, line = said("simulate", "keep_all", *RUN, "--check")
    assert code == 2
    assert "a bug in rematbench or in your method file" in line
    assert line.endswith(f"{kind.__name__}: rank 0: q is never freed")


def test_an_interrupted_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(program: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "check", interrupted)
    found = said("simulate", "keep_all", *RUN, "--check")
    assert found == (130, "rematbench: interrupted")
