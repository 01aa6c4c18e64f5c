"""Speeds of kernels by name, from config/kernels/ (kernel_seconds.py computes seconds from them).

A GPU generation's file has the rates of attention by backend, GEMM, HBM, copies and collectives,
and the SMs and HBM rate that a collective takes from concurrent compute.  `operators.yaml` has the
bytes per element of memory-bound operators by implementation, for all generations.
Units: FLOP, bytes, seconds; shares are of the dense 16-bit peak, of the HBM rate or of a link's
rate.
"""

from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.host.errors import UserError

Quantity: TypeAlias = "float | NDArray[np.float64]"

OPERATORS = "operators"
SOURCES = "sources"
"""The file that declares the rows of the fits, exclusions and reasons; it has no rates."""
REFERENCE_HEAD_DIM = 128


class RateError(UserError):
    """One line: config/kernels has no rate for a generation, backend or operator."""


class Outlier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that deviate by more than 10 % from the curve, and why.  `lines`: of
    results/published/kernels.csv; `worst`: the largest measured over predicted speed, minus 1."""

    reason: str
    worst: float
    lines: tuple[int, ...]


class Evidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The evidence for an entry's numbers.  The `fitted` fields were fitted to `rows` rows of
    `sources` documents; the other fields come from `source`."""

    fitted: tuple[str, ...] = ()
    rows: int = 0
    sources: int = 0
    source: str = ""
    outliers: tuple[Outlier, ...] = ()


class AttentionPass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a fused kernel: share of the peak, and the numbers of rows and of waves of
    tiles that reach half of this share."""

    efficiency: float
    half_rows: float
    half_waves: float


class AttentionRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of one backend on one generation; `head_dims`: speed factor by head dimension."""

    forward: AttentionPass
    backward: AttentionPass
    head_dims: dict[int, float]
    evidence: Evidence


class GemmRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of GEMMs: share of the peak, reduction depth at half that share, the part of a last
    wave's idle SMs that is lost, and the factor on GEMMs that add into an fp32 gradient."""

    efficiency: float
    half_k: float
    tail: float
    accumulate: float
    tile_rows: float
    tile_columns: float
    evidence: Evidence


class Share(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One share of a rate, a factor, or a count of SMs, depending on the entry's key."""

    value: float
    evidence: Evidence


class ByteRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of a memory-bound operator, forward and backward: bytes per element (moved at the
    reached HBM rate), fixed seconds, and kernels launched."""

    forward_bytes: float
    forward_fixed_s: float
    backward_bytes: float
    backward_fixed_s: float
    forward_launches: int
    backward_launches: int
    evidence: Evidence


class UnfusedAttention(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unfused attention of torch operators: passes over the score matrix in memory, forward and
    backward together, and the further passes if a separate kernel applies the causal mask."""

    passes: float
    mask_passes: float
    evidence: Evidence


class GenerationRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config/kernels/GENERATION.yaml.  `half_waves`: by direction, for every backend; `refused`:
    backends that the generation cannot run, `unrated`: those that it runs but that have no
    published rate, each with the reason."""

    sm_count: int
    source: str
    half_waves: dict[str, Share]
    attention: dict[str, AttentionRates]
    refused: dict[str, str]
    unrated: dict[str, str] = {}
    gemm: GemmRates
    hbm: Share
    copies: dict[str, Share]
    collectives: dict[str, Share]
    overlap: dict[str, Share]


class OperatorRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config/kernels/operators.yaml: the rates of each operator's implementations by name."""

    unfused_attention: UnfusedAttention
    norm: dict[str, ByteRates]
    rope: dict[str, ByteRates]
    activation: dict[str, ByteRates]
    loss: dict[str, ByteRates]


class Device(Struct, frozen=True, kw_only=True):
    """The rates of one GPU for kernels: dense peak of all SMs, reached HBM rate, and `taken_sms`,
    the SMs that a concurrent collective occupies (one SM for each block of the collective).
    `balance`: FLOP per HBM byte divided by the value of the nearest measured GPU."""

    peak_flop_per_s: Quantity
    hbm_bytes_per_s: Quantity
    sm_count: Quantity
    taken_sms: Quantity = 0.0
    balance: Quantity = 1.0

    @property
    def free_sms(self) -> Quantity:
        """SMs that no collective occupies."""
        return self.sm_count - self.taken_sms

    @property
    def free_flop_per_s(self) -> Quantity:
        """Dense peak of the SMs that no collective occupies."""
        return self.peak_flop_per_s * self.free_sms / self.sm_count


class KernelRates(Struct, frozen=True, kw_only=True):
    """All rates of config/kernels."""

    generations: dict[str, GenerationRates]
    operators: OperatorRates

    def generation(self, name: str) -> GenerationRates:
        """Rates of a generation; RateError for an unknown generation."""
        if name not in self.generations:
            known = ", ".join(sorted(self.generations))
            raise RateError(f"no kernel rates for GPU generation {name!r} (known: {known})")
        return self.generations[name]

    def byte_rates(self, operator: str, implementation: str) -> ByteRates:
        table: dict[str, ByteRates] = getattr(self.operators, operator)
        return table[implementation]

    def attention(self, generation: str, backend: str) -> AttentionRates:
        """Rates of a fused backend; RateError names the generation's backends."""
        rates = self.generation(generation)
        if why := self.refusal(generation, backend) or self.lacks(generation, backend):
            raise RateError(why)
        return rates.attention[backend]

    def refusal(self, generation: str, backend: str) -> str:
        """The reason why a generation cannot run a fused backend; empty if it can, or if the
        generation has no rates."""
        if generation not in self.generations:
            return ""
        return self._worded(generation, backend, self.generations[generation].refused)

    def lacks(self, generation: str, backend: str) -> str:
        """The reason why a fused backend has no rate on a generation; empty if it has."""
        rates = self.generation(generation)
        if backend in rates.attention:
            return ""
        told = self._worded(generation, backend, rates.unrated)
        known = ", ".join(["unfused", *rates.attention])
        return told or f"no attention {backend!r} on {generation} (known: {known})"

    def _worded(self, generation: str, backend: str, reasons: dict[str, str]) -> str:
        if backend not in reasons:
            return ""
        known = ", ".join(["unfused", *self.generations[generation].attention])
        return f"attention {backend!r} on {generation}: {reasons[backend]} (known: {known})"


def load_kernel_rates(folder: Path) -> KernelRates:
    """The rates of config/kernels; an unknown or missing key is a msgspec.ValidationError."""
    files = {path.stem: path for path in sorted(folder.glob("*.yaml")) if path.stem != SOURCES}
    operators = msgspec.yaml.decode(files.pop(OPERATORS).read_bytes(), type=OperatorRates)
    generations = {
        name: msgspec.yaml.decode(path.read_bytes(), type=GenerationRates)
        for name, path in files.items()
    }
    return KernelRates(generations=generations, operators=operators)


def evidence_of(rates: KernelRates) -> dict[str, Evidence]:
    """The evidence of every rate, by `file.key.key`."""
    found: dict[str, Evidence] = {}
    for name, part in (*rates.generations.items(), (OPERATORS, rates.operators)):
        found.update(_evidence(part, name))
    return found


def _evidence(part: object, path: str) -> dict[str, Evidence]:
    items: dict[str, object] = {}
    if isinstance(part, dict):
        items = {str(key): value for key, value in part.items()}
    elif isinstance(part, Struct):
        items = {name: getattr(part, name) for name in part.__struct_fields__}
    found: dict[str, Evidence] = {}
    for key, value in items.items():
        if isinstance(value, Evidence):
            found[path] = value
        else:
            found.update(_evidence(value, f"{path}.{key}"))
    return found


def fitted_parameters(rates: KernelRates) -> dict[str, int]:
    """Numbers of parameters fitted to kernel rows (never to whole steps), by file."""
    counts = dict.fromkeys((*rates.generations, OPERATORS), 0)
    for path, evidence in evidence_of(rates).items():
        counts[path.partition(".")[0]] += len(evidence.fitted)
    return counts
