"""./bench without a network, after a kill, in a copied and in a read-only checkout; pip and uv are
recorders."""

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.workflow.checkout import ROOT

BENCH = (ROOT / "bench").read_text(encoding="utf-8")
FUNCTIONS = BENCH.partition("[ $# -gt 0 ] || usage")[0]
PINNED = next(line.split("=")[1].split()[0] for line in BENCH.splitlines() if "torch=" in line)
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


def copy(folder: Path) -> Path:
    """A checkout with an environment of recorders."""
    (folder / ".venv" / "bin").mkdir(parents=True)
    for name in ("requirements.lock", "pyproject.toml"):
        (folder / name).write_text(name)
    for name, text in (("python", PYTHON), ("uv", UV)):
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
    living = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "snakemake"], cwd=here
    )
    try:
        time.sleep(0.2)
        code, _, told = shell(here, "unlock", PATH=path)
        assert code == 1
        assert f"works in this folder (process {living.pid})" in told
    finally:
        living.kill()
        living.wait()


def test_resume_is_unlock_and_the_same_command(tmp_path: Path) -> None:
    here = copy(tmp_path)
    (here / ".snakemake" / "locks").mkdir(parents=True)
    (here / ".snakemake" / "locks" / "0.input.lock").touch()
    tool = here / ".venv" / "bin" / "snakemake"
    tool.write_text('#!/bin/sh\necho "snakemake $*" >>"$LOG"\n')
    tool.chmod(0o755)
    branch = BENCH.partition("\nresume)\n")[2].partition(";;")[0]
    entered = "enter() { PATH=$venv/bin:$PATH; }\n"
    in_a_job = [
        sys.executable,
        "-c",
        "import time; time.sleep(60)",
        "snakemake",
        "--mode",
        "remote",
    ]
    living = subprocess.Popen(in_a_job, cwd=here)
    try:
        code, asked, told = shell(here, f"{entered}set --\n{branch}")
        assert (code, told) == (0, "bench: an earlier run was killed: going on\n")
        assert asked.splitlines() == ["snakemake --unlock", "snakemake measure --profile slurm"]
        _, asked, _ = shell(here, f"{entered}set -- smoke --config simulate_on=slurm\n{branch}")
        assert (
            asked.splitlines()[-1] == "snakemake smoke --config simulate_on=slurm --profile slurm"
        )
    finally:
        living.kill()
        living.wait()
