"""What a torchrun of the tests runs in each process: a list of cases, results of rank 0 to a file.

usage: torchrun --nproc-per-node N torchrun.py CASES.pt RESULTS.pt
"""

import os
import sys
from pathlib import Path

import torch

from rematbench.worlds.torch import rank_processes

TIMEOUT_S = 120.0


def main() -> None:
    """Run the cases as one of the launcher's processes."""
    source, target = (Path(word) for word in sys.argv[1:])
    given = rank_processes.LauncherPlace(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        address=os.environ["MASTER_ADDR"],
        port=int(os.environ["MASTER_PORT"]),
    )
    cases = torch.load(source, weights_only=False)
    results, _ = rank_processes.run_launched(cases, given, TIMEOUT_S)
    if given.rank == 0:
        torch.save(results, target)


if __name__ == "__main__":
    main()
