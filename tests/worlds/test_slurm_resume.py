"""Going on after an interruption: what is left in the queue, and a Slurm that is silent."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rematbench.cli.app import command_line
from rematbench.host.console import CommandError
from rematbench.worlds.slurm import slurm_queue
from rematbench.worlds.slurm.slurm_queue import QueuedJob, Unreachable

APP = command_line()


def test_resume_without_slurm_says_so_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "Snakefile").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(APP, ["resume", "smoke"])
    assert isinstance(done.exception, CommandError)
    assert "Slurm is not available: squeue is not on PATH" in str(done.exception)


TOOLS = ("squeue", "scancel")
TRIED = """#!/bin/sh
echo "$0 $*" >> "$(dirname "$0")/tried"
"""
SILENT = TRIED + "echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1\n"
HANGS = TRIED + "exec sleep 60\n"
BACK = (
    TRIED
    + """[ "$(grep -c squeue "$(dirname "$0")/tried")" -ge 3 ] && exit 0
echo 'squeue: error: Unable to contact slurm controller' >&2; exit 1
"""
)


@pytest.fixture
def slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """A folder to resume in, with Slurm tools that answer as told; returns what was tried."""
    (tmp_path / "Snakefile").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(slurm_queue, "POLL_S", 0.05)

    def make(script: str) -> Path:
        (tmp_path / "bin").mkdir()
        for name in TOOLS:
            tool = tmp_path / "bin" / name
            tool.write_text(script)
            tool.chmod(0o755)
        return tmp_path / "bin/tried"

    return make


@pytest.mark.parametrize("script", [SILENT, HANGS])
@pytest.mark.parametrize("options", [[], ["--settle"]])
def test_a_silent_slurm_is_given_up_with_one_line(
    slurm_says: Callable[[str], Path], script: str, options: list[str]
) -> None:
    slurm_says(script)
    start = time.monotonic()
    done = CliRunner().invoke(APP, ["resume", *options, "--patience", "0.02"])
    assert time.monotonic() - start < 10
    assert isinstance(done.exception, CommandError)
    text = str(done.exception)
    assert text.startswith("Slurm did not answer for 0.02 minutes (")
    assert "run the same command again" in text
    assert "\n" not in text
    assert done.output.count("waiting for Slurm, at most 0.02 minutes") == 1


def test_a_slurm_that_answers_again_is_waited_for(
    slurm_says: Callable[[str], Path],
) -> None:
    tried = slurm_says(BACK)
    done = CliRunner().invoke(APP, ["resume", "--settle", "--patience", "1"])
    assert done.exit_code == 0, done.output
    assert tried.read_text().count("squeue") == 3


def test_patience_is_of_one_silence(
    slurm_says: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job may run for hours; only seconds without any answer count."""
    slurm_says(SILENT)
    found = [QueuedJob("7", "RUNNING")]
    looks = iter([*(6 * [found, Unreachable("away")]), found, []])

    def look(folder: Path, limit_s: float) -> list[QueuedJob]:
        answer = next(looks)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    monkeypatch.setattr(slurm_queue, "queued_jobs", look)
    said: list[str] = []
    slurm_queue.settle_jobs(tmp_path, cancel=False, patience_s=0.2, say=said.append)
    assert said[0].startswith("job 7 of an earlier run is running")
    assert next(looks, "none left") == "none left"
