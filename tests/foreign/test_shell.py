"""Shell scripts: the values that bash gives their variables, without running anything."""

import sys
from pathlib import Path

import pytest

from rematbench.foreign.shell import options_of, read_script
from rematbench.inputs.configfile import ConfigError
from tests.tables import tables


def value(text: str) -> str:
    """The value of `--x` in the commands of a script."""
    options = [options_of(words) for words in read_script(text, "run.sh").commands]
    return " ".join(next(one["x"] for one in options if "x" in one))


@pytest.mark.parametrize(("text", "expected"), tables(__file__)["scripts"])
def test_a_script_gives_the_values_that_bash_gives(text: str, expected: str) -> None:
    assert value(text) == expected


@pytest.mark.parametrize("text", ["run --x 'open", 'run "open', "A=(1 2", "run ${A"])
def test_a_script_without_an_end_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match="not a shell command"):
        read_script(text, "run.sh")


def test_a_script_without_the_parser_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install shfmt-py"):
        read_script("run --x 1", "run.sh")
    (tmp_path / "shfmt").write_text('#!/bin/sh\necho "{}"\n')
    (tmp_path / "shfmt").chmod(0o755)
    assert read_script("run --x 1", "run.sh").commands == []


def test_nothing_is_executed(tmp_path: Path) -> None:
    target = tmp_path / "file.txt"
    read_script(f"A=$(touch {target})\nB=`touch {target}`\ntouch {target}\necho $((A=1))", "run.sh")
    assert not target.exists()


def test_a_variable_that_doubles_has_an_end() -> None:
    with pytest.raises(ConfigError, match="grows without end"):
        read_script("A=aaaaaaaa\n" + "A=$A$A\n" * 60, "run.sh")
