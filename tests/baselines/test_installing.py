"""What ./bench installs to trace again: command lines of uv and pip, replaced by recorders."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = (ROOT / "bench").read_text()
PINS = dict(re.findall(r"\b(torch|megatron)=([\d.]+)", BENCH))
TORCH, MEGATRON = f"torch=={PINS['torch']}", f"megatron-core=={PINS['megatron']}"
PYTHON = """#!/bin/sh
case $*:$2 in
*:'import json'*) exec "$REAL" "$@" ;; # reads pip's report
-c*) echo "$INSTALLED" | grep -q "${3%%=*}"; exit ;; # is it installed?
esac
echo "python $*" >>"$LOG"
case $* in *--dry-run*) echo "$REPORT" ;; esac
"""
UV = """#!/bin/sh
echo "uv $* retries=$UV_HTTP_RETRIES" >>"$LOG"
case $* in
*--torch-backend*) exit "$UV_EXIT" ;;
*) echo "unpacks $(cat)" >>"$LOG" && exit "$UNPACK_EXIT" ;;
esac
"""


class Said(NamedTuple):
    """What was run, by tool, and what a person was told."""

    commands: list[str]
    text: str

    def of(self, tool: str) -> list[str]:
        return [line for line in self.commands if line.startswith(tool)]


CHOICE = {"torch": "file:///wheels/torch.whl", "mpmath": "https://index/mpmath.whl"}
"""What pip would install, by name, and where it is."""


def install(
    folder: Path,
    *,
    installed: str = "",
    uv_exit: int = 0,
    unpack_exit: int = 0,
    choice: dict[str, str] = CHOICE,
) -> Said:
    """`install_tracing` of a copy of ./bench, in an environment of recorders.  `uv_exit`,
    `unpack_exit`: of uv's own choice and of its unpacking of pip's."""
    functions, _, _ = BENCH.partition("[ $# -gt 0 ] || usage")
    (folder / "bench").write_text(functions + "install_tracing\n")
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name, text in (("python", PYTHON), ("uv", UV)):
        tool = folder / ".venv" / "bin" / name
        tool.write_text(text)
        tool.chmod(0o755)
    log = folder / "log"
    log.touch()
    items = [{"metadata": {"name": n}, "download_info": {"url": u}} for n, u in choice.items()]
    settings = {
        "LOG": log,
        "REAL": sys.executable,
        "INSTALLED": installed,
        "UV_EXIT": uv_exit,
        "UNPACK_EXIT": unpack_exit,
        "REPORT": json.dumps({"install": items}),
    }
    environment = {**os.environ, **{name: str(value) for name, value in settings.items()}}
    done = subprocess.run(
        ["sh", str(folder / "bench")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Said(log.read_text().replace(f"{folder}/", "").splitlines(), done.stderr)


def test_uv_takes_torch_from_the_index_of_builds_without_cuda(tmp_path: Path) -> None:
    said = install(tmp_path)
    (line,) = said.of("uv")
    assert line == (
        "uv pip install --quiet -c requirements.lock --python .venv/bin/python"
        f" --torch-backend cpu {TORCH} {MEGATRON} retries=0"
    )
    assert not said.of("python -m pip")


def test_the_pinned_uv_knows_these_options(tmp_path: Path) -> None:
    uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if uv is None:
        pytest.skip("no uv here")
    (line,) = install(tmp_path).of("uv")
    words = line.split()[1:-1]
    (tmp_path / "requirements.lock").touch()
    asked = [uv, *words[:2], "--offline", "--dry-run", *words[2:]]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False)
    for complaint in ("unexpected argument", "invalid value", "required arguments"):
        assert complaint not in done.stderr
    wrong = [word.replace("cpu", "no-such-build") for word in asked]
    done = subprocess.run(wrong, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "invalid value" in done.stderr


def test_a_torch_that_is_there_stays(tmp_path: Path) -> None:
    said = install(tmp_path, installed="torch")
    (plan,) = said.of("python -m pip")
    assert "--dry-run" in plan
    assert plan.endswith(f"-c requirements.lock {MEGATRON}")
    assert not [line for line in said.of("uv") if "--torch-backend" in line]


def test_nothing_is_asked_for_where_both_are_there(tmp_path: Path) -> None:
    said = install(tmp_path, installed="torch megatron-core")
    assert not said.of("uv")
    assert not said.of("python -m pip")
    assert not said.text


def test_where_uv_knows_no_such_build_it_unpacks_what_pip_would_take(tmp_path: Path) -> None:
    said = install(tmp_path, uv_exit=1)
    (plan,) = said.of("python -m pip")
    assert "--dry-run" in plan
    assert said.of("uv")[-1].startswith("uv pip install --quiet --no-deps --python")
    assert said.of("unpacks") == [f"unpacks torch @ {CHOICE['torch']}"]
    assert f"mpmath @ {CHOICE['mpmath']}" in said.commands
    assert "cannot be had here" not in said.text


def test_pip_stands_in_for_uv(tmp_path: Path) -> None:
    said = install(tmp_path, uv_exit=1, unpack_exit=1)
    plan, done = said.of("python -m pip")
    assert "--dry-run" in plan
    assert done == f"python -m pip install --quiet -c requirements.lock {TORCH} {MEGATRON}"


def test_no_build_with_cuda_is_taken(tmp_path: Path) -> None:
    said = install(tmp_path, uv_exit=1, choice={**CHOICE, "nvidia-cublas": "https://index/c.whl"})
    (plan,) = said.of("python -m pip")
    assert "--dry-run" in plan
    assert not said.of("unpacks")
    assert "cannot be had here" in said.text
