"""The GPU checks: a finding for each claim, from the files of a `measure-gpu` run.

A part that crashed or ran out of time leaves the records that it finished. A missing record leaves
its claim undecided; a failed or unreadable record makes its claim false.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from rematbench.worlds.records.measured import Comparison
from rematbench.worlds.records.record import Record, RecordError, read_record

PEAK_LIMIT = 0.02
"""The share of the simulated activations by which the allocator's peak may differ from the
simulated peak (the project's bound). A share of the whole peak, with states, could hide the
difference between two methods."""
WORKSPACES = 2 * (32 << 20)
"""Bytes of the allocator's peak that are not simulated: a workspace of cuBLAS and one of cuBLASLt,
32 MiB each on Hopper (torch's CUDABlas.cpp), for the only stream that runs GEMMs."""


SUMMARY = "summary.json"
PACKAGES_RUN = "the packages run"


class Finding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A claim, whether it holds on this device (None: unknown), and its numbers in words."""

    claim: str
    holds: bool | None
    text: str


class Ran(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a part of a `measure-gpu` run ended; `only`: the cells that were selected."""

    part: str
    status: str
    seconds: float
    reason: str = ""
    only: tuple[str, ...] = ()


class Summary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The summary of a `measure-gpu` run: its date and time, device, parts and findings."""

    written: str
    device: str
    parts: tuple[Ran, ...]
    findings: tuple[Finding, ...]

    @property
    def ended(self) -> bool:
        return all(part.status == "ok" for part in self.parts)

    @property
    def sound(self) -> bool:
        return self.ended and all(finding.holds for finding in self.findings)


def read_summary(path: Path) -> Summary:
    """Read a summary file; RecordError of one line for any other file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except msgspec.DecodeError as error:
        raise RecordError(f"{path}: {error}") from error


class Cells(NamedTuple):
    """The cells of a run: the records by cell name, the error of each unreadable file by cell name,
    and the names of planned cells without a file."""

    records: dict[str, Record]
    unreadable: dict[str, str]
    missing: tuple[str, ...]

    def of(self, problem: str) -> "Cells":
        return Cells(
            {name: record for name, record in self.records.items() if name.startswith(problem)},
            {name: why for name, why in self.unreadable.items() if name.startswith(problem)},
            tuple(name for name in self.missing if name.startswith(problem)),
        )

    def lost(self) -> Iterator[tuple[str, bool | None, str]]:
        """Yield (cell name, False or None, reason) for every cell without numbers: False for a
        failed or unreadable record, None for a missing one. Cells that their method refuses are
        left out."""
        for name, record in self.records.items():
            if record.status not in ("ok", "unsupported"):
                yield name, False, f"{record.status} {record.reason}".rstrip()
        for name, why in self.unreadable.items():
            yield name, False, why
        for name in self.missing:
            yield name, None, "missing"

    def ok(self) -> dict[str, Record]:
        """The records with status `ok`, by cell name."""
        return {name: record for name, record in self.records.items() if record.status == "ok"}


def read_cells(folder: Path, planned: Iterable[str] = ()) -> Cells:
    """The cells of a folder of records; `planned`: names of cells that should have a record."""
    records: dict[str, Record] = {}
    unreadable: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            records[path.stem] = read_record(path)
        except RecordError as error:
            unreadable[path.stem] = str(error).removeprefix(f"{path}: ")
    there = {*records, *unreadable}
    return Cells(records, unreadable, tuple(name for name in planned if name not in there))


def findings(folder: Path, planned: Iterable[str] = ()) -> tuple[Finding, ...]:
    """Return the finding of every claim, from the folder of a run; `planned`: names of cells that
    should have a record."""
    cells = read_cells(folder / "records", planned)
    found = [*_lossless(cells.of("lossless")), _bytes(cells), _peaks(cells.of("large"))]
    return (*found, *_packages(folder / "baselines"))


def _finding(claim: str, said: Sequence[tuple[str, bool | None, str]], nothing: str) -> Finding:
    """The finding of a claim about several (name, whether it holds, text): False if one is false;
    otherwise None if one is unknown or there are none. `nothing`: the text if there are none."""
    held = {holds for _, holds, _ in said}
    holds = False if False in held else None if None in held or not held else True
    text = "; ".join(f"{name} {text}".strip() for name, _, text in said)
    return Finding(claim=claim, holds=holds, text=text or nothing)


def _packages(folder: Path) -> Iterator[Finding]:
    """Yield the finding that the packages ran, with the seconds and bytes of each; none if they did
    not run. Their kernels differ, so seconds are not compared."""
    cells = read_cells(folder)
    said: list[tuple[str, bool | None, str]] = []
    for name, record in cells.records.items():
        seen, ok = record.measured, record.status == "ok"
        if seen is None or not seen.step_s:
            said.append((name, ok, f"{record.status} {record.reason}".rstrip()))
            continue
        step_s, peak = statistics.median(seen.step_s), max(r.allocated_bytes for r in seen.ranks)
        said.append((name, ok, f"{step_s:.4g} s, allocated {peak / 2**30:.3f} GiB"))
    said += [(name, False, why) for name, why in cells.unreadable.items()]
    if said:
        yield _finding(PACKAGES_RUN, said, "")


def _lossless(cells: Cells) -> Iterator[Finding]:
    """Yield a finding per `lossless` problem: whether every method's gradients are keep_all's."""
    names = {name.split(".")[0] for name in (*cells.records, *cells.unreadable, *cells.missing)}
    for problem in sorted(names) or ["lossless"]:
        same = cells.of(f"{problem}.")
        said = list(same.lost())
        for name, record in same.ok().items():
            other = record.measured.comparison if record.measured else None
            if other is None:
                said.append((name, False, "ok, but not compared with another run"))
            else:
                said.append((name, other.lossless, _verdict(other)))
        yield _finding(f"gradients are keep_all's ({problem})", _short(said), "no record")


def _short(
    said: Iterable[tuple[str, bool | None, str]],
) -> list[tuple[str, bool | None, str]]:
    """The entries sorted by cell name, each without the name of its problem."""
    return [(name.split(".", 1)[-1], holds, text) for name, holds, text in sorted(said)]


def _verdict(comparison: Comparison) -> str:
    """The gradient error by which a run is judged, its bound, and the steps that count."""
    if comparison.bitwise:
        return "bitwise"
    steps = "the first step" if comparison.judged_first else "all steps"
    return f"{comparison.judged_error:.1e} of {comparison.bound:.0e} ({steps})"


def _bytes(cells: Cells) -> Finding:
    """Check that live device bytes and lent host bytes equal the ledger's after every action."""
    seen = {n: r.measured for n, r in cells.ok().items() if r.measured is not None}
    wrong = [name for name, measured in seen.items() if measured.differing_actions]
    actions = sum(rank.actions for measured in seen.values() for rank in measured.ranks)
    said = list(cells.lost())
    if seen:
        text = f"{actions} actions, differing: {', '.join(wrong) or 'none'}"
        said.insert(0, ("", not wrong, text))
    return _finding("live bytes equal the ledger after every action", said, "no record")


def _peaks(cells: Cells) -> Finding:
    said = list(cells.lost())
    for name, record in cells.ok().items():
        rank = record.measured.fullest if record.measured else None
        if rank is None or not rank.allocated_bytes:
            said.append((name, None, "the allocator reports no numbers"))
            continue
        extra = rank.allocated_bytes - rank.simulated_peak_bytes
        margin = PEAK_LIMIT * (rank.simulated_peak_bytes - rank.simulated_state_bytes)
        numbers = (
            f"allocated {rank.allocated_bytes / 2**30:.3f}, simulated "
            f"{rank.simulated_peak_bytes / 2**30:.3f}, reserved {rank.reserved_bytes / 2**30:.3f}, "
            f"pinned {rank.pinned_bytes / 2**30:.3f} GiB"
        )
        said.append((name, -margin <= extra <= WORKSPACES + margin, numbers))
    return _finding("the allocator's peak is the simulated one's", _short(said), "no record")
