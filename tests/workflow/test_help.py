"""The examples that `--help` shows, run as they stand there."""

import ast
import os
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "rematbench"
FILES = sorted((SOURCES / "cli").glob("*.py"))
ELSEWHERE = {
    "calibrate": "refits for minutes to an hour",
    "measure-gpu": "needs a GPU",
}
"""Examples that other places run, or that nothing here can."""
MADE = ("results/paper", "results/smoke/records", "my-")
"""What examples read that a checkout does not have: made by another command or by its user."""
COMMITTED = ("published", "measured", "searched")
TORCH = {"execute", "trace", "measure", "run-cells", "baseline run"}


def examples(path: Path) -> list[str]:
    """Command lines after `Example:` in the docstrings of a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if text is None or "Example:" not in text:
            continue
        block = text.partition("Example:")[2].lstrip("\n").partition("\n\n")[0]
        for line in block.splitlines():
            if line.strip().startswith("rematbench "):
                found.append(line.strip())
            elif found:
                found[-1] += f" {line.strip()}"
    return found


SHOWN = [line for path in FILES for line in examples(path)]


def name_of(line: str) -> str:
    """`rematbench baseline run ...` -> baseline run."""
    words = line.split()
    return " ".join(words[1:3] if words[1] == "baseline" else words[1:2])


def reads(line: str) -> list[str]:
    """Paths among the words of a command, but for what it writes."""
    words = shlex.split(line)
    written = {words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-o", "--out")}
    return [word for word in words if word not in written and word.startswith(MADE)]


@pytest.mark.soak
def test_examples_run_one_after_the_other(tmp_path: Path) -> None:
    """In a copy of what they read, in the order of the help: some read what one before has made.
    That every command has an example: tests/cli/test_cli.py."""
    assert ELSEWHERE.keys() <= {name_of(line) for line in SHOWN}
    for folder in ("config", "methods", *(f"results/{name}" for name in COMMITTED)):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    torch = find_spec("torch") is not None
    ran = 0
    for line in SHOWN:
        if name_of(line) in ELSEWHERE or reads(line) or (name_of(line) in TORCH and not torch):
            continue
        done = subprocess.run(
            [sys.executable, "-m", "rematbench.cli.app", *shlex.split(line)[1:]],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-500:]}\n{done.stderr[-2000:]}"
        ran += 1
    assert ran > (30 if torch else 20)
