"""What one GPU shows, put together from the files of a `measure-gpu` run: one line per claim.

A part that crashed or ran out of time has left what it had finished; the rest is said to be
missing, never taken for right.
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rematbench.baselines.agreement import disagreements
from rematbench.record import Record, read_record

STEP_LIMIT = 1.02
"""The executor's step over the hand-written one's (the project's own bound)."""
PEAK_LIMIT = 0.02
"""Of the simulated activations, which the allocator's peak may differ by (the project's own
bound); of the whole, states included, it would let one method pass for another."""
WORKSPACES = 2 * (32 << 20)
"""What the allocator's peak has beside the simulation's: a workspace of cuBLAS's and one of
cuBLASLt's, 32 MiB each on Hopper (torch's CUDABlas.cpp), for the one stream that multiplies."""


class Finding(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One claim: whether it holds here (None: not known), and the numbers."""

    claim: str
    holds: bool | None
    text: str


class Ran(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a part of the run ended."""

    part: str
    status: str
    seconds: float
    reason: str = ""


class Summary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole run."""

    written: str
    device: str
    parts: tuple[Ran, ...]
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """Whether every part ended well and every claim holds."""
        ended = all(part.status == "ok" for part in self.parts)
        return ended and all(finding.holds for finding in self.findings)


def findings(folder: Path) -> tuple[Finding, ...]:
    """Every claim, from what is in a run's folder."""
    records = [(path.stem, read_record(path)) for path in sorted((folder / "records").glob("*"))]
    found = [*_lossless(records), *_bytes(records), *_peaks(records)]
    found += [_steps(folder / "steps.json"), _copies(folder / "copies.json")]
    return (*found, *_engines(folder / "agreement"), *_packages(folder / "baselines"))


def _engines(folder: Path) -> Iterator[Finding]:
    """Three engines on the same weights and batches, where that was asked for."""
    records = {path.stem: read_record(path) for path in sorted(folder.glob("*.json"))}
    if records:
        wrong = [f"{name} {why}" for name, why in disagreements(records).items()]
        yield Finding(
            claim="losses and gradient norms of the packages are the executor's",
            holds=not wrong,
            text="; ".join(wrong) or f"{len(records)} runs",
        )


def _packages(folder: Path) -> Iterator[Finding]:
    """Seconds and bytes of the packages, where that was asked for: nothing to hold but that they
    ran.  Kernels differ, so nothing is ranked."""
    words, held = [], []
    for path in sorted(folder.glob("*.json")):
        record = read_record(path)
        held.append(record.status == "ok")
        seen = record.observed
        if seen is None or not seen.step_s:
            words.append(f"{path.stem} {record.status} {record.reason}".rstrip())
            continue
        step_s = statistics.median(seen.slowest_s)
        words.append(
            f"{path.stem} {step_s:.4g} s, allocated {max(seen.allocated_bytes) / 2**30:.3f} GiB"
        )
    if words:
        yield Finding(claim="the packages run", holds=all(held), text="; ".join(words))


def _ran(records: Sequence[tuple[str, Record]]) -> list[tuple[str, Record]]:
    return [(name, record) for name, record in records if record.status != "unsupported"]


def _lossless(records: Sequence[tuple[str, Record]]) -> Iterator[Finding]:
    """Every method against keep_all, by precision."""
    compared = [(n, r) for n, r in _ran(records) if n.startswith("lossless")]
    for problem in sorted({name.split(".")[0] for name, _ in compared}) or ["lossless"]:
        words, held = [], []
        for name, record in compared:
            if name.split(".")[0] != problem:
                continue
            other = record.measured.comparison if record.measured else None
            held.append(other is not None and other.lossless)
            word = record.status if other is None else _verdict(other)
            words.append(f"{name.split('.', 1)[1]} {word}")
        yield Finding(
            claim=f"gradients are keep_all's ({problem})",
            holds=all(held) if held else None,
            text="; ".join(words) or "no record",
        )


def _verdict(other: Any) -> str:
    return "bitwise" if other.bitwise else f"{other.gradient_error:.1e}"


def _bytes(records: Sequence[tuple[str, Record]]) -> Iterator[Finding]:
    """The twin law: live bytes on the device and lent host bytes, after every action."""
    seen = [(n, r.measured) for n, r in _ran(records) if r.measured is not None]
    wrong = [n for n, measured in seen if measured.differing_actions]
    actions = sum(rank.actions for _, measured in seen for rank in measured.ranks)
    yield Finding(
        claim="live bytes equal the ledger after every action",
        holds=not wrong if seen else None,
        text=f"{actions} actions, differing: {', '.join(wrong) or 'none'}",
    )


def _peaks(records: Sequence[tuple[str, Record]]) -> Iterator[Finding]:
    words, held = [], []
    for name, record in _ran(records):
        if not name.startswith("large") or record.measured is None:
            continue
        rank = record.measured.fullest
        if not rank.allocated_bytes:
            continue
        extra = rank.allocated_bytes - rank.simulated_peak_bytes
        margin = PEAK_LIMIT * (rank.simulated_peak_bytes - rank.simulated_state_bytes)
        held.append(-margin <= extra <= WORKSPACES + margin)
        words.append(
            f"{name.split('.', 1)[1]} allocated {rank.allocated_bytes / 2**30:.3f}, simulated "
            f"{rank.simulated_peak_bytes / 2**30:.3f}, reserved {rank.reserved_bytes / 2**30:.3f}, "
            f"pinned {rank.pinned_bytes / 2**30:.3f} GiB"
        )
    yield Finding(
        claim="the allocator's peak is the simulated one's",
        holds=all(held) if held else None,
        text="; ".join(words) or "no record with an allocator's numbers",
    )


def _steps(path: Path) -> Finding:
    claim = f"a step takes at most {100 * (STEP_LIMIT - 1):.0f} % more than one written by hand"
    if not path.is_file():
        return Finding(claim=claim, holds=None, text="not measured")
    found = msgspec.json.decode(path.read_bytes())
    texts = f"{found['ratio']:.4f} of it"
    return Finding(claim=claim, holds=found["ratio"] <= STEP_LIMIT, text=texts)


def _copies(path: Path) -> Finding:
    claim = "copies run beside matrix products"
    if not path.is_file():
        return Finding(claim=claim, holds=None, text="not measured")
    found = msgspec.json.decode(path.read_bytes())
    nbytes = found["nbytes"]
    serial = found["compute_s"] + max(found["d2h_s"], found["h2d_s"])
    text = (
        f"to the host {nbytes / found['d2h_s'] / 1e9:.1f} GB/s, back "
        f"{nbytes / found['h2d_s'] / 1e9:.1f} GB/s; all at once {found['slowdown']:.3f} of the "
        "longest alone"
    )
    return Finding(claim=claim, holds=found["together_s"] < 0.75 * serial, text=text)
