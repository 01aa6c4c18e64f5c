"""Whether a new run of a committed record gives the committed numbers, for our executor and for
baselines.

Fields that depend only on shapes, plans and versions must be equal: status, plan, kernels, all
counts and bytes of every rank, and all numbers of a simulated run.  Losses and gradients must agree
within a bound on rounding, because different CPUs add in different orders; the gradient norms of
fp32 and bf16 at the first step, after which AdamW amplifies the rounding.  The verdict *lossless*
must be equal.  Dates, hosts and seconds are not compared.  Peaks of a package's ranks that
communicate over gloo are not compared either, because gloo's threads may hold a collective's buffer
for a moment.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from rematbench.evaluate.result import evaluate_method
from rematbench.plugins.registry import Registry
from rematbench.worlds import executed, package, traced
from rematbench.worlds.agreement import executor_record
from rematbench.worlds.packages.process import Device, baselines
from rematbench.worlds.records.measured import BOUNDS
from rematbench.worlds.records.record import Record, RecordError, make_record, read_record
from rematbench.worlds.records.suite_cells import Cell

OF_THE_GPU = ("allocated_bytes", "reserved_bytes", "step_s")
"""Fields of a rank that depend on what else ran on the GPU."""
OF_GLOO = ("activation_peak_bytes", "host_peak_bytes")
"""Fields of a rank that depend on gloo's threads, where a package's ranks exchange over gloo."""
SIMULATED = ("repeats", "headroom_bytes", "host_headroom_bytes", "binds")
INPUTS = ("cluster", "system", "calibration")
RAN = ("label", "shim", "kernels", "backend")


def verify(path: Path, rerun: Callable[[str, Record], Record]) -> tuple[Record, list[str]]:
    """Return the record of a new run of a record file's job, and its differences from the file's
    record.  `rerun` makes the new record from (name, record): it runs the job, or reads an earlier
    new record."""
    old = read_record(path)
    new = rerun(path.stem, old)
    return new, differences(new, old)


def differences(rerun: Record, committed: Record) -> list[str]:
    """A line for each difference: the field, its new value, its committed value.  If there are
    differences, a last line names the changed inputs of the run."""
    found = list(_scalars(rerun, committed, ("status", "reason", "plan_hash", *SIMULATED)))
    found += _of_ranks(rerun.ranks, committed.ranks)
    found += _of_both(rerun.engine, committed.engine, RAN, "ran a package")
    new, old = rerun.measured, committed.measured
    if new is None or old is None:
        found += [] if new == old else ["only one of the two records has measured numbers"]
    else:
        bound = BOUNDS[rerun.spec.precision]
        exchanges = rerun.engine and rerun.world == "executed" and rerun.spec.layout.gpus > 1
        loose = (*OF_THE_GPU, *(OF_GLOO if exchanges else ()))
        found += _scalars(new, old, ("steps", "warmup_steps"))
        found += _of_ranks(new.ranks, old.ranks, loose)
        first = 1 if rerun.spec.precision != "fp64" else None
        found += _of_steps(new.losses, old.losses, "losses", bound)
        found += _of_steps(
            new.gradient_norms[:first], old.gradient_norms[:first], "gradient_norms", bound
        )
        verdict = ("against", "bound", "first_only", "lossless")
        compared = "is compared with another method"
        found += _of_both(new.comparison, old.comparison, verdict, compared)
    changed = [what for what in INPUTS if _input(rerun, what) != _input(committed, what)]
    return [*found, f"changed since: {', '.join(changed)}"] if found and changed else found


def _input(record: Record, kind: str) -> str:
    return str(getattr(record.spec, f"{kind}_hash"))


def _of_both(new: object, old: object, names: Sequence[str], words: str) -> Iterator[str]:
    """The differences between a part of two records; `words`: what a record with this part is."""
    if new is None or old is None:
        yield from [] if new == old else [f"only one of the two records {words}"]
    else:
        yield from _scalars(new, old, names)


def _scalars(a: object, b: object, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        now, then = getattr(a, name), getattr(b, name)
        if now != then:
            yield f"{name} {_difference(now, then)}"


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


def _of_ranks(
    new: Sequence[Struct], old: Sequence[Struct], loose: Sequence[str] = ()
) -> Iterator[str]:
    if len(new) != len(old):
        yield f"{len(new)} ranks, committed {len(old)}"
        return
    for number, (a, b) in enumerate(zip(new, old, strict=True)):
        names = [n for n in msgspec.structs.asdict(a) if n not in loose]
        yield from (f"rank {number}: {line}" for line in _scalars(a, b, names))


def _of_steps(
    now: Sequence[float], then: Sequence[float], name: str, bound: float
) -> Iterator[str]:
    if len(now) != len(then):
        yield f"{name} of {len(now)} steps, committed {len(then)}"
        return
    pairs = enumerate(zip(now, then, strict=True))
    apart = [(step, a, b) for step, (a, b) in pairs if abs(a - b) > bound * abs(b)]
    for step, a, b in apart[:1]:
        where = f"{name} of step {step}: {a}, committed {b}"
        yield f"{where} (bound {bound:g}; {len(apart)} of {len(now)} steps differ)"


def rerun_record(record: Record, cell_of: Callable[[], Cell], registry: Registry) -> Record:
    """The record of a new run.  `cell_of` makes the record's cell if our executor or simulator runs
    it.  RecordError for a published record."""
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
