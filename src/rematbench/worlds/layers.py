"""The part `layers` of `measure-gpu`: steps of methods by turns, beside predictions made before.

`predict` writes what is expected of every cell.  The measurement refuses to start without a
prediction of every cell by the present constants and plans, and measures those that are said to
fit.
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from rematbench.choose.outcome import lately, run_plan
from rematbench.host.console import CommandError
from rematbench.host.memory import free_bytes
from rematbench.packages.process import Device
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import discover
from rematbench.problem import Problem
from rematbench.runs.cell import Cell, cells, problem_of
from rematbench.runs.digests import code_digest
from rematbench.runs.gpu_lines import (
    Prediction,
    Turn,
    append_line,
    by_cell,
    one_line,
    read_lines,
)
from rematbench.runs.record import plan_hash, provenance, run_spec
from rematbench.runs.suite import Suite, bundles, read_suite
from rematbench.simulate.evaluate import fullest_rank
from rematbench.spec.configfile import ConfigError, require_known
from rematbench.worlds.machine import Machine
from rematbench.worlds.speed import has_peak_of

PREDICTED = "predictions.jsonl"
FEWEST = 3
"""Turns of each method at least."""
SEED = 7


class LayerSuite(Suite, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Problems with one model on one GPU each, and what runs there: `methods` as they are, and the
    variants.  `references`: the cell of each problem, by METHOD.NUMBER, that ratios are of;
    `half_width`: of the 95 % interval of a ratio, over the ratio, at which a problem's turns end.
    """

    methods: tuple[str, ...]
    references: dict[str, str]
    half_width: float = 0.01


def load_layers(path: Path) -> LayerSuite:
    """The suite of a file; ConfigError in one line for what it does not allow."""
    suite = read_suite(path, LayerSuite)
    require_known(suite.methods, list(discover().methods), (str(path), "methods", "method"))
    names = layer_names(suite)
    for problem in suite.problems:
        reference = f"{problem.name}.{suite.references.get(problem.name, '')}"
        if reference not in names:
            raise ConfigError(
                str(path), f"references: {problem.name}", "names no cell of the suite"
            )
    return suite


def layer_names(suite: LayerSuite) -> dict[str, str]:
    """The labels of the cells that the suite asks for, by the cell's name."""
    every = bundles(suite, discover())
    return {
        f"{problem.name}.{bundle}.{number}": variant.label
        for problem in suite.problems
        for bundle, variants in every.items()
        for number, variant in enumerate(variants)
        if variant in suite.variants or (number == 0 and bundle in suite.methods)
        if not variant.problems or problem.name in variant.problems
    }


def layer_cells(suite: LayerSuite, only: Sequence[str] = ()) -> list[Cell]:
    """The planned cells of the suite; `only`: of these problems, or these cells."""
    every = layer_names(suite)
    names = [n for n in every if not only or any(f"{n}.".startswith(f"{w}.") for w in only)]
    if not names:
        raise CommandError(f"--only {', '.join(only)}: no such cell")
    return cells(suite, [], names)


# -- predictions --------------------------------------------------------------------------------


def predict(cell: Cell) -> Prediction:
    """What is expected of a cell: the simulated world's seconds, and bytes of the fullest rank."""
    known: dict[str, Any] = {**_identity(cell), "code": code_digest("simulated")}
    known |= {"cell": cell.name, "provenance": provenance(cell.problem.calibration)}
    if isinstance(cell.plan, Unsupported):
        return Prediction(status="unsupported", reason=cell.plan.reason, **known)
    outcome = run_plan(cell.problem, cell.plan)
    found = outcome.evaluation
    if found is None:
        return Prediction(status=outcome.status, reason=outcome.reason, **known)
    rank = found.ranks[fullest_rank(found.ranks)]
    reserved = lately(cell.problem, cell.plan).peaks  # the runtime places no activations itself
    return Prediction(
        status=outcome.status,
        reason=outcome.reason,
        step_s=found.step_s if outcome.status == "ok" else None,
        allocated_bytes=rank.device_peak,
        reserved_bytes=reserved.reserved_bytes,
        pinned_bytes=rank.host_peak,
        host_bytes=rank.host_state + rank.host_activation_peak,
        **known,
    )


def _identity(cell: Cell) -> dict[str, str]:
    planned = plan_hash(cell.problem, cell.plan) if isinstance(cell.plan, Plan) else ""
    return {"run_id": run_spec(cell.problem, cell.method).run_id, "plan_hash": planned}


def write_predictions(found: Sequence[Prediction], path: Path, *, anew: bool) -> str:
    """Write predictions; the words that say what was done.  Predictions that say the same as the
    file's leave it as it is; CommandError where they say something else, unless `anew`."""
    if path.exists() and not anew:
        old = {line.cell: line for line in read_lines(path, Prediction)}
        same = {line.cell: _told(line, old[line.cell]) for line in found if line.cell in old}
        changed = [line.cell for line in found if same.get(line.cell) != old.get(line.cell)]
        if changed or old.keys() - same.keys():
            first = (changed or sorted(old.keys() - same.keys()))[0]
            raise CommandError(f"{path}: says something else of {first}; --anew replaces it")
        return f"{path}: as before, {len(old)} predictions"
    path.unlink(missing_ok=True)
    for line in found:
        append_line(path, line)
    return f"{path}: {len(found)} predictions"


def _told(line: Prediction, old: Prediction) -> Prediction:
    """The prediction with the older one's provenance, and its seconds where only rounding differs:
    sums in another order are no other prediction."""
    step_s = line.step_s
    if step_s and old.step_s and math.isclose(step_s, old.step_s, rel_tol=1e-9):
        step_s = old.step_s
    return replace(line, provenance=old.provenance, code=old.code, step_s=step_s)


def read_predictions(folder: Path, found: Iterable[Cell]) -> dict[str, Prediction]:
    """The predictions of a folder by cell; CommandError where a cell has none by the present
    constants and plans."""
    path = folder / PREDICTED
    if not path.exists():
        raise CommandError(f"{path}: no predictions; `rematbench predict-gpu` makes them, first")
    known = {line.cell: line for line in read_lines(path, Prediction)}
    for cell in found:
        line = known.get(cell.name)
        if line is None:
            raise CommandError(f"{path}: has no {cell.name}")
        if {"run_id": line.run_id, "plan_hash": line.plan_hash} != _identity(cell):
            raise CommandError(f"{path}: {cell.name} was predicted with other constants or plans")
    return known


# -- turns --------------------------------------------------------------------------------------


class Ratio(NamedTuple):
    """Speed over the reference's: the mean over rounds, and the half-width of its 95 % interval
    (infinite below two rounds)."""

    mean: float
    half_width: float
    n: int


def ratio(turns: Sequence[Turn], reference: Sequence[Turn]) -> Ratio | None:
    """The ratio of two cells' speeds, paired by round; None without a common round."""
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
    """Whether a cell's ratio is known well enough; without a reference that ran, whether it has had
    the fewest turns."""
    if not any(turn.step_s for turn in reference):
        return len([turn for turn in turns if turn.step_s]) >= FEWEST
    one = ratio(turns, reference)
    return one is not None and one.n >= FEWEST and one.half_width <= half_width * one.mean


def measure_layers(
    suite: LayerSuite, only: Sequence[str], output: Path, device: Device, limit_s: float
) -> None:
    """Run the cells of this device by turns within `limit_s` seconds; a line of the file of the
    cell's problem for each turn."""
    from rematbench.torch.devices import prepared_device  # noqa: PLC0415  # torch is optional
    from rematbench.torch.turns import Turns  # noqa: PLC0415

    until = time.monotonic() + limit_s
    place = prepared_device(device, 0)
    machine = Machine(device)
    found = [cell for cell in layer_cells(suite, only) if device == "cpu" or is_here(cell, machine)]
    if not found:
        raise CommandError(f"no problem of the suite is of {machine.name}")
    known = read_predictions(output, found)
    taken = Taken(output / "layers", machine, found)
    live = []
    for cell in found:
        why = refusal(known[cell.name])
        if not why:
            live.append(cell)
        elif cell.name not in by_cell(taken.turns):
            taken.note(cell, 0, 0, "refused", why)
    least = {cell.name: 2.0 * (known[cell.name].step_s or 0.0) for cell in live}
    _rounds(live, suite, taken, Turns(place, machine.state).turn, until, least)


def refusal(line: Prediction) -> str:
    """Why a cell is not started: its prediction, or the host's memory."""
    if line.status != "ok":
        return f"predicted {line.status}: {line.reason}"
    free = free_bytes()
    pinned = max(line.host_bytes, line.pinned_bytes)
    if pinned > free >= 0:
        return f"pins {pinned / 2**30:.0f} GiB, the host has {free / 2**30:.0f} free"
    return ""


def is_here(cell: Cell, machine: Machine) -> bool:
    """Whether the cell's cluster has this machine's GPU."""
    return has_peak_of(cell.problem.cluster, machine.name)


class Taken:
    """The turns so far, on disk and in memory; those of an earlier run on the same device count."""

    def __init__(self, folder: Path, machine: Machine, found: Iterable[Cell]) -> None:
        """CommandError where the turns of `found` are of another device, constants or plans."""
        self.folder, self.machine = folder, machine
        self.turns: list[Turn] = []
        known = {cell.name: _identity(cell) for cell in found}
        for path in sorted({self._file(name) for name in known}):
            self.turns += read_lines(path, Turn) if path.exists() else []
        for turn in self.turns:
            now = known.get(turn.cell, {"run_id": turn.run_id, "plan_hash": turn.plan_hash})
            if turn.provenance.device != machine.name or now != {
                "run_id": turn.run_id,
                "plan_hash": turn.plan_hash,
            }:
                text = f"turns of {turn.cell} on {turn.provenance.device}, not of this run"
                raise CommandError(f"{self._file(turn.cell)}: {text}; move it away")

    def _file(self, name: str) -> Path:
        return self.folder / f"{problem_of(name)}.jsonl"

    @property
    def rounds(self) -> int:
        """The number of the last round."""
        return max((turn.round for turn in self.turns), default=0)

    def note(
        self, cell: Cell, number: int, place: int, status: Any, reason: str = "", **seen: Any
    ) -> None:
        """Write a turn's line."""
        known: dict[str, Any] = {**_identity(cell), "cell": cell.name, "round": number}
        known |= {"place": place, "status": status, "reason": one_line(reason)}
        line = Turn(**known, **self.machine.about(cell.problem.calibration) | seen)
        self.turns.append(line)
        append_line(self._file(cell.name), line)


def _rounds(
    live: list[Cell],
    suite: LayerSuite,
    taken: Taken,
    turn: Callable[[Problem, Plan], tuple[str, str, dict[str, Any]]],
    until: float,
    least: Mapping[str, float],
) -> None:
    """Rounds in random order until every problem is settled, or the next turn would take too long.
    A cell that fails has no further turn.  `least`: predicted seconds of a cell's first turn."""
    took = {cell.name: least.get(cell.name, 0.0) for cell in live}
    number = taken.rounds
    draw = random.Random(SEED + number)
    while live:
        number += 1
        draw.shuffle(live)
        for place, cell in enumerate(tuple(live)):
            begun = time.monotonic()
            if begun + took[cell.name] > until:
                return
            assert isinstance(cell.plan, Plan)
            status, reason, seen = turn(cell.problem, cell.plan)
            took[cell.name] = time.monotonic() - begun
            taken.note(cell, number, place, status, reason, **seen)
            if status != "ok":
                live.remove(cell)
        live = _unsettled(live, suite, taken)


def _unsettled(live: list[Cell], suite: LayerSuite, taken: Taken) -> list[Cell]:
    """The cells of the problems in which some ratio is not known well enough."""
    found, waiting = by_cell(taken.turns), set()
    for cell in live:
        problem = problem_of(cell.name)
        reference = found.get(f"{problem}.{suite.references[problem]}", [])
        if not is_settled(found.get(cell.name, []), reference, suite.half_width):
            waiting.add(problem)
    return [cell for cell in live if problem_of(cell.name) in waiting]
