"""The benchmark of the search measures what it is for, at its smallest size: what it imports moves,
and nothing else would tell."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.workflow.checkout import ROOT

LINES = (
    r"^(\S+) layouts, (\S+) methods", r"^bounds of (\S+) layouts in \S+ s: (\S+) a",
    r"^gap 0.5 % proved after \S+ s, (\S+) plans simulated, best (\S+) s",
    r"CPU seconds, (\S+) answers, (\S+) simulations",
)  # fmt: skip
"""Lines that it prints, whose numbers are positive: what it measures, by stage."""


def test_it_runs_at_its_smallest() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.search", "--small"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300,
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for line in LINES:
        found = re.search(line, done.stdout, re.MULTILINE)
        assert found, (line, done.stdout)
        assert all(float(word.replace(",", "")) > 0.0 for word in found.groups()), found[0]
