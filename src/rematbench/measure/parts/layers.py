"""The part `layers` of `measure-gpu`: steps of methods, measured in turns and compared with
predictions.

The measurement starts only if every cell has a prediction by the present constants and plans. It
measures the cells that are predicted to fit.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from rematbench.host.console import CommandError
from rematbench.host.gpu_state import GpuState, gpu_state
from rematbench.inputs.constants import Calibration
from rematbench.measure.layer_suite import HandCell, LayerSuite, layer_cells
from rematbench.measure.predicted_steps import (
    PREDICTIONS,
    identity,
    read_predictions,
    refusal,
    stands_for,
)
from rematbench.measure.records import Turn, append_line, by_cell, one_line, read_lines
from rematbench.plan import Plan
from rematbench.worlds.packages.process import Device
from rematbench.worlds.records.measured import has_peak_of
from rematbench.worlds.records.record import provenance
from rematbench.worlds.records.suite_cells import Cell, problem_of

FEWEST = 3
SEED = 7


class Machine:
    """A device: its name, the versions of its software, and its present state."""

    def __init__(self, device: Device) -> None:
        from rematbench.worlds.torch.devices import smi_name  # noqa: PLC0415  # torch is optional
        from rematbench.worlds.torch.rank_processes import versions  # noqa: PLC0415

        self.versions = versions(device)
        self.name = self.versions["device"]
        self.smi = smi_name() if device == "cuda" else ""

    def state(self) -> GpuState:
        return gpu_state(self.smi) if self.smi else GpuState()

    def about(self, calibration: Calibration) -> dict[str, Any]:
        """The fields `gpu` and `provenance` of a line that is written now."""
        made = replace(provenance(calibration), **self.versions)
        return {"gpu": self.state(), "provenance": made}


class Ratio(NamedTuple):
    """A cell's speed divided by that of its reference: the mean over rounds, the half-width of its
    95 % interval (infinite below two rounds), and the number of rounds."""

    mean: float
    half_width: float
    n: int


def ratio(turns: Sequence[Turn], reference: Sequence[Turn]) -> Ratio | None:
    """The ratio of two cells' speeds, paired by round; None if they have no round in common."""
    of = {turn.round: statistics.median(turn.step_s) for turn in reference if turn.step_s}
    pairs = [
        of[turn.round] / statistics.median(turn.step_s)
        for turn in turns
        if turn.step_s and turn.round in of
    ]
    if not pairs:
        return None
    from scipy.stats import t as student  # noqa: PLC0415 (slow, and only this interval needs it)

    n, mean = len(pairs), statistics.fmean(pairs)
    if n < 2:
        return Ratio(mean, math.inf, n)
    return Ratio(mean, float(student.ppf(0.975, n - 1)) * statistics.stdev(pairs) / n**0.5, n)


def is_settled(turns: Sequence[Turn], reference: Sequence[Turn], half_width: float) -> bool:
    """Whether a cell's ratio is precise enough. If the reference did not run: whether the cell has
    had the minimum number of turns."""
    if not any(turn.step_s for turn in reference):
        return len([turn for turn in turns if turn.step_s]) >= FEWEST
    one = ratio(turns, reference)
    return one is not None and one.n >= FEWEST and one.half_width <= half_width * one.mean


def measure_layers(
    suite: LayerSuite, only: Sequence[str], output: Path, device: Device, limit_s: float
) -> None:
    """Run the suite's cells for this device in turns within `limit_s` seconds. Each turn writes a
    line to the file of its problem."""
    cells, unsettled = layer_cells(suite, only), partial(_unsettled, suite)
    run_by_turns(cells, unsettled, output, "layers", device, limit_s)


def run_by_turns(
    cells: Sequence[Cell],
    unsettled: Callable[[list[Cell], Sequence[Turn]], list[Cell]],
    output: Path,
    part: str,
    device: Device,
    limit_s: float,
) -> None:
    """Run the cells for this device in turns within `limit_s` seconds. A cell is skipped if, by its
    prediction in `output`, it does not fit or needs more host memory than is free. Each turn is
    written to the folder of `part`. `unsettled` returns the cells that need another turn."""
    from rematbench.measure.torch.turns import Turns  # noqa: PLC0415
    from rematbench.worlds.torch.devices import prepared_device  # noqa: PLC0415  # torch is optional

    until = time.monotonic() + limit_s
    place = prepared_device(device, 0)
    machine = Machine(device)
    cells = [
        cell for cell in cells if device == "cpu" or has_peak_of(cell.problem.cluster, machine.name)
    ]
    if not cells:
        raise CommandError(f"the suite has no problem for {machine.name}")
    known = read_predictions(output / PREDICTIONS[part], cells)
    taken = TurnLog(output / part, machine, cells)
    live, first_turn_s = [], {}
    for cell in cells:
        line = known.get(stands_for(cell))
        why = refusal(line, cell) if line else ""
        if not why:
            live.append(cell)
            first_turn_s[cell.name] = 2.0 * (line.step_s or 0.0) if line else 0.0
        elif cell.name not in by_cell(taken.turns):
            taken.note(cell, 0, 0, "refused", why)
    turns = Turns(place, machine.state)

    def turn(cell: Cell) -> tuple[str, str, dict[str, Any]]:
        assert isinstance(cell.plan, Plan)
        means = cell.means if isinstance(cell, HandCell) else None
        return turns.turn(cell.problem, cell.plan, means)

    _rounds(live, unsettled, taken, turn, until, first_turn_s)


class TurnLog:
    def __init__(self, folder: Path, machine: Machine, cells: Iterable[Cell]) -> None:
        """CommandError if earlier turns of `cells` had another device, other constants or plans."""
        self.folder, self.machine = folder, machine
        self.turns: list[Turn] = []
        known = {cell.name: identity(cell) for cell in cells}
        for path in sorted({self._file(name) for name in known}):
            self.turns += read_lines(path, Turn) if path.exists() else []
        for turn in self.turns:
            now = known.get(turn.cell, {"run_id": turn.run_id, "plan_hash": turn.plan_hash})
            if turn.provenance.device != machine.name or now != {
                "run_id": turn.run_id,
                "plan_hash": turn.plan_hash,
            }:
                text = (
                    f"holds turns of {turn.cell} on {turn.provenance.device} that are not "
                    "from this run"
                )
                raise CommandError(f"{self._file(turn.cell)}: {text}; move it away")

    def _file(self, name: str) -> Path:
        return self.folder / f"{problem_of(name)}.jsonl"

    @property
    def rounds(self) -> int:
        return max((turn.round for turn in self.turns), default=0)

    def note(
        self, cell: Cell, number: int, place: int, status: Any, reason: str = "", **seen: Any
    ) -> None:
        known: dict[str, Any] = {**identity(cell), "cell": cell.name, "round": number}
        known |= {"place": place, "status": status, "reason": one_line(reason)}
        line = Turn(**known, **self.machine.about(cell.problem.calibration) | seen)
        self.turns.append(line)
        append_line(self._file(cell.name), line)


def _rounds(
    live: list[Cell],
    unsettled: Callable[[list[Cell], Sequence[Turn]], list[Cell]],
    taken: TurnLog,
    turn: Callable[[Cell], tuple[str, str, dict[str, Any]]],
    until: float,
    first_turn_s: Mapping[str, float],
) -> None:
    """Run rounds in random order until every cell is settled, or the next turn would take too long.
    Cells of one model run one after another, because a change of model draws new weights. A cell
    that fails has no further turn. `first_turn_s`: predicted seconds of a cell's first turn."""
    models = list(dict.fromkeys(cell.problem.workload.model.name for cell in live))
    took = {cell.name: first_turn_s.get(cell.name, 0.0) for cell in live}
    number = taken.rounds
    draw = random.Random(SEED + number)
    while live:
        number += 1
        draw.shuffle(live)
        live.sort(key=lambda cell: models.index(cell.problem.workload.model.name))
        for place, cell in enumerate(tuple(live)):
            begun = time.monotonic()
            if begun + took[cell.name] > until:
                return
            status, reason, seen = turn(cell)
            took[cell.name] = time.monotonic() - begun
            taken.note(cell, number, place, status, reason, **seen)
            if status != "ok":
                live.remove(cell)
        live = unsettled(live, taken.turns)


def _unsettled(suite: LayerSuite, live: list[Cell], turns: Sequence[Turn]) -> list[Cell]:
    """The cells of problems in which the ratio of some cell is not precise enough."""
    found, waiting = by_cell(turns), set()
    for cell in live:
        problem = problem_of(cell.name)
        reference = found.get(f"{problem}.{suite.references[problem]}", [])
        if not is_settled(found.get(cell.name, []), reference, suite.half_width):
            waiting.add(problem)
    return [cell for cell in live if problem_of(cell.name) in waiting]
