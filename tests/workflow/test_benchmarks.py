"""Every benchmark measures what it is for, at its smallest size: what it imports moves, and nothing
else would tell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workflow.checkout import ROOT

FILES = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__")

LINES = {
    "engine": (r"^actions +(\S+)", r"^lower +(\S+)s", r"^check +(\S+)s", r"^op level +(\S+)s",
               r"^chunk level +(\S+)s", r"^evaluate, all in +(\S+)s"),
    "search": (r"^(\S+) layouts, (\S+) methods", r"^bounds of (\S+) layouts in \S+ s: (\S+) a",
               r"^gap 0.5 % proved after \S+ s, (\S+) plans simulated, best (\S+) s",
               r"CPU seconds, (\S+) answers, (\S+) simulations"),
    "search_rules": (r"^\(all rules\) +(\S+) +(\S+)", r"^smallest plan of a layout +(\S+) +(\S+)"),
    "solvers": (r"^gpt-1.3b-nvlink, (\S+), (\S+), (\S+)", r"^7b-64k, (\S+)"),
    "workflow": (r"(\d+)\D+(\d+)\D+(\d+\.\d)",),
}  # fmt: skip
"""Lines of each benchmark, whose numbers are positive: what it measures, by stage."""

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
    for line in LINES[name]:
        found = re.search(line, done.stdout, re.MULTILINE)
        assert found, (line, done.stdout)
        assert all(float(word.replace(",", "")) > 0.0 for word in found.groups()), found[0]
