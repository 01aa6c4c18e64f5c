"""Records of one GPU as JSON lines: predictions, steps in turns, and (of earlier runs) seconds of
actions.

A line is on disk before the next measurement starts, so that a crash loses no line.
"""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from rematbench.evaluate.result import Status
from rematbench.host.declared import flat_inside, nested_inside
from rematbench.host.gpu_state import GpuState
from rematbench.host.table import grouped
from rematbench.inputs.job import Job
from rematbench.worlds.records.record import Provenance, RecordError

T = TypeVar("T", bound=Struct)
Means = Literal["nothing", "checkpoint", "save_on_cpu", "checkpoint+save_on_cpu"]
"""Torch's own ways to save activation memory, applied to each layer: torch.utils.checkpoint (not
reentrant), and torch.autograd.graph.save_on_cpu with pinned memory."""


class Prediction(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of a committed file of predictions, written before its cell is measured: the seconds
    of a step and the bytes of the fullest rank. `run_id` and `plan_hash` are those of a simulated
    record, so that a changed constant or plan is detected; `code` is the digest of the simulator's
    code.

    `pinned_bytes` counts blocks of powers of two, `host_bytes` the tensors in them. A cell that
    does not fit has its bytes and the reason.
    """

    cell: str
    run_id: str
    plan_hash: str
    code: str
    status: Status
    reason: str = ""
    step_s: float | None = None
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    host_bytes: int = 0
    provenance: Provenance


class Searched(Prediction, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A line of the part `searched`: the prediction of a plan that a search of `job` returned for a
    device of `memory_gib`. `place`: its row in the answer, if rows that differ only in settings
    count once (0: no row). `beside`: it is the best plan of the methods that the suite compares
    with the answer. `spec` and `method` (the text of the composition) rebuild the cell, whatever a
    later search returns."""

    job: str
    memory_gib: float
    place: int
    beside: bool
    spec: Job
    method: str


class Turn(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn of a cell: the seconds of its timed steps after a warm-up, the seconds in which the
    host issued each step, the allocators' peaks, and the GPU's state during the warm-up. `round`
    and `place` give the order: every cell has one turn in a round, at a random place. A cell that
    is refused by its prediction has one line in round 0. Steps written by hand have no
    `plan_hash`."""

    cell: str
    run_id: str
    plan_hash: str
    round: int
    place: int
    status: Literal["ok", "oom", "nan", "failed", "refused"]
    reason: str = ""
    step_s: tuple[float, ...] = ()
    issue_s: tuple[float, ...] = ()
    warm_s: float = 0.0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    gpu: GpuState = GpuState()
    provenance: Provenance


OfCell = TypeVar("OfCell", Turn, "ActionSeconds")


class ActionSeconds(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the actions of one kind in a step of a cell, on their stream, and the seconds that
    the cost model predicts for them. `unit`: E (embedding), L (layers), H (head), or empty. The
    kind STEP is the whole step, whose streams overlap. A cell that failed or was not started has
    one such line, with the reason."""

    cell: str
    unit: str = ""
    op: str = ""
    kind: str
    stream: str = ""
    actions: int = 0
    seconds: float = 0.0
    predicted_s: float = 0.0
    status: Literal["ok", "oom", "nan", "failed", "refused"] = "ok"
    reason: str = ""
    gpu: GpuState = GpuState()
    provenance: Provenance


def one_line(reason: str) -> str:
    """A reason as one line of at most 300 characters."""
    return " ".join(reason.split())[:300]


def append_line(path: Path, line: Struct) -> None:
    """Append one line and flush it to the disk. An unfinished last line is removed before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(msgspec.json.encode(flat_inside(line)) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """Read the lines of a file. RecordError, with the line's number, for a damaged line. An
    unfinished last line, which a killed process left, is ignored."""
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RecordError(f"{path}: cannot be read ({error.strerror})") from error
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(msgspec.convert(nested_inside(msgspec.json.decode(line), kind), kind))
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise RecordError(f"{path} line {number}: {error}") from error
    return found


def by_cell(lines: Iterable[OfCell]) -> dict[str, list[OfCell]]:
    """Group lines by the name of their cell, in their order."""
    return grouped((line.cell, line) for line in lines)
