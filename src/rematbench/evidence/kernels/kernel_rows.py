"""results/published/kernels.csv: published speeds of kernels, copies and collectives, in SI units.

One row is one figure of one document.  `read_kernel_rows` types every row.  `measured` converts a
row to FLOP/s, bytes/s, seconds or a share, and removes the convention of the row's source.  `Match`
selects rows by the conditions of the measurement.

config/kernels/sources.yaml (`Sources`) names the rows behind every rate, and the excluded rows.
Every row is used by a rate or excluded by name, and a row more than 10 % off its curve needs a
reason in sources.yaml; otherwise the fit fails (`unclaimed`, `outliers`).
"""

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.inputs.configfile import convert
from rematbench.inputs.kernel_rates import Evidence, Outlier

KernelKind = Literal[
    "gemm",
    "attention_forward",
    "attention_backward",
    "attention_fwd_bwd",
    "norm",
    "rope",
    "swiglu",
    "cross_entropy",
    "adam",
    "elementwise",
    "memcpy_h2d",
    "memcpy_d2h",
    "memcpy_bidirectional",
    "collective",
    "overlap",
]
Unit = Literal["TFLOP/s", "GB/s", "ms", "us", "%", "% of peak"]
Quantity = Literal["flop_per_s", "bytes_per_s", "seconds", "share"]

PASSES: dict[str, float] = {
    "attention_forward": 1.0,
    "attention_backward": 2.5,
    "attention_fwd_bwd": 3.5,
}
"""FLOPs of the passes over the FLOPs of the forward: the backward has five GEMMs, the forward two
(Dao 2023, arXiv 2307.08691)."""

UNITS: dict[str, tuple[Quantity, float]] = {
    "TFLOP/s": ("flop_per_s", 1e12),
    "GB/s": ("bytes_per_s", 1e9),
    "ms": ("seconds", 1e-3),
    "us": ("seconds", 1e-6),
    "%": ("share", 1e-2),
    "% of peak": ("share", 1e-2),
}


class KernelError(ValueError):
    """A row cannot be read, is used by no rate, or is off its curve without a reason; the message
    is one line."""


class KernelRow(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published figure; `line` is its line in the file, `shape` its `key=value` pairs."""

    line: int
    source: str
    what: KernelKind
    implementation: str
    gpu: str
    dtype: str
    shape: dict[str, str]
    value: float
    unit: Unit
    convention: str
    note: str

    def size(self, key: str) -> int:
        """A whole number of the shape; KernelError if the key is missing or its value is not a
        whole number."""
        try:
            return int(self.shape[key])
        except (KeyError, ValueError):
            raise KernelError(
                f"kernels.csv line {self.line}: {key!r} in shape is missing or not a whole number"
            ) from None

    @property
    def causal(self) -> bool:
        return self.shape.get("causal") == "1"


class Figure(Struct, frozen=True, kw_only=True):
    """A figure in base units: FLOP/s, bytes/s, seconds, or a share (a fraction)."""

    quantity: Quantity
    value: float


def read_kernel_rows(path: Path) -> tuple[KernelRow, ...]:
    """Every row of the file; KernelError for the first row that cannot be read."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != (columns := KernelRow.__struct_fields__[1:]):
            raise KernelError(f"{path.name}: columns must be {', '.join(columns)}")
        return tuple(_row(cells, reader.line_num, path.name) for cells in reader)


def _row(cells: dict[str, str], line: int, label: str) -> KernelRow:
    try:
        typed = {"line": line, "shape": parse_shape(cells["shape"]), "value": float(cells["value"])}
        return convert({**cells, **typed}, KernelRow, "")
    except ValueError as error:
        raise KernelError(f"{label} line {line}: {error}") from None


def parse_shape(text: str) -> dict[str, str]:
    """`b=4;h=16;s=4096` as a mapping; ValueError if a part is not a pair or a key repeats."""
    shape: dict[str, str] = {}
    for part in filter(None, text.split(";")):
        key, found, value = part.partition("=")
        if not (key and found and value) or key in shape:
            raise ValueError(f"shape {text!r} is not key=value;key=value with each key once")
        shape[key] = value
    return shape


def attention_flop(row: KernelRow) -> float:
    """FLOPs of an attention row: 2 (d_qk + d_v) b h pairs x passes; causal masks halve the pairs.

    Source: Dao 2023 (arXiv 2307.08691), section 4.1; `d=192/128` names d_qk and d_v.
    """
    dims = [int(part) for part in row.shape["d"].split("/")]
    pairs = row.size("s") ** 2 * (0.5 if row.causal else 1.0)
    width = 2.0 * (dims[0] + dims[-1])
    return width * row.size("b") * row.size("h") * pairs * PASSES[row.what]


def gemm_flop(row: KernelRow) -> float:
    """FLOPs of a GEMM row: 2 m n k, or the sum over a layer's four linears (qkv with 3 h columns,
    out with h, up and down with ffn) if the shape has `gemms`."""
    if "gemms" in row.shape:
        m, h, ffn = (row.size(key) for key in ("m", "h", "ffn"))
        return 2.0 * m * h * (4 * h + 2 * ffn)
    return 2.0 * row.size("m") * row.size("n") * row.size("k")


def measured(row: KernelRow) -> Figure:
    """The row's figure in base units.  GEMM and attention seconds become FLOP/s, with causal pairs
    counted half.

    Two conventions of sources are removed: `all pairs counted` counts twice the work of a causal
    kernel, and `s(s+1)/2` counts the causal pairs exactly where other sources count s^2/2.
    """
    quantity, scale = UNITS[row.unit]
    value = row.value * scale
    if row.what not in PASSES and row.what != "gemm":
        return Figure(quantity=quantity, value=value)
    if quantity == "seconds":
        work = gemm_flop(row) if row.what == "gemm" else attention_flop(row)
        return Figure(quantity="flop_per_s", value=work / value)
    if row.causal and "all pairs counted" in row.convention:
        value /= 2.0
    if "s(s+1)/2" in row.convention:
        value *= row.size("s") / (row.size("s") + 1.0)
    return Figure(quantity=quantity, value=value)


class Match(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A condition on rows; a row matches if every non-empty field holds.

    `what`, `gpu`, `dtype`, `unit` and the values of `shape` must equal one of the listed words.
    `source`, `implementation` and `note` must contain one of the listed texts.
    `at_least` and `below` bound numbers of the shape, or `value` (in the published unit).
    """

    what: tuple[str, ...] = ()
    source: tuple[str, ...] = ()
    implementation: tuple[str, ...] = ()
    gpu: tuple[str, ...] = ()
    dtype: tuple[str, ...] = ()
    unit: tuple[str, ...] = ()
    note: tuple[str, ...] = ()
    shape: dict[str, tuple[str, ...]] = {}
    at_least: dict[str, float] = {}
    below: dict[str, float] = {}

    def holds(self, row: KernelRow) -> bool:
        words = ((self.what, row.what), (self.gpu, row.gpu), (self.dtype, row.dtype))
        parts = (
            (self.source, row.source),
            (self.implementation, row.implementation),
            (self.note, row.note),
        )
        return (
            all(not wanted or word in wanted for wanted, word in (*words, (self.unit, row.unit)))
            and all(not wanted or any(p in text for p in wanted) for wanted, text in parts)
            and all(row.shape.get(key, "") in wanted for key, wanted in self.shape.items())
            and all(_bound(row, key) >= low for key, low in self.at_least.items())
            and all(_bound(row, key) < high for key, high in self.below.items())
        )


def _bound(row: KernelRow, key: str) -> float:
    """The row's value, or a number of its shape; NaN, for which no bound holds, for other texts."""
    text = str(row.value) if key == "value" else row.shape.get(key, "")
    try:
        return float(text)
    except ValueError:
        return float("nan")


# -- sources --------------------------------------------------------------------------------------

Array: TypeAlias = NDArray[np.float64]
Rows: TypeAlias = Sequence[KernelRow]

Of = Literal["hbm", "nvlink", "nic", "pcie", "one", "against"]


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
    forward if only one direction is published."""

    match: Match
    like: str = ""


class ShareRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows of one share.  The share is the rows' median divided by the rate `of`, or by the
    median of the rows `against`; or it is a declared `value` with its `source`."""

    of: Of = "one"
    match: Match | None = None
    against: Match | None = None
    value: float | None = None
    source: str = ""


class GenerationRows(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rows behind the file of one GPU generation; `waves`: attention rows whose number of heads
    varies; `like`: an earlier generation whose half_rows and half_waves hold, in place of `waves`;
    `refused`, `unrated`: attention backends that it cannot run or that lack rates, and why."""

    sm_count: int
    source: str
    waves: Match | None = None
    like: str = ""
    attention: dict[str, AttentionRows]
    refused: dict[str, str]
    unrated: dict[str, str] = {}
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
    """The measured rows from which operators.yaml is made, by operator."""

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


TOLERANCE = 0.10
"""Largest relative deviation of a row from its curve without a reason."""


def outliers(
    sources: Sources, rows: Sequence[KernelRow], deviations: Mapping[int, float]
) -> tuple[Outlier, ...]:
    """The rows more than TOLERANCE off their curve, by reason.  KernelError if such a row has no
    reason.

    `deviations`: measured / predicted speed - 1, by line of the CSV.
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
        raise KernelError(f"kernels.csv: off their curve without a reason: {'; '.join(nameless)}")
    return tuple(
        Outlier(
            reason=reason,
            worst=round(deviations[max(lines, key=lambda line: abs(deviations[line]))], 3),
            lines=tuple(lines),
        )
        for reason, lines in by_reason.items()
    )


def evidence(
    sources: Sources,
    rows: Rows,
    speeds: Iterable[float],
    fitted: tuple[str, ...],
    source: str = "",
) -> Evidence:
    """The evidence of fitted numbers; `speeds`: measured / predicted speed of each row.
    KernelError if an outlier has no reason."""
    off = {row.line: float(speed) - 1.0 for row, speed in zip(rows, speeds, strict=True)}
    return Evidence(
        fitted=fitted,
        rows=len(rows),
        sources=len({row.source for row in rows}),
        source=source,
        outliers=outliers(sources, rows, off),
    )
