"""The parts of a `measure-gpu` run, each in a process of its own, and the summary of them."""

import datetime
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from rematbench.host.console import CommandError
from rematbench.packages.agreement import agreement_records
from rematbench.packages.process import Device, policy
from rematbench.runs.cell import Cell, cell_names, cells
from rematbench.runs.record import keep_record
from rematbench.runs.store import write_atomically
from rematbench.runs.suite import load_suite
from rematbench.slurm.launch import last_words, run_limited
from rematbench.worlds import package
from rematbench.worlds.executed import How, run_cells
from rematbench.worlds.gpu_checks import Ran, Summary, findings

LIMITS = {"steps": 90.0, "copies": 40.0, "lossless": 200.0, "large": 260.0}
"""Seconds of each part, in order: under ten minutes in all, the shortest and surest first."""
RECORDS = ("lossless", "large")
"""Parts that leave a record of each cell; problems have the part's name in front."""
ON_DEMAND = {"agreement": 400.0, "baselines": 180.0}
"""Of parts that are run only where they are asked for: the real packages, which take as long again
to start."""
BASELINES: tuple[tuple[str, dict[str, str]], ...] = (
    ("megatron_core", {}),
    ("megatron_core", {"recompute": "full"}),
    ("deepspeed", {}),
    ("deepspeed", {"checkpointing": "plain"}),
)
"""What stands beside keep_all and full_recompute on the large problem."""
ROUNDS = 7
COPIES = {"cuda": (1 << 30, 8192), "cpu": (1 << 20, 256)}
"""Bytes of a copy and width of a product; a CPU only tries it out."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What the command was asked."""

    suite: Path
    output: Path
    device: Device
    only: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The same, for a part's process."""
        where = ["-o", str(self.output), "--suite", str(self.suite), "--device", self.device]
        return [*where, *(word for name in self.only for word in ("--only", name))]

    def names(self, problem: str) -> list[str]:
        """Names of the same cells."""
        every = cell_names(load_suite(self.suite), self.only)
        return [name for name in every if name.startswith(problem)]

    def cells(self, problem: str) -> list[Cell]:
        """Cells of the problems whose name starts so."""
        every = cells(load_suite(self.suite), [], self.only)
        found = [cell for cell in every if cell.name.startswith(problem)]
        if not found:
            raise CommandError(f"{self.suite}: no problem named {problem} is asked for")
        return found


def measure(parts: Sequence[str], asked: Asked, say: Callable[[str], None]) -> Summary:
    """Every part, one after another, and what they show; `say` hears of each before it starts."""
    from rematbench.torch.job import versions  # noqa: PLC0415  # torch is optional

    for part in parts:
        forget(part, asked.output)
    ended: list[Ran] = []
    for part in parts:
        ended.append(_run(part, asked, say))
        summary = summarize(tuple(ended), asked, versions(asked.device)["device"])
    return summary


def forget(part: str, output: Path) -> None:
    """Remove what the part left there before: old numbers are not this run's."""
    (output / f"{part}.json").unlink(missing_ok=True)
    folder, names = (output / "records", f"{part}*") if part in RECORDS else (output / part, "*")
    for path in folder.glob(f"{names}.json"):
        path.unlink()


def _run(part: str, asked: Asked, say: Callable[[str], None]) -> Ran:
    """One part in a process group of its own, ended at its limit."""
    limit = (LIMITS | ON_DEMAND)[part]
    say(f"{part}: up to {limit:.0f} s")
    words = ["measure-gpu", "--inside", "--part", part, *asked.words]
    command = [sys.executable, "-c", "from rematbench.cli.app import main; main()", *words]
    ended = run_limited(command, asked.output / f"{part}.log", limit, lambda: False)
    status, reason = "ok", ""
    if ended.code is None:
        status, reason = "timeout", f"not done within {limit:.0f} s"
    elif ended.code:
        status, reason = "failed", f"exit code {ended.code}: {last_words(ended.stderr)}"
    return Ran(part=part, status=status, reason=reason, seconds=round(ended.seconds, 1))


def summarize(ended: tuple[Ran, ...], asked: Asked, device: str) -> Summary:
    """What the parts that have ended show, and what they should have left and did not."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    done = [ran.part for ran in ended if ran.part in RECORDS]
    planned = [name for part in done for name in asked.names(part)]
    found = Summary(
        written=now, device=device, parts=ended, findings=findings(asked.output, planned)
    )
    _write(asked.output / "summary.json", found)
    return found


def _write(path: Path, found: msgspec.Struct, **more: float) -> None:
    data = {**msgspec.to_builtins(found), **more}
    write_atomically(path, msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


# -- parts, inside their processes --------------------------------------------------------------


def _steps(asked: Asked) -> None:
    """keep_all beside the hand-written loop."""
    from rematbench.torch.beside import step_times  # noqa: PLC0415  # torch is optional
    from rematbench.torch.devices import prepared_device  # noqa: PLC0415

    device = prepared_device(asked.device, 0)
    problem = asked.cells("large")[0].problem
    found = step_times(problem, problem.base_plan, device, ROUNDS)
    _write(asked.output / "steps.json", found, ratio=found.ratio)


def _copies(asked: Asked) -> None:
    from rematbench.torch.beside import copy_times  # noqa: PLC0415  # torch is optional
    from rematbench.torch.devices import prepared_device  # noqa: PLC0415

    nbytes, size = COPIES[asked.device]
    found = copy_times(prepared_device(asked.device, 0), size, nbytes)
    _write(asked.output / "copies.json", found, slowdown=found.slowdown)


def _lossless(asked: Asked) -> None:
    """Every method's gradients beside keep_all's, problem by problem."""
    every = asked.cells("lossless")
    for problem in dict.fromkeys(cell.name.split(".")[0] for cell in every):
        same = [cell for cell in every if cell.name.split(".")[0] == problem]
        _execute(same, asked, 100.0, How(device=asked.device, steps=2))


def _large(asked: Asked) -> None:
    """Bytes and seconds of every method, each in a launch of its own."""
    how = How(device=asked.device, steps=1, compare=False, norms=False, timed_steps=5)
    for cell in asked.cells("large"):
        _execute([cell], asked, 90.0, how)


def _execute(found: list[Cell], asked: Asked, limit_s: float, how: How) -> None:
    for cell, record in run_cells(found, limit_s, how):
        keep_record(record, asked.output / "records", cell.name)


def _agreement(asked: Asked) -> None:
    """Losses and gradient norms of three engines."""
    from rematbench.torch.canary import gpus_seen  # noqa: PLC0415  # torch is optional

    gpus = gpus_seen()[1] if asked.device == "cuda" else 0
    for name, record in agreement_records(asked.device, gpus).items():
        keep_record(record, asked.output / "agreement", name)


def _baselines(asked: Asked) -> None:
    """The packages' own steps on the large problem, each in a process of its own."""
    problem = asked.cells("large")[0].problem
    for name, settings in BASELINES:
        method, limits = policy(name, settings), {"steps": 2, "timeout_s": 60.0}
        record = package.run(problem, method, "executed", device=asked.device, **limits)
        word = "-".join(settings.values()) or "none"
        keep_record(record, asked.output / "baselines", f"{name}-{word}")


PARTS: dict[str, Callable[[Asked], None]] = {
    "steps": _steps,
    "copies": _copies,
    "lossless": _lossless,
    "large": _large,
    "agreement": _agreement,
    "baselines": _baselines,
}
