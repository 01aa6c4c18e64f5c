"""The process of a baseline: python baselines/run.py NAME JOBS.json FOLDER, or under torchrun/srun.

Started alone, the process forks one process per rank of each job (the package is imported once).
Started by torchrun or srun, it is one rank.  Every job ends in FOLDER/<number>.json, a Record.
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
    sys.path[0] = str(ROOT)  # this folder has directories named like the packages
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    driver = importlib.import_module("baselines.common.driver")
    code: int = driver.drive(name, Path(jobs), Path(folder))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
