"""What Snakemake costs: the same tiny simulated cells in few jobs and in many, here and by Slurm.

    ./bench run python benchmarks/workflow.py
    ./bench run python benchmarks/workflow.py --slurm    (a shell where sbatch works)

Each line is one whole `snakemake` command in a copy of the checkout: wall seconds, CPU seconds of
the command and its children (of Slurm's jobs: not counted), and both per job beside the same cells
without Snakemake.  The table stands in docs/slurm.md; the bundling there is chosen from it.
Run it on a quiet machine: CPU seconds are what a busy one still measures.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("Snakefile", "environment.yml", "config", "figures", "methods", "profiles")
MORE = ("results/published", "src", "workflows")
PLANS = ((10, 1), (10, 10), (100, 1), (100, 10), (100, 100), (1000, 10), (1000, 100))
"""(cells, jobs)."""

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


class Cost(NamedTuple):
    """Of one command."""

    wall_s: float
    cpu_s: float


def checkout(folder: Path, cells: int, jobs: int) -> None:
    """A copy with `jobs` methods on `cells / jobs` problems."""
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


def run(folder: Path, words: list[str]) -> Cost:
    """One command in the copy."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = os.environ | {"PYTHONPATH": str(folder / "src")}
    done = subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(time.perf_counter() - start, used)


def bare(folder: Path) -> Cost:
    """The same cells in one process, without Snakemake."""
    code = (
        "import sys; from pathlib import Path; from rematbench.discover import discover; "
        "from rematbench.suitefile import load_suite, run_bundle; from rematbench.store import "
        "Store; r = discover(); s = load_suite(Path('config/smoke.yaml')); "
        "[run_bundle(s, m, r, Path('bare') / m, Store(Path('barestore'))) for m in r.methods]"
    )
    return run(folder, [sys.executable, "-c", code])


def main() -> None:
    """Print the table, line by line as it grows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slurm", action="store_true", help="submit the jobs to Slurm")
    parser.add_argument("--most", type=int, default=10_000, help="skip plans of more jobs")
    given = parser.parse_args()
    local = ["--cores", "2", "--scheduler", "greedy"]
    there = ["--profile", "slurm", "--config", "simulate_on=slurm"]
    where = there if given.slurm else local
    sys.stdout.write("| cells | jobs | wall s | CPU s | the cells alone, CPU s | CPU s per job |\n")
    sys.stdout.write("| --- | --- | --- | --- | --- | --- |\n")
    for cells, jobs in PLANS:
        if jobs > given.most:
            continue
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            checkout(folder, cells, jobs)
            alone = bare(folder)
            whole = run(folder, ["snakemake", "results/smoke/runs.csv", *where])
        each = (whole.cpu_s - alone.cpu_s) / jobs
        sys.stdout.write(
            f"| {cells} | {jobs} | {whole.wall_s:.1f} | {whole.cpu_s:.1f} | {alone.cpu_s:.1f} | "
            f"{each:.2f} |\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
