"""The part `actions` of `measure-gpu`: measured and predicted seconds of each kind of action."""

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rematbench.engine.lowering.lower import lower
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evaluate.result import evaluate_plan
from rematbench.host.console import CommandError
from rematbench.measure.layer_suite import HandCell, LayerSuite, layer_cells
from rematbench.measure.parts.layers import Machine, is_on_machine
from rematbench.measure.predicted_steps import predict, refusal
from rematbench.measure.records import STEP, ActionSeconds, append_line, one_line
from rematbench.plan import Plan
from rematbench.worlds.packages.process import Device
from rematbench.worlds.records.suite_cells import Cell

if TYPE_CHECKING:
    from rematbench.measure.torch.action_seconds import Key, TimedAction
    from rematbench.measure.torch.turns import Turns

STEPS = 3


def measure_actions(
    suite: LayerSuite, only: Sequence[str], out: Path, device: Device, limit_s: float
) -> None:
    """Time the actions of the selected cells of this device (default: the references of ratios, and
    keep_all), and write a line of `out` for each kind of action.  A cell that cannot begin within
    `limit_s` seconds has no line.  Raises CommandError if no cell is of this device."""
    from rematbench.measure.torch.turns import Turns  # noqa: PLC0415
    from rematbench.worlds.torch.devices import prepared_device  # noqa: PLC0415  # torch is optional

    until = time.monotonic() + limit_s
    place, machine = prepared_device(device, 0), Machine(device)
    found = layer_cells(suite, only or _usual(suite))
    found = [cell for cell in found if device == "cpu" or is_on_machine(cell, machine)]
    found = [cell for cell in found if not isinstance(cell, HandCell)]
    if not found:
        raise CommandError(f"the suite has no problem for {machine.name}")
    turns = Turns(place, machine.state)
    for cell in found:
        if time.monotonic() < until:
            for line in _tried(cell, turns, machine):
                append_line(out, line)


def _tried(cell: Cell, turns: "Turns", machine: Machine) -> list[ActionSeconds]:
    """The lines of a cell; one with the reason where it fails or is not started."""
    from rematbench.worlds.torch.case import failure  # noqa: PLC0415  # torch is optional

    about = machine.about(cell.problem.calibration)
    why = refusal(predict(cell), cell)
    if why or not isinstance(cell.plan, Plan):
        return [ActionSeconds(cell=cell.name, kind=STEP, status="refused", reason=why, **about)]
    try:
        return _lines(cell, cell.plan, turns, machine)
    except Exception as error:
        status, reason = failure(error)
        told = one_line(reason)
        return [ActionSeconds(cell=cell.name, kind=STEP, status=status, reason=told, **about)]
    finally:
        turns.release()


def _usual(suite: LayerSuite) -> list[str]:
    names = [f"{problem}.{reference}" for problem, reference in suite.references.items()]
    return [*names, *(f"{problem}.keep_all" for problem in suite.references)]


def _lines(cell: Cell, plan: Plan, turns: "Turns", machine: Machine) -> list[ActionSeconds]:
    from rematbench.measure.torch.action_seconds import TimedExecutor, by_key  # noqa: PLC0415  # torch is optional

    executor = turns.executor(cell.problem, plan, TimedExecutor)
    assert isinstance(executor, TimedExecutor)
    seen = [executor.timed_step() for _ in range(1 + STEPS)][1:]  # the first warms up
    steps = [by_key(taken) for _, taken in seen]
    predicted = action_seconds(cell.problem, lower(plan, cell.problem))
    known = {"cell": cell.name, **machine.about(cell.problem.calibration)}
    found = evaluate_plan(cell.problem, plan).evaluation
    whole = ActionSeconds(
        kind=STEP,
        actions=len(seen[0][1]),
        seconds=statistics.median(seconds for seconds, _ in seen),
        predicted_s=found.step_s if found else 0.0,
        **known,
    )
    keys = {key: [step[key] for step in steps] for key in steps[0]}
    return [
        whole,
        *(ActionSeconds(**_kind_fields(key, own, predicted), **known) for key, own in keys.items()),
    ]


def _kind_fields(key: "Key", steps: "list[list[TimedAction]]", predicted: Any) -> dict[str, Any]:
    """The fields of a line: medians over steps of the sums over a step's actions."""
    sums = [math.fsum(one.seconds for one in step) for step in steps]
    wanted = math.fsum(predicted.timing(one.action, 0).seconds for one in steps[0])
    return {
        **key._asdict(),
        "actions": len(steps[0]),
        "seconds": statistics.median(sums),
        "predicted_s": wanted,
    }
