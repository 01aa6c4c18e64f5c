"""The process of a baseline: python baselines/run.py NAME JOBS.json FOLDER, or under torchrun/srun.

Started by itself, the process imports the package once and forks one process per rank of each job.
Started by torchrun or srun, the process is one rank. For every job it writes FOLDER/<number>.json,
a Record.
"""

import importlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(arguments: list[str]) -> int:
    if len(arguments) != 3:
        sys.stderr.write("usage: run.py NAME JOBS.json FOLDER\n")
        return 2
    name, jobs, folder = arguments
    sys.path[0] = str(ROOT)  # this folder has folders with the packages' names
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    driver = importlib.import_module("baselines.common.driver")
    code: int = driver.drive(name, Path(jobs), Path(folder))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
