"""Every benchmark starts and ends, at its smallest size: what it imports moves, and nothing else
would tell."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflow.checkout import ROOT

FILES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")

DEAR = "workflow"
"""Ten CPU seconds and more."""
CASES = [pytest.param(name, marks=[pytest.mark.full] if name == DEAR else []) for name in FILES]


@pytest.mark.parametrize("name", CASES)
def test_it_runs_at_its_smallest(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--small"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert any(character.isdigit() for character in done.stdout), "a table has numbers"
