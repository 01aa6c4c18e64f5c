"""A suite whose cells take a second each and leave a mark in `calls`, to be interrupted."""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rematbench.evidence.published.sheets import read_sheet
from tests.campaigns import suite_text, tiny
from tests.method_files import method_file
from tests.workflow.checkout import ROOT

BODY = """time.sleep(self.seconds)
with (Path(__file__).parents[1] / "calls").open("a") as calls:
    calls.write(f"{problem.workload.seq_len}\\n")
return base"""
HEAD = "import time\nfrom pathlib import Path\n"
TARGET = "results/smoke/tables/runs.csv"
HERE = ("--config", "simulate_on=slurm")


def make_slow(
    checkout: Path, cells: int, seconds: float = 1.0, beside: tuple[str, ...] = ("keep_all",)
) -> None:
    """Leave the slow method and those `beside` it, a job each, on `cells` problems."""
    leave_methods(checkout, set(beside))
    for name in beside:
        shutil.copy2(ROOT / f"methods/{name}.py", checkout / "methods")
    text = method_file("slow", BODY, head=HEAD, fields=f"seconds: float = {seconds}")
    (checkout / "methods/slow.py").write_text(text)
    (checkout / "calls").write_text("")
    problems = [
        tiny(f"cell{n}", gpus=1, seq_len=32 * (n + 1), global_batch=1) for n in range(cells)
    ]
    (checkout / "config/smoke.yaml").write_text(suite_text(problems))


def leave_methods(checkout: Path, names: set[str]) -> None:
    """Remove the other methods' files."""
    for path in (checkout / "methods").glob("*.py"):
        if path.stem not in names:
            path.unlink()


def finished(checkout: Path) -> dict[str, tuple[int, int]]:
    """Finished records of the store: inode and time of each."""
    found = {}
    for path in (checkout / "results/smoke/cells").glob("*.json"):
        json.loads(path.read_text())  # whole, or absent
        found[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return found


def calls(checkout: Path) -> Counter[str]:
    """How often each cell was planned to its end."""
    return Counter((checkout / "calls").read_text().split())


def check_whole(
    checkout: Path, cells: int, kept: Mapping[str, tuple[int, int]] | None = None
) -> None:
    """Every cell is in the rows once and was run twice at most, what was finished before (`kept`)
    was not written again, and no temporary file is left."""
    methods = [path.stem for path in (checkout / "methods").glob("*.py")]
    found = read_sheet(checkout / TARGET)
    assert {row["status"] for row in found} == {"ok"}
    assert Counter((row["method"], row["problem"]) for row in found) == {
        (name, f"cell{number}"): 1 for name in methods for number in range(cells)
    }
    now = finished(checkout)
    assert {name: now[name] for name in kept or {}} == (kept or {})
    assert {path.suffix for path in (checkout / "results/smoke/cells").iterdir()} == {".json"}
    assert len(calls(checkout)) == cells
    assert max(calls(checkout).values()) <= 2
