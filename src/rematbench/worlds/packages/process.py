"""Baselines: real training packages, run in separate processes and never imported here.

A baseline is a folder `baselines/NAME/`.  Its `plan.py` states the package's policy as a method
that returns a plan.  Its `stack.py` names the tensors that the package keeps.  Its `run.py` is the
code of the process.  The process reads jobs as JSON and writes records as JSON.
"""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from math import fsum
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from rematbench.evaluate.result import Status
from rematbench.host.errors import UserError
from rematbench.host.files import scratch
from rematbench.host.ranks import error_of_exit, error_of_record, record_status
from rematbench.inputs.configfile import closest
from rematbench.inputs.paths import data_dir
from rematbench.plugins.discover import load_baselines
from rematbench.plugins.registry import Composition, MethodEntry, MethodError, Value, build
from rematbench.problem import Problem
from rematbench.workload import NonNegativeInt, PositiveInt
from rematbench.worlds.records.measured import TIMED_STEPS
from rematbench.worlds.records.record import Record, RunSpec, decode_record, provenance, run_spec

STARTUP_S = 120.0
SHOWN_LINES = 100
Device = Literal["cpu", "cuda"]


class BaselineError(UserError):
    """A baseline does not exist, or its process wrote no record; the message is one line."""


class NotInstalled(BaselineError):
    """The baseline's package, or torch, is not in this environment."""


class ProcessTimeout(BaselineError):
    """The baseline's process was ended at its limit."""


class PackageJob(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run for a baseline's process.

    Losses, gradients and bytes are observed in `steps` steps.  On GPUs `warmup` more steps follow,
    then `timed_steps` steps, of which only the seconds are recorded.  `rank` is the rank whose
    bytes a traced run follows.  `gradients`: the first step's whole gradients are written next to
    the record.  `ignored` is the share of labels that the loss ignores.  `timeout_s` limits the
    whole job with all its ranks.  `settings`: values of the package's own configuration that
    replace the policy's.
    """

    run: RunSpec
    steps: PositiveInt = 2
    warmup: PositiveInt = 1
    timed_steps: NonNegativeInt = TIMED_STEPS
    seed: NonNegativeInt = 7
    ignored: float = 0.0
    device: Device = "cpu"
    rank: NonNegativeInt = 0
    gradients: bool = False
    timeout_s: float = 120.0
    settings: dict[str, Any] = {}


def baselines() -> dict[str, MethodEntry]:
    return loaded()[0]


@cache
def loaded() -> tuple[dict[str, MethodEntry], dict[str, str]]:
    """The complete baselines by name, and for each other folder the reason why it is left out."""
    return load_baselines()


def broken_baselines() -> dict[str, str]:
    return loaded()[1]


def policy(name: str, settings: Mapping[str, Value] | None = None) -> Composition:
    """A baseline's policy with settings, as a method that plans.  BaselineError for an unknown
    baseline, MethodError for an unknown setting."""
    known = baselines()
    if name not in known:
        for path, reason in broken_baselines().items():
            if Path(path).parent.name == name:
                raise BaselineError(f"{path}: {reason}")
        hint = closest(name, known)
        raise BaselineError(f"unknown baseline {name!r}{hint} (known: {', '.join(known)})")
    fields = list(known[name].parameters)
    for key in settings or {}:
        if key not in fields:
            listing = f" (allowed: {', '.join(fields)})"
            raise MethodError(f"{name} has no setting {key!r}{closest(key, fields)}{listing}")
    return Composition((build(known[name], settings or {}),))


def package_system(name: str, default: str) -> str:
    """The stack that a baseline's class names (`system`), otherwise `default`."""
    entry = baselines().get(name)
    return getattr(entry.cls, "system", default) if entry else default


def job(
    problem: Problem,
    method: Composition,
    world: Literal["executed", "traced"] = "executed",
    **options: Any,
) -> PackageJob:
    """The job of a problem under a policy; BaselineError for a stack with CUDA graphs."""
    if problem.system.kernels.captures:
        raise BaselineError(
            f"system {problem.system.name} uses CUDA graphs, but baselines run without them"
        )
    run = run_spec(problem, method, world)
    return msgspec.convert({"run": run, **options}, PackageJob)


def run_jobs(name: str, jobs: Sequence[PackageJob], folder: Path | None = None) -> list[Record]:
    """Run jobs in the baseline's own process and return their records, one per job.

    `folder` keeps the records (`<number>.json`) and the gradients that a job requests.
    BaselineError if the process wrote no record for a job or did not end in time.
    """
    with scratch() as own:
        place = folder or own
        done = _run(name, jobs, place)
        records = []
        for number in range(len(jobs)):
            path = place / f"{number}.json"
            if not path.exists():
                raise _no_record(name, done.stderr, done.returncode)
            records.append(decode_record(path.read_bytes()))
    _show_failure(done.stderr, records)
    return records


def run_rank(name: str, job: PackageJob) -> Record | None:
    """Run a job as one rank, in a process that a launcher started. Return the record on rank 0, and
    None on other ranks if the job ended well or was refused. A failed rank returns the record of
    its failure."""
    with scratch() as place:
        try:
            done = _run(name, [job], place)
        except ProcessTimeout as error:
            return _failed(job, "failed", f"timeout: {error}")
        path, code = place / "0.json", done.returncode
        if path.exists():
            record = decode_record(path.read_bytes())
        elif code == 0:
            return None
        elif killed := error_of_exit(code):
            record = _failed(job, *record_status(killed.status, killed.reason))
        else:
            record = _failed(job, "failed", str(_no_record(name, done.stderr, code)))
    _show_failure(done.stderr, [record])
    return record


def _failed(job: PackageJob, status: Status, reason: str) -> Record:
    return Record(
        run_id=job.run.run_id,
        spec=job.run,
        status=status,
        reason=reason,
        provenance=provenance(),
    )


def _run(name: str, jobs: Sequence[PackageJob], place: Path) -> "subprocess.CompletedProcess[str]":
    """Run the baseline's process, which writes its records in `place`. ProcessTimeout at the
    limit."""
    if not (data_dir("baselines") / name / "run.py").is_file():
        raise BaselineError(f"baselines/{name} has no run.py, which its process runs")
    place.mkdir(parents=True, exist_ok=True)
    # Files of an earlier call would look like answers of this call.
    for path in place.glob("[0-9]*"):
        if path.suffix in (".json", ".pt"):
            path.unlink()
    for path in place.glob("ranks-*"):
        shutil.rmtree(path)
    (place / "jobs.json").write_bytes(msgspec.json.encode(list(jobs)))
    entry = data_dir("baselines") / "run.py"
    command = [sys.executable, str(entry), name, str(place / "jobs.json"), str(place)]
    limit = STARTUP_S + fsum(item.timeout_s for item in jobs)
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as error:
        raise ProcessTimeout(f"{name}: its process gave no answer within {limit:g} s") from error


def _show_failure(text: str, records: Sequence[Record]) -> None:
    """Print the end of a process's standard error, because a record has only one line of an error.
    Nothing is printed if no record failed, or if failures only report another rank's end."""
    failures = [error_of_record(record.status, record.reason) for record in records]
    if any(one.status == "failed" and not one.is_secondhand for one in failures):
        sys.stderr.writelines(f"{line}\n" for line in text.splitlines()[-SHOWN_LINES:])


def _no_record(name: str, text: str, code: int) -> BaselineError:
    lines = [line for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    kind, _, rest = last.partition(": No module named ")
    if kind == "ModuleNotFoundError":
        return NotInstalled(f"{name}: {rest} is not installed here; `./bench test` installs it")
    return BaselineError(f"{name}: its process ended with exit code {code}: {last}")
