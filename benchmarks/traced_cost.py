"""CPU seconds and peak memory of tracing each cell of config/traced.yaml, as a CSV.

    ./bench run python benchmarks/traced_cost.py [--small | CELL...] > benchmarks/traced_cost.csv

`--small`: the cell that cost least when the committed table was made, to see that it runs.

Each cell is traced in a process of its own, because a process's peak memory only grows, two at a
time.  CPU seconds include neither the interpreter's start nor importing torch, and are those of
this machine, busy or not; they say what a check costs, not how fast anything trains.  Needs torch,
and Linux for the peak (`ru_maxrss` of a child starts at its parent's).
"""

import argparse
import csv
import datetime
import multiprocessing as mp
import platform
import sys
import time
from pathlib import Path

import torch

from rematbench.worlds import traced
from rematbench.worlds.records.cell import cell_names, cells
from rematbench.worlds.records.suite import load_suite

SUITE = Path(__file__).resolve().parents[1] / "config" / "traced.yaml"
COLUMNS = ("cell", "cpu_s", "wall_s", "peak_rss_bytes", "status", "date", "python", "torch")


def peak_bytes() -> int:
    """Peak resident bytes of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))


def cost(name: str) -> dict[str, object]:
    """The CSV row of one cell, traced in this process."""
    (cell,) = cells(load_suite(SUITE), [], [name])
    start, wall = time.process_time(), time.perf_counter()
    record = traced.run(cell)
    return {
        "cell": name,
        "cpu_s": round(time.process_time() - start, 1),
        "wall_s": round(time.perf_counter() - wall, 1),
        "peak_rss_bytes": peak_bytes(),
        "status": record.status,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def cheapest() -> str:
    """The name of the traced cell with the fewest CPU seconds in the committed table."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["status"] == "ok"]
    return min(rows, key=lambda row: float(row["cpu_s"]))["cell"]


def main() -> None:
    """Print a row for each cell as soon as the cell is traced."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", nargs="*", metavar="CELL")
    parser.add_argument("--small", action="store_true", help="one cell")
    given = parser.parse_args()
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    writer.writeheader()
    names = cell_names(load_suite(SUITE), [cheapest()] if given.small else given.cells)
    with mp.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        for row in pool.imap(cost, names, chunksize=1):
            writer.writerow(row)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
