"""The part `repetitions` of `measure-gpu`: whether plans give the same gradients every time."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rematbench.measure.machine import Machine
from rematbench.measure.records import Repeated, append_line, one_line
from rematbench.plan import Unsupported
from rematbench.plugins.registry import IDENTITY
from rematbench.worlds.packages.process import Device
from rematbench.worlds.records.cell import Cell, problem_of
from rematbench.worlds.records.record import plan_hash, run_spec

REPETITIONS = 100


def measure_repetitions(
    found: Sequence[Cell], out: Path, device: Device, limit_s: float, repetitions: int = REPETITIONS
) -> None:
    """Repeat a step of every cell with kernels that give the same bits every time; a line of `out`
    for each.  Cells that cannot begin within `limit_s` seconds have none."""
    from rematbench.measure.torch.repetitions import Gradients, want_same_bits  # noqa: PLC0415
    from rematbench.measure.torch.turns import Turns  # noqa: PLC0415
    from rematbench.worlds.torch.devices import prepared_device  # noqa: PLC0415  # torch is optional

    until = time.monotonic() + limit_s
    place, machine = prepared_device(device, 0), Machine(device)
    want_same_bits()
    for problem in dict.fromkeys(problem_of(cell.name) for cell in found):
        turns, keep_all = Turns(place, machine.state), Gradients()
        same = [cell for cell in found if problem_of(cell.name) == problem]
        for cell in sorted(same, key=lambda cell: cell.method.name != IDENTITY):
            if isinstance(cell.plan, Unsupported) or time.monotonic() > until:
                continue
            line = _repeated(cell, turns, keep_all, repetitions)
            append_line(out, Repeated(**line, **machine.about(cell.problem.calibration)))


def _repeated(cell: Cell, turns: Any, keep_all: Any, repetitions: int) -> dict[str, Any]:
    """The fields of a cell's line; keep_all's gradients go into `keep_all`."""
    from rematbench.measure.torch.repetitions import repeat, same_bits  # noqa: PLC0415
    from rematbench.worlds.torch.failures import failure  # noqa: PLC0415  # torch is optional

    known = {"cell": cell.name, "run_id": run_spec(cell.problem, cell.method).run_id}
    known |= {"plan_hash": plan_hash(cell.problem, cell.plan)}  # type: ignore[arg-type]
    try:
        seen = repeat(turns.executor(cell.problem, cell.plan), repetitions)
    except Exception as error:
        status, reason = failure(error)
        return known | {"status": status, "reason": one_line(reason)}
    finally:
        turns.forget()
    if cell.method.name == IDENTITY:
        keep_all.update(seen.first)
    bits = same_bits(seen.first, keep_all) if keep_all else None
    told = {"differing": seen.differing, "worst": seen.worst, "keep_all_bits": bits}
    return known | {"status": "ok", "repetitions": seen.repetitions, **told}
