"""./bench without a network, after a kill, in a copied and in a read-only checkout; pip and uv are
recorders."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.tables import tables
from tests.workflow.checkout import ROOT

BENCH = (ROOT / "bench").read_text(encoding="utf-8")
FUNCTIONS = BENCH.partition("[ $# -gt 0 ] || usage")[0]
PINS = dict(re.findall(r"\b(torch|megatron)=([\d.]+)", BENCH))
PINNED = PINS["torch"]
PYTHON = """#!/bin/sh
case $*:$2 in
*'import pathlib'*) exec "$REAL" "$@" ;;
*'m.version'*) [ -n "$TORCH" ]; exit ;;
*'import torch'*) echo "$TORCH" ;;
'-m pip'*) echo "pip $*" >>"$LOG"; exit "${UV_EXIT:-0}" ;;
-V*) echo Python 3.11.0 ;;
esac
"""
UV = """#!/bin/sh
echo "uv $*" >>"$LOG"
exit "${UV_EXIT:-0}"
"""


def copy(folder: Path, python: str = PYTHON, uv: str = UV) -> Path:
    """A checkout with an environment of recorders."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("requirements.lock", "pyproject.toml"):
        (folder / name).write_text(name)
    for name, text in (("python", python), ("uv", uv)):
        tool = folder / ".venv" / "bin" / name
        tool.write_text(text)
        tool.chmod(0o755)
    return folder


def shell(folder: Path, line: str, **more: str) -> tuple[int, str, str]:
    """A line after the functions of ./bench: exit code, what uv was asked, stderr."""
    (folder / "bench").write_text(FUNCTIONS + line + "\n")
    log = folder / "log"
    log.touch()
    given = {"LOG": str(log), "REAL": sys.executable, "TORCH": "", **more}
    done = subprocess.run(
        ["sh", str(folder / "bench")],
        env=os.environ | given,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
    )
    return done.returncode, log.read_text(), done.stderr


@contextmanager
def living(folder: Path, *words: str) -> Iterator[int]:
    """The number of a process in this folder whose command line has these words."""
    process = subprocess.Popen([sys.executable, "-c", "input()", *words], cwd=folder, stdin=-1)
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def test_torch_is_installed_in_the_asked_build(tmp_path: Path) -> None:
    here = copy(tmp_path)
    cpu = shell(here, "install_build cpu")[1]
    assert f"--torch-backend cpu torch=={PINNED}" in cpu
    (here / "log").unlink()
    cuda = shell(here, "install_build cuda", TORCH=f"{PINNED}+cpu None")[1]
    assert f"torch=={PINNED}" in cuda
    assert "--torch-backend" not in cuda


def test_a_torch_in_the_asked_build_stays(tmp_path: Path) -> None:
    here = copy(tmp_path)
    assert shell(here, "install_build cpu", TORCH=f"{PINNED}+cpu None") == (0, "", "")
    assert shell(here, "install_build cuda", TORCH=f"{PINNED} 13.0")[1] == ""
    assert shell(here, "install_build cpu", TORCH="2.1.0+cpu None")[1] != ""


def test_what_cannot_be_installed_points_to_the_wheels(tmp_path: Path) -> None:
    code, _, told = shell(copy(tmp_path), "install_build cpu", UV_EXIT="2")
    assert code == 1
    assert "without a network: setup --offline DIR" in told.splitlines()[-1]


def test_a_copied_environment_is_of_its_new_place(tmp_path: Path) -> None:
    """Scripts and links name the copy, and the stamp says so; nothing is installed."""
    first, second = copy(tmp_path / "first"), tmp_path / "second"
    script = first / ".venv" / "bin" / "tool"
    script.write_text(f"#!{first}/.venv/bin/python\nrun\n")
    site = first / ".venv" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (site / "_rematbench.pth").write_text(f"{first}/src\n")
    stamp = 'printf "%s core\\n%s\\n" "$(fingerprint)" "$root" >"$stamp"'
    assert shell(first, stamp)[0] == 0
    subprocess.run(["cp", "-a", str(first), str(second)], check=True)
    code, asked, told = shell(second, "make core")
    assert (code, asked) == (0, "")
    assert str(first) in told
    moved = second / ".venv"
    assert (moved / "bin" / "tool").read_text() == f"#!{second}/.venv/bin/python\nrun\n"
    assert (moved / "lib/python3.11/site-packages/_rematbench.pth").read_text() == f"{second}/src\n"
    assert (moved / ".bench-stamp").read_text().splitlines()[1] == str(second)
    assert shell(second, "make core") == (0, "", "")


def test_a_read_only_checkout_gets_one_line(tmp_path: Path) -> None:
    here = copy(tmp_path)
    told = "is read-only: copy the checkout to a folder that you may write to"
    code, asked, said = shell(here, "root=$root/none; writable")
    assert (code, asked, said) == (1, "", f"bench: {here}/none {told}\n")
    made = "writable() { die no; }; make core"
    assert shell(here, made) == (1, "", "bench: no\n")


def test_the_lock_of_a_killed_snakemake_goes_and_of_a_living_one_stays(tmp_path: Path) -> None:
    here = copy(tmp_path)
    locks = here / ".snakemake" / "locks"
    locks.mkdir(parents=True)
    (here / "snakemake").write_text('#!/bin/sh\necho "snakemake $*" >>"$LOG"\n')
    (here / "snakemake").chmod(0o755)
    path = os.pathsep.join([str(here), os.environ["PATH"]])
    assert shell(here, "unlock", PATH=path) == (0, "", "")
    (locks / "0.input.lock").touch()
    code, asked, told = shell(here, "unlock", PATH=path)
    assert (code, asked) == (0, "snakemake --unlock\n")
    assert "going on" in told
    with living(here, "snakemake") as pid:
        code, _, told = shell(here, "unlock", PATH=path)
        assert code == 1
        assert f"works in this folder (process {pid})" in told


def test_resume_is_unlock_and_the_same_command(tmp_path: Path) -> None:
    here = copy(tmp_path)
    (here / ".snakemake" / "locks").mkdir(parents=True)
    (here / ".snakemake" / "locks" / "0.input.lock").touch()
    tool = here / ".venv" / "bin" / "snakemake"
    tool.write_text('#!/bin/sh\necho "snakemake $*" >>"$LOG"\n')
    tool.chmod(0o755)
    branch = BENCH.partition("\nresume)\n")[2].partition(";;")[0]
    entered = "enter() { PATH=$venv/bin:$PATH; }\n"
    with living(here, "snakemake", "--mode", "remote"):  # inside a Slurm job: it holds no lock
        code, asked, told = shell(here, f"{entered}set --\n{branch}")
        assert (code, told) == (0, "bench: an earlier run was killed: going on\n")
        assert asked.splitlines() == ["snakemake --unlock", "snakemake measure --profile slurm"]
        words = "smoke --config simulate_on=slurm"
        _, asked, _ = shell(here, f"{entered}set -- {words}\n{branch}")
        assert asked.splitlines()[-1] == f"snakemake {words} --profile slurm"


# -- what it installs to trace again ---------------------------------------------------------------

TORCH, MEGATRON = f"torch=={PINNED}", f"megatron-core=={PINS['megatron']}"
TRACING_PYTHON = """#!/bin/sh
case $*:$2 in
*:'import json'*) exec "$REAL" "$@" ;; # reads pip's report
-c*) echo "$INSTALLED" | grep -q "${3%%=*}"; exit ;; # is it installed?
esac
echo "python $*" >>"$LOG"
case $* in *--dry-run*) echo "$REPORT" ;; esac
"""
TRACING_UV = """#!/bin/sh
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
    here = copy(folder, TRACING_PYTHON, TRACING_UV)
    items = [{"metadata": {"name": n}, "download_info": {"url": u}} for n, u in choice.items()]
    report = json.dumps({"install": items})
    exits = {"UV_EXIT": str(uv_exit), "UNPACK_EXIT": str(unpack_exit)}
    code, log, text = shell(here, "install_tracing", INSTALLED=installed, REPORT=report, **exits)
    assert code == 0, text
    return Said(log.replace(f"{folder}/", "").splitlines(), text)


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


# -- from which Python it makes its environment -------------------------------------------------

STAND_IN = """#!/bin/sh
# bench gives the script on standard input, and what it wants: fast or any
case {kind} in fast | "$2") echo {name} ;; *) exit 1 ;; esac
"""


def found(folder: Path, kinds: dict[str, str], site: str = "", **settings: str) -> str:
    """The interpreter that `find_python` finds among stand-ins, each fast, any (usable) or none,
    or its complaint."""
    own = FUNCTIONS.replace("/usr/bin/python3", str(folder / "distribution"))
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


@pytest.mark.parametrize(("kinds", "expected"), tables(__file__)["builds"])
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
    (tmp_path / "bench").write_text(FUNCTIONS + "find_python ''\n")
    words = ["sh", str(tmp_path / "bench")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert os.access(done.stdout.strip(), os.X_OK)
