"""Run on the stand-in: turns of plans that a search found, each at its full size and held to its
device memory.  A line for each: cell, status, reserved bytes, and those that are predicted now.
`python -m tests.stand_in.turns FILE CELL...`"""

import sys
from pathlib import Path

from rematbench.host.gpu_state import GpuState
from rematbench.measure.parts.searched_plans import searched_cells
from rematbench.measure.predicted_steps import predict
from rematbench.measure.torch.turns import Turns
from rematbench.plan import Plan
from rematbench.worlds.torch.devices import prepared_device


def main(file: str, names: list[str]) -> None:
    """Print the lines."""
    turns = Turns(prepared_device("cuda", 0), GpuState)
    for cell in searched_cells(Path(file), names):
        assert isinstance(cell.plan, Plan)
        status, _, seen = turns.turn(cell.problem, cell.plan)
        words = (cell.name, status, seen.get("reserved_bytes", 0), predict(cell).reserved_bytes)
        sys.stdout.write(" ".join(map(str, words)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
