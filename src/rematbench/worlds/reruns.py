"""Whether a new run of a committed record gives the committed numbers, for our executor, our
simulator and the baselines.

Fields that depend only on shapes, plans and versions must be equal: status, plan, kernels, all
counts and bytes of every rank, and all numbers of a simulated run. Losses and gradient norms must
agree within a bound on rounding, because different CPUs add in different orders. Of fp32 and bf16
runs only the first step's gradient norms are compared, because AdamW amplifies rounding in later
steps. The verdict *lossless* must be equal. Dates, hosts and seconds are not compared. Neither are
peaks of a package's ranks that communicate over gloo, whose threads hold buffers for a moment.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rematbench.evaluate.result import evaluate_method
from rematbench.plugins.registry import Registry
from rematbench.worlds import executed, package, traced
from rematbench.worlds.agreement import executor_record
from rematbench.worlds.packages.process import Device, baselines
from rematbench.worlds.records.measured import BOUNDS, Measured
from rematbench.worlds.records.record import Record, RecordError, make_record, read_record
from rematbench.worlds.records.suite_cells import Cell

OF_THE_GPU = ("allocated_bytes", "reserved_bytes", "step_s")
"""Fields of a rank that depend on what else ran on the GPU."""
OF_GLOO = ("activation_peak_bytes", "host_peak_bytes")
"""Fields of a rank that vary over gloo, whose threads hold a package's buffers for a moment."""
SIMULATED = (
    *("status", "reason", "plan_hash"),
    *("repeats", "headroom_bytes", "host_headroom_bytes", "binds"),
)
INPUTS = ("cluster", "system", "calibration")
RAN = ("label", "shim", "kernels", "backend")
COMPARED = ("against", "bound", "lossless")


def verify(path: Path, rerun: Callable[[str, Record], Record]) -> tuple[Record, list[str]]:
    """Return the record of a new run of a record file's job, and its differences from the file's
    record. `rerun` makes the new record from (name, record), or reads an earlier one."""
    old = read_record(path)
    new = rerun(path.stem, old)
    return new, differences(new, old)


def differences(rerun: Record, committed: Record) -> list[str]:
    """A line for each difference: the field, its new value, its committed value.  If there are
    differences, a last line names the changed inputs of the run."""
    both = bool(rerun.measured) and bool(committed.measured)
    new, old = (_compared(record, measured=both) for record in (rerun, committed))
    bound, found = BOUNDS[rerun.spec.precision], []
    for name in (
        name for name in old if name in new
    ):  # a part that one record lacks shows in the counts
        now, then, of_step = new[name], old[name], name.endswith(":")
        if now != then and not (of_step and abs(now - then) <= bound * abs(then)):
            found.append(f"{name} {_difference(now, then)}{f' (bound {bound:g})' * of_step}")
    if (rerun.measured is None) != (committed.measured is None):
        found.append("only one of the two records has measured numbers")
    changed = [what for what in INPUTS if _input(rerun, what) != _input(committed, what)]
    return [*found, f"changed since: {', '.join(changed)}"] if found and changed else found


def _input(record: Record, kind: str) -> str:
    return str(getattr(record.spec, f"{kind}_hash"))


def _compared(record: Record, *, measured: bool) -> dict[str, Any]:
    """The parts of a record that are compared, by name; None for a part that it lacks.  A name with
    a colon at its end belongs to a loss or a norm, which rounding may change."""
    found = {name: getattr(record, name) for name in SIMULATED}
    found |= {name: getattr(record.engine, name, None) for name in RAN}
    seen = record.measured if measured and record.measured else Measured()
    found |= {name: getattr(seen, name) for name in ("steps", "warmup_steps")}
    found |= {name: getattr(seen.comparison, name, None) for name in COMPARED}
    found["ranks"] = len(record.ranks) + len(seen.ranks)
    exchanges = record.engine and record.world == "executed" and record.spec.layout.gpus > 1
    loose = (*OF_THE_GPU, *(OF_GLOO if exchanges else ()))
    for number, rank in enumerate((*record.ranks, *seen.ranks)):
        numbers = msgspec.structs.asdict(rank).items()
        found |= {f"rank {number}: {key}": value for key, value in numbers if key not in loose}
    first = 1 if record.spec.precision != "fp64" else None
    for word, values in (("losses", seen.losses), ("gradient_norms", seen.gradient_norms[:first])):
        found[word] = len(values)
        found |= {f"{word} of step {step}:": value for step, value in enumerate(values)}
    return found


def _difference(now: object, then: object) -> str:
    """A new value and the committed value in words.  For structs, mappings or sequences of equal
    length, the text has the first place that differs and the number of such places."""
    if isinstance(now, Struct) and isinstance(then, Struct):
        now, then = (msgspec.structs.asdict(value) for value in (now, then))
    if isinstance(now, dict) and isinstance(then, dict):
        places = {key: (now.get(key, "none"), then.get(key, "none")) for key in {**then, **now}}
    elif isinstance(now, tuple) and isinstance(then, tuple) and len(now) == len(then):
        places = dict(enumerate(zip(now, then, strict=True)))
    else:
        return f"{now}, committed {then}"
    apart = {place: pair for place, pair in places.items() if pair[0] != pair[1]}
    place, pair = next(iter(apart.items()))
    more = f" ({len(apart)} of {len(places)} differ)" if len(apart) > 1 else ""
    return f"{place} {_difference(*pair)}{more}"


def rerun_record(record: Record, cell_of: Callable[[], Cell], registry: Registry) -> Record:
    """Run a record's request again and return the new record. `cell_of` makes the cell if our
    executor or simulator runs the request. RecordError for a published record."""
    if record.spec.method in baselines():
        return package.rerun(record)
    if record.world == "published":
        text = f"run {record.run_id} is published: only its authors can run it again"
        raise RecordError(text)
    cell = cell_of()
    if record.world == "simulated":
        return make_record(evaluate_method(cell.problem, cell.method, cell.base), cell.method)
    if record.world == "traced":
        return traced.rerun(record, cell)
    if record.engine is not None and record.measured is not None:
        device: Device = "cpu" if record.engine.device == "cpu" else "cuda"
        return executor_record(cell.problem, device, record.measured.steps)
    return executed.rerun(record, cell, registry)
