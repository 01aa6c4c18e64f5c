"""config/kernels/sources.yaml: the rows of kernels.csv behind every rate, the excluded rows,
and least squares and evidence for every fit.

Every row is used by a rate or excluded by name, and a row more than 10 % off its curve needs a
reason in sources.yaml; otherwise the fit fails (`unclaimed`, `outliers`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.evidence.kernels.kernel_rows import KernelRow, Match
from rematbench.spec.kernel_rates import Evidence, Outlier

Array: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = Sequence[KernelRow]

TOLERANCE = 0.10
"""Largest relative deviation of a row from its curve without a reason."""
AT_BOUND = 1e-4
"""The share of a parameter's start within which the parameter is at its bound."""

Of = Literal["hbm", "nvlink", "nic", "pcie", "one", "against"]


class KernelFitError(ValueError):
    """Rows that no rate uses, or that lie off their curve without a reason; one line."""


class GpuFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU of kernels.csv: the dense 16-bit peak, and the HBM and NVLink (one direction) rates."""

    generation: str
    peak_flop_per_s: float
    hbm_bytes_per_s: float
    nvlink_bytes_per_s: float = 0.0
    source: str


class Exclusion(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that no fit may use, and the reason."""

    name: str
    reason: str
    match: Match


class Reason(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The reason why the matching rows may lie more than 10 % off their curve."""

    reason: str
    match: Match


class AttentionRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one attention backend.  `like`: the backend that gives the ratio of backward to
    forward, where not both directions are published."""

    match: Match
    like: str = ""


class ShareRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of one share: the share is their median over the rate `of` (or over the median of
    the rows `against`).  Or a declared `value` with its `source`."""

    of: Of = "one"
    match: Match | None = None
    against: Match | None = None
    value: float | None = None
    source: str = ""


class GenerationRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows behind the file of one GPU generation; `waves`: attention rows whose number of heads
    varies; `refused`: attention backends without rates, with the reason."""

    sm_count: int
    source: str
    waves: Match
    attention: dict[str, AttentionRows]
    refused: dict[str, str]
    gemm: Match
    hbm: ShareRows
    copies: dict[str, ShareRows]
    collectives: dict[str, ShareRows]
    overlap: dict[str, ShareRows]


class ByteRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows of one implementation of a memory-bound operator, and its kernel launches per pass."""

    match: Match
    forward_launches: int
    backward_launches: int
    launches_source: str


class OperatorRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows behind operators.yaml."""

    unfused_attention: Match
    norm: dict[str, ByteRows]
    rope: dict[str, ByteRows]
    activation: dict[str, ByteRows]
    loss: dict[str, ByteRows]


class Sources(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of sources.yaml.  `links`: bytes/s by the link's name in `shape` (a whole node
    for NICs, one direction for PCIe)."""

    gpus: dict[str, GpuFacts]
    links: dict[str, float]
    links_source: str
    exclusions: tuple[Exclusion, ...]
    generations: dict[str, GenerationRows]
    operators: OperatorRows
    reasons: tuple[Reason, ...]

    def used(self, rows: Iterable[KernelRow]) -> tuple[KernelRow, ...]:
        """The rows that no exclusion matches."""
        return tuple(row for row in rows if self.exclusion(row) is None)

    def exclusion(self, row: KernelRow) -> Exclusion | None:
        """The first exclusion that matches a row, or None."""
        return next((e for e in self.exclusions if e.match.holds(row)), None)

    def of_generation(self, generation: str, row: KernelRow) -> bool:
        """Whether a row ran on a GPU of a generation."""
        facts = self.gpus.get(row.gpu)
        return facts is not None and facts.generation == generation


def load_sources(path: Path) -> Sources:
    """Read sources.yaml; an unknown key is a msgspec.ValidationError."""
    return msgspec.yaml.decode(path.read_bytes(), type=Sources)


def matches(part: object) -> Iterator[Match]:
    """Every Match inside a declaration."""
    if isinstance(part, Match):
        yield part
    elif isinstance(part, dict):
        for value in part.values():
            yield from matches(value)
    elif isinstance(part, Struct):
        for name in part.__struct_fields__:
            yield from matches(getattr(part, name))


def unclaimed(sources: Sources, rows: Iterable[KernelRow]) -> list[KernelRow]:
    """The rows that no exclusion matches and no rate uses."""
    anywhere = list(matches(sources.operators))
    found = []
    for row in sources.used(rows):
        own = [
            match
            for name, part in sources.generations.items()
            if sources.of_generation(name, row) or row.gpu not in sources.gpus
            for match in matches(part)
        ]
        if not any(match.holds(row) for match in (*anywhere, *own)):
            found.append(row)
    return found


def outliers(
    sources: Sources, rows: Sequence[KernelRow], deviations: Mapping[int, float]
) -> tuple[Outlier, ...]:
    """The rows more than TOLERANCE off their curve, by reason.  KernelFitError where such a row has
    no reason.

    `deviations`: measured over predicted speed, less 1, by line of the CSV.
    """
    by_reason: dict[str, list[int]] = {}
    nameless = []
    for row in rows:
        if abs(deviations[row.line]) <= TOLERANCE:
            continue
        reason = next((r.reason for r in sources.reasons if r.match.holds(row)), None)
        if reason is None:
            nameless.append(f"{row.line} ({row.implementation}, {deviations[row.line]:+.0%})")
        else:
            by_reason.setdefault(reason, []).append(row.line)
    if nameless:
        raise KernelFitError(
            f"kernels.csv: off their curve without a reason: {'; '.join(nameless)}"
        )
    return tuple(
        Outlier(
            reason=reason,
            worst=round(deviations[max(lines, key=lambda line: abs(deviations[line]))], 3),
            lines=tuple(lines),
        )
        for reason, lines in by_reason.items()
    )


def rounded(value: float, least: float = 1e-6) -> float:
    """A value rounded to four significant digits, as in the files; 0 where it is below `least`."""
    return float(f"{value:.4g}") if value >= least else 0.0


def solve(
    misses: Callable[[Array], Array],
    start: Sequence[float],
    bounds: tuple[Sequence[float], Sequence[float]],
    near: float | None = None,
) -> list[float]:
    """The parameters that minimise the squared `misses` within `bounds`, deterministically.
    `misses`: parameters -> residuals (rows,), differences of logarithms.  `near`: the residual at
    which a row's weight starts to fall (soft L1; None: plain least squares)."""
    from scipy.optimize import least_squares  # noqa: PLC0415 (slow, and only fitting needs it)

    best = least_squares(
        misses,
        start,
        bounds=bounds,
        x_scale=start,
        diff_step=np.full(len(start), 1e-4),
        loss="linear" if near is None else "soft_l1",
        f_scale=1.0 if near is None else near,
    )
    ends = np.where(best.x - bounds[0] < np.subtract(bounds[1], best.x), *bounds)
    at_end = np.abs(best.x - ends) < AT_BOUND * np.asarray(start)
    return [float(x) for x in np.where(at_end, ends, best.x)]


def document_weights(rows: Rows) -> Array:
    """Weights of residuals, shape (rows,), that give every document the same weight in a sum of
    squares."""
    documents = [row.source for row in rows]
    return np.array([documents.count(name) ** -0.5 for name in documents])


def evidence(
    sources: Sources,
    rows: Rows,
    speeds: Mapping[int, float],
    fitted: tuple[str, ...],
    source: str = "",
) -> Evidence:
    """The evidence of fitted numbers; `speeds`: measured over predicted speed by line of the CSV.
    KernelFitError where an outlier has no reason."""
    off = {line: float(speed) - 1.0 for line, speed in speeds.items()}
    return Evidence(
        fitted=fitted,
        rows=len(rows),
        sources=len({row.source for row in rows}),
        source=source,
        outliers=outliers(sources, rows, off),
    )
