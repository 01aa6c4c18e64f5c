"""Which Python ./bench makes its environment from, of stand-ins on a PATH."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

BENCH = (Path(__file__).resolve().parents[2] / "bench").read_text()
STAND_IN = """#!/bin/sh
# bench gives the script on standard input, and what it wants: fast or any
case {kind} in fast | "$2") echo {name} ;; *) exit 1 ;; esac
"""


def found(folder: Path, kinds: dict[str, str], site: str = "", **settings: str) -> str:
    """The interpreter that `find_python` finds among stand-ins, each fast, any (usable) or none,
    or its complaint."""
    functions, _, _ = BENCH.partition("[ $# -gt 0 ] || usage")
    own = functions.replace("/usr/bin/python3", str(folder / "distribution"))
    (folder / "bench").write_text(f'{own}find_python "{site}"\n')
    for name, kind in kinds.items():
        (folder / name).write_text(STAND_IN.format(kind=kind, name=name))
        (folder / name).chmod(0o755)
    for tool in ("sh", "cat", "dirname"):
        (folder / tool).symlink_to(shutil.which(tool) or tool)
    done = subprocess.run(
        [str(folder / "sh"), str(folder / "bench")],
        env={"PATH": str(folder), **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == (not done.stderr)
    return (done.stdout or done.stderr).strip()


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ({"python3": "fast", "distribution": "fast"}, "python3"),
        ({"python3": "any", "distribution": "fast"}, "distribution"),
        ({"python3": "any", "python3.12": "fast", "distribution": "fast"}, "python3.12"),
        ({"python3": "any", "distribution": "none"}, "python3"),
        ({"python3": "none", "python3.11": "any"}, "python3.11"),
    ],
)
def test_an_optimised_build_goes_first(
    tmp_path: Path, kinds: dict[str, str], expected: str
) -> None:
    assert found(tmp_path, kinds) == expected


def test_the_packages_of_the_first_on_path_are_the_users(tmp_path: Path) -> None:
    kinds = {"python3": "any", "distribution": "fast"}
    assert found(tmp_path, kinds, "--system-site-packages") == "python3"


def test_a_named_interpreter_is_taken_or_refused(tmp_path: Path) -> None:
    kinds = {"python3": "fast", "own": "any", "old": "none"}
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    assert found(folders[0], kinds, PYTHON="own") == "own"
    line = found(folders[1], kinds, PYTHON="old")
    assert line.startswith(
        "bench: needs Python 3.11 or newer with venv and ensurepip, not found as: old "
    )


def test_this_interpreter_answers_bench(tmp_path: Path) -> None:
    functions, _, _ = BENCH.partition("[ $# -gt 0 ] || usage")
    (tmp_path / "bench").write_text(functions + "find_python ''\n")
    done = subprocess.run(
        ["sh", str(tmp_path / "bench")], capture_output=True, text=True, check=True
    )
    assert os.access(done.stdout.strip(), os.X_OK)
