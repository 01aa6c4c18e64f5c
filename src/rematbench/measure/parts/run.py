"""The parts of a `measure-gpu` run, each in its own process, and the summary of all."""

import datetime
import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from msgspec.structs import replace

from rematbench.host.console import CommandError
from rematbench.host.files import write_atomically
from rematbench.inputs.paths import data_dir
from rematbench.measure.layer_suite import load_layers
from rematbench.measure.parts.checks import SUMMARY, Ran, Summary, findings, read_summary
from rematbench.measure.parts.layers import measure_layers
from rematbench.measure.parts.searched_plans import load_searched, measure_searched
from rematbench.measure.predicted_steps import PREDICTIONS
from rematbench.worlds import package
from rematbench.worlds.executed import How, run_cells
from rematbench.worlds.packages.process import Device, policy
from rematbench.worlds.records.record import RecordError, keep_record
from rematbench.worlds.records.suite import load_suite
from rematbench.worlds.records.suite_cells import Cell, cell_names, cells, problem_of
from rematbench.worlds.slurm.launch import last_words, run_limited

LIMITS = {"lossless": 200.0, "large": 260.0}
"""Seconds that each part may take, in the order of the run: less than ten minutes in all."""
RECORDS = ("lossless", "large")
"""Parts that write a record for each cell; their problems' names begin with the part's name."""
ON_DEMAND = {
    "baselines": 180.0,
    "layers": 560.0,
    "searched": 560.0,
}
"""Seconds that each part on request may take: steps of real packages, steps of methods in turns,
and plans of a search in turns."""
ENDS_S = 25.0
"""Seconds between the planned end of a part's last turn and the part's limit."""
SUITES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "layers": ("gpu_layers.yaml", load_layers),
    "searched": ("gpu_searched.yaml", load_searched),
}
"""For parts that do not use gpu.yaml: the name of the suite in config/, and its reader."""
BASELINES: tuple[tuple[str, dict[str, str]], ...] = (
    ("megatron_core", {}),
    ("megatron_core", {"recompute": "full"}),
    ("deepspeed", {}),
    ("deepspeed", {"checkpointing": "plain"}),
)
"""Policies of baselines with settings, to compare with keep_all and full_recompute in `large`."""


class GpuRequest(msgspec.Struct, frozen=True, kw_only=True):
    suite: Path | None
    output: Path
    device: Device
    only: tuple[str, ...]
    seconds: float = math.inf

    def limit_s(self, part: str) -> float:
        return min(self.seconds, (LIMITS | ON_DEMAND)[part])

    @property
    def words(self) -> list[str]:
        where = ["-o", str(self.output), "--device", self.device]
        where += ["--suite", str(self.suite)] if self.suite else []
        where += ["--seconds", str(self.seconds)] if math.isfinite(self.seconds) else []
        return [*where, *(word for name in self.only for word in ("--only", name))]

    def file(self, part: str = "") -> Path:
        """The suite of a part: the option `suite`, or the part's default in config/."""
        return self.suite or data_dir("config") / SUITES.get(part, ("gpu.yaml",))[0]

    def check(self, part: str) -> None:
        """Raise ConfigError, or another error of one line, if a part's suite or methods are
        wrong."""
        if part in SUITES:
            SUITES[part][1](self.file(part))
        else:
            self.names("")

    def names(self, problem: str) -> list[str]:
        """Names of the cells of `cells(problem)`, without planning them."""
        every = cell_names(load_suite(self.file()), self.only)
        return [name for name in every if name.startswith(problem)]

    def cells(self, problem: str) -> list[Cell]:
        """The selected cells of problems whose name starts with `problem`; CommandError without
        any."""
        every = cells(load_suite(self.file()), [], self.only)
        found = [cell for cell in every if cell.name.startswith(problem)]
        if not found:
            raise CommandError(f"{self.file()}: no selected problem's name begins with {problem}")
        return found


def measure(parts: Sequence[str], request: GpuRequest, say: Callable[[str], None]) -> Summary:
    """Run the parts one after another. Return a summary of these parts and of the parts that
    earlier commands ran in the same folder on this device. `say` announces each part before it
    starts."""
    from rematbench.worlds.torch.rank_processes import versions  # noqa: PLC0415  # torch is optional

    device = versions(request.device)["device"]
    ended = _before(request.output / SUMMARY, device, parts)
    for part in parts:
        if part not in PREDICTIONS:  # turns stay with their predictions
            forget(part, request.output)
    for part in parts:
        ended.append(_run(part, request, say))
        summary = summarize(tuple(ended), request, device)
    return summary


def _before(path: Path, device: str, parts: Sequence[str]) -> list[Ran]:
    """The parts in the summary of an earlier command, without those that run now; none if the
    summary is missing, unreadable or of another device."""
    try:
        found = read_summary(path)
    except (OSError, RecordError):
        return []
    return [ran for ran in found.parts if ran.part not in parts and found.device == device]


def forget(part: str, output: Path) -> None:
    """Remove a part's files of an earlier run, so that they are not taken for files of this run."""
    for suffix in ("json", "jsonl"):
        (output / f"{part}.{suffix}").unlink(missing_ok=True)
    folder, names = (output / "records", f"{part}*") if part in RECORDS else (output / part, "*")
    for path in folder.glob(f"{names}.json"):
        path.unlink()


def _run(part: str, request: GpuRequest, say: Callable[[str], None]) -> Ran:
    """Run one part in its own process group, which is ended at the part's limit."""
    limit = request.limit_s(part)
    say(f"{part}: up to {limit:.0f} s")
    words = ["measure-gpu", "--inside", "--part", part, *request.words]
    command = [sys.executable, "-c", "from rematbench.cli.app import main; main()", *words]
    ended = run_limited(command, request.output / f"{part}.log", limit)
    status, reason = "ok", ""
    if ended.code is None:
        status, reason = "timeout", f"not done within {limit:.0f} s"
    elif ended.code:
        status, reason = "failed", f"exit code {ended.code}: {last_words(ended.stderr)}"
    seconds = round(ended.seconds, 1)
    return Ran(part=part, status=status, reason=reason, seconds=seconds, only=request.only)


def summarize(ended: tuple[Ran, ...], request: GpuRequest, device: str) -> Summary:
    """Write the summary of ended parts, with their missing records, to SUMMARY and return it."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    done = {ran.part: replace(request, only=ran.only) for ran in ended}
    names = [name for part in RECORDS if part in done for name in done[part].names(part)]
    found = Summary(
        written=now, device=device, parts=ended, findings=findings(request.output, names)
    )
    data = msgspec.json.format(msgspec.json.encode(found), indent=1)
    write_atomically(request.output / SUMMARY, data + b"\n")
    return found


# -- parts, inside their processes --------------------------------------------------------------


def _lossless(request: GpuRequest) -> None:
    """Compare every method's gradients with keep_all's. All problems run at the same time, each in
    one launch, because nothing is timed here."""
    every = request.cells("lossless")
    same = [
        [cell for cell in every if problem_of(cell.name) == problem]
        for problem in dict.fromkeys(problem_of(cell.name) for cell in every)
    ]
    with ThreadPoolExecutor(len(same)) as pool:
        how = How(device=request.device, steps=2, linear=True)
        list(pool.map(lambda cells: _execute(cells, request, 100.0, how), same))


def _large(request: GpuRequest) -> None:
    """Measure bytes and seconds of every method, with one launch per method."""
    how = How(
        device=request.device,
        steps=1,
        compare=False,
        norms=False,
        timed_steps=5,
        device_weights=True,
    )
    for cell in request.cells("large"):
        _execute([cell], request, 90.0, how)


def _execute(batch: list[Cell], request: GpuRequest, limit_s: float, how: How) -> None:
    for cell, record in run_cells(batch, limit_s, how):
        keep_record(record, request.output / "records", cell.name)


def _baselines(request: GpuRequest) -> None:
    problem = replace(request, only=()).cells("large")[0].problem
    for package_name, settings in BASELINES:
        name = "-".join((package_name, *(settings.values() or ("none",))))
        if request.only and not name.startswith(request.only):
            continue
        method, limits = policy(package_name, settings), {"steps": 2, "timeout_s": 60.0}
        record = package.run(problem, method, "executed", device=request.device, **limits)
        keep_record(record, request.output / "baselines", name)


def _layers(request: GpuRequest) -> None:
    suite, limit_s = load_layers(request.file("layers")), request.limit_s("layers") - ENDS_S
    measure_layers(suite, request.only, request.output, request.device, limit_s)


def _searched(request: GpuRequest) -> None:
    limit_s = request.limit_s("searched") - ENDS_S
    measure_searched(request.only, request.output, request.device, limit_s)


PARTS: dict[str, Callable[[GpuRequest], None]] = {
    "lossless": _lossless,
    "large": _large,
    "baselines": _baselines,
    "layers": _layers,
    "searched": _searched,
}
