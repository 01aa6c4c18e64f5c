"""The cost of Snakemake: the same tiny simulated cells in few and in many jobs, locally and by
Slurm.

    ./bench run python -m benchmarks.workflow --write benchmarks/workflow.csv
    ./bench run python -m benchmarks.workflow --write benchmarks/workflow.csv --slurm

Each line is one whole `snakemake` command in a copy of the checkout: wall seconds, CPU seconds of
the command and of all its jobs, next to the same cells without Snakemake; the difference is the
cost of Snakemake. Slurm's jobs are not children of the command: this process adopts them (as a
Linux subreaper) and counts their seconds when they end. `--slurm` submits to the two nodes that
tests/worlds/slurm starts on this machine (as root, with Debian's packages), with the profile as
it is. `--write` adds the lines to a table with their versions and the machine's load when each
began: CPU seconds are comparable on a busy machine, wall seconds are not. The table is in
docs/decisions/worlds.md; the bundling there is chosen from it.
"""

import argparse
import contextlib
import csv
import ctypes
import datetime
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from tests.worlds.slurm.local_slurm import LocalSlurm

PACKAGES = ("rematbench", "snakemake", "snakemake-executor-plugin-slurm")
ROOT = Path(__file__).resolve().parents[1]
PARTS = ("Snakefile", "environment.yml", "config", "figures", "methods", "profiles")
MORE = ("results/published", "src", "workflows")
LOCAL = ((10, 1), (10, 10), (100, 1), (100, 10), (100, 100), (1000, 1), (1000, 10), (1000, 100))
SLURM = ((10, 1), (10, 10), (100, 1), (100, 10), (1000, 1), (1000, 10))
"""Measured pairs (cells, jobs), with 1, 10, 100 or 1,000 cells in a job."""

PROBLEM = """
  - name: p{number}
    why: one of many
    model: tiny-llama
    cluster: this-machine
    system: rematbench
    gpus: 1
    seq_len: {seq_len}
    global_batch: 1
"""


PR_SET_CHILD_SUBREAPER = 36


class Cost(NamedTuple):
    """Seconds of one command; `cpu_s`: of the command and its children, without Slurm's jobs."""

    wall_s: float
    cpu_s: float


def adopt() -> None:
    """Make this process the parent of descendants whose own parent has ended."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise SystemExit("this kernel has no subreaper: CPU seconds of jobs cannot be counted")


def adopted_cpu_s(cluster: LocalSlurm) -> float:
    """CPU seconds of the Slurm jobs that ended since the last call; waits until no job is left, at
    most for a minute."""
    before = cpu_s()
    deadline = time.monotonic() + 60
    while cluster.ask("squeue", "--noheader").strip() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)  # the last job step needs a moment to end
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            continue
    return cpu_s() - before


def cpu_s() -> float:
    """CPU seconds of all children that this process has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def checkout(folder: Path, cells: int, jobs: int) -> None:
    """Copy the checkout to `folder`, with `jobs` methods on `cells / jobs` problems."""
    for part in (*PARTS, *MORE):
        source, target = ROOT / part, folder / part
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        copy(source, target)  # type: ignore[operator]  # both take (source, target)
    (folder / "slurm").symlink_to("profiles/slurm")
    text = (folder / "methods/keep_all.py").read_text(encoding="utf-8")
    for path in (folder / "methods").glob("*.py"):
        path.unlink()
    for number in range(jobs):
        name = f"m{number:04d}"
        own = re.sub(r'= "keep_all"', f'= "{name}"', text)
        (folder / f"methods/{name}.py").write_text(own, encoding="utf-8")
    problems = [PROBLEM.format(number=n, seq_len=32 * (n + 1)) for n in range(cells // jobs)]
    (folder / "config/smoke.yaml").write_text("problems:" + "".join(problems), encoding="utf-8")


def run(folder: Path, words: list[str], environment: dict[str, str] | None = None) -> Cost:
    """Run one command in a copy of the checkout; SystemExit if the command fails."""
    before, start = cpu_s(), time.perf_counter()
    everything = (environment or dict(os.environ)) | {"PYTHONPATH": str(folder / "src")}
    done = subprocess.run(
        words, cwd=folder, env=everything, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return Cost(time.perf_counter() - start, cpu_s() - before)


def bare(folder: Path) -> Cost:
    """The cost of the copy's cells in one process, without Snakemake."""
    code = (
        "import sys; from pathlib import Path; from rematbench.plugins.discover import discover; "
        "from rematbench.worlds.records.suite import load_suite, run_bundle; "
        "from rematbench.worlds.records.store import Store; "
        "r = discover(); s = load_suite(Path('config/smoke.yaml')); "
        "[run_bundle(s, m, r, Path('bare') / m, Store(Path('barestore'))) for m in r.methods]"
    )
    return run(folder, [sys.executable, "-c", code])


def line(cells: int, jobs: int, cluster: LocalSlurm | None) -> dict[str, str]:
    """One measured line of the table; through Slurm if `cluster` is given."""
    load = os.getloadavg()[0]
    local = ["--cores", "2", "--scheduler", "greedy"]
    there = ["--profile", "slurm", "--config", "simulate_on=slurm"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkout(folder, cells, jobs)
        alone = bare(folder)
        words = ["snakemake", "results/smoke/tables/runs.csv", *(there if cluster else local)]
        whole = run(folder, words, cluster.environment() if cluster else None)
        used = whole.cpu_s + (adopted_cpu_s(cluster) if cluster else 0.0)
    return {
        "where": "Slurm" if cluster else "here",
        "cells": str(cells),
        "jobs": str(jobs),
        "wall_s": f"{whole.wall_s:.1f}",
        "cpu_s": f"{used:.1f}",
        "cells_alone_cpu_s": f"{alone.cpu_s:.1f}",
        "engine_cpu_s": f"{used - alone.cpu_s:.1f}",
        "load": f"{load:.1f}",
        "cores": str(os.cpu_count()),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }


def write(path: Path, lines: list[dict[str, str]]) -> None:
    """Add lines to the table at `path`; a new line replaces a line of the same place, cells and
    jobs."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            found = {_key(row): row for row in csv.DictReader(file)}
    found |= {_key(row): row for row in lines}
    rows = [found[key] for key in sorted(found, key=lambda k: (k[0], int(k[1]), int(k[2])))]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _key(row: dict[str, str]) -> tuple[str, ...]:
    return row["where"], row["cells"], row["jobs"]


def table(rows: Iterable[dict[str, str]]) -> str:
    """The lines as the Markdown table of docs/decisions/worlds.md."""
    heads = (
        "where",
        "cells",
        "jobs",
        "wall s",
        "CPU s",
        "the cells alone",
        "engine",
        "load before",
    )
    keys = (
        "where",
        "cells",
        "jobs",
        "wall_s",
        "cpu_s",
        "cells_alone_cpu_s",
        "engine_cpu_s",
        "load",
    )
    lines = [" | ".join(heads), " | ".join("---" for _ in heads)]
    lines += [" | ".join(row[key] for key in keys) for row in rows]
    return "".join(f"| {text} |\n" for text in lines)


def main() -> None:
    """Print the table, line by line as it grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slurm", action="store_true", help="submit the jobs to Slurm")
    parser.add_argument("--most", type=int, default=10_000, help="skip plans of more jobs")
    parser.add_argument("--cells", type=int, default=0, help="only plans of so many cells")
    parser.add_argument("--small", action="store_true", help="ten cells in one job")
    parser.add_argument("--write", type=Path, help="a table to put the lines into")
    given = parser.parse_args()
    plans = [
        plan
        for plan in (SLURM if given.slurm else LOCAL)[: 1 if given.small else None]
        if plan[1] <= given.most and given.cells in (0, plan[0])
    ]
    with ExitStack() as stack:
        cluster = None
        if given.slurm:
            adopt()
            cluster = LocalSlurm(Path(stack.enter_context(tempfile.TemporaryDirectory())))
            stack.callback(cluster.stop)
            cluster.start()
        for cells, jobs in plans:
            made = line(cells, jobs, cluster)
            sys.stdout.write(table([made]).splitlines()[-1] + "\n")
            sys.stdout.flush()
            if given.write:
                write(given.write, [made])


if __name__ == "__main__":
    main()
