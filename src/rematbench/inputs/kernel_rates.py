"""Rates of kernels, from config/kernels/ (costs/kernel_seconds.py computes seconds from them).

The file of a GPU generation has the rates of attention by backend, of GEMMs, HBM, copies and
collectives, and the SMs and HBM rate that a collective takes from concurrent compute.
`operators.yaml` has the bytes per element of memory-bound operators by implementation, for all
generations.  Units: FLOP, bytes, seconds; shares refer to the dense 16-bit peak, the HBM rate or
the rate of a link.
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
"""The file that declares which rows the fits use or exclude, and why; it has no rates."""
REFERENCE_HEAD_DIM = 128


class RateError(UserError):
    """A GPU generation, backend or operator has no rate; the message is one line."""


class Outlier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that deviate from the fitted curve by more than 10 %, with the reason.  `lines`: line
    numbers in results/published/kernels.csv; `worst`: the largest deviation, measured over
    predicted speed minus 1."""

    reason: str
    worst: float
    lines: tuple[int, ...]


class Evidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The evidence for the numbers of an entry.  The `fitted` fields were fitted to `rows` rows
    from `sources` documents; the other fields come from `source`."""

    fitted: tuple[str, ...] = ()
    rows: int = 0
    sources: int = 0
    source: str = ""
    outliers: tuple[Outlier, ...] = ()


class AttentionPass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of a fused attention kernel in one direction: its share of the peak, and the numbers of
    rows and of waves of tiles at which it reaches half of that share."""

    efficiency: float
    half_rows: float
    half_waves: float


class AttentionRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of one attention backend on one generation; `head_dims`: speed factor by head
    dimension."""

    forward: AttentionPass
    backward: AttentionPass
    head_dims: dict[int, float]
    evidence: Evidence


class GemmRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of GEMMs: share of the peak, reduction depth that reaches half of it, the part of the
    last wave's idle SMs that is lost, and the speed factor of GEMMs that accumulate in fp32."""

    efficiency: float
    half_k: float
    tail: float
    accumulate: float
    tile_rows: float
    tile_columns: float
    evidence: Evidence


class Share(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A single number with its evidence: a share of a rate, a factor, or a count of SMs."""

    value: float
    evidence: Evidence


class ByteRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of a memory-bound operator in each direction: bytes moved per element, fixed seconds,
    and kernels launched."""

    forward_bytes: float
    forward_fixed_s: float
    backward_bytes: float
    backward_fixed_s: float
    forward_launches: int
    backward_launches: int
    evidence: Evidence


class UnfusedAttention(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rates of unfused attention: passes over the score matrix in memory, forward and backward
    together, and further passes if a separate kernel applies the causal mask."""

    passes: float
    mask_passes: float
    evidence: Evidence


class GenerationRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of config/kernels/GENERATION.yaml.  `half_waves`: by direction, the same for
    every backend; `refused`: backends that the generation cannot run, with the reason; `unrated`:
    backends that it runs but that have no published rate, with the reason."""

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
    """The contents of config/kernels/operators.yaml: rates of operators by implementation."""

    unfused_attention: UnfusedAttention
    norm: dict[str, ByteRates]
    rope: dict[str, ByteRates]
    activation: dict[str, ByteRates]
    loss: dict[str, ByteRates]


class Device(Struct, frozen=True, kw_only=True):
    """One GPU as kernels see it: dense peak of all SMs, reached HBM rate, and `taken_sms`, the SMs
    that a concurrent collective occupies (one per block of the collective).  `balance`: FLOP per
    HBM byte, relative to the nearest measured GPU."""

    peak_flop_per_s: Quantity
    hbm_bytes_per_s: Quantity
    sm_count: Quantity
    taken_sms: Quantity = 0.0
    balance: Quantity = 1.0

    @property
    def free_sms(self) -> Quantity:
        """The number of SMs that no collective occupies."""
        return self.sm_count - self.taken_sms

    @property
    def free_flop_per_s(self) -> Quantity:
        """The dense peak of the SMs that no collective occupies."""
        return self.peak_flop_per_s * self.free_sms / self.sm_count


class KernelRates(Struct, frozen=True, kw_only=True):
    """All rates in config/kernels."""

    generations: dict[str, GenerationRates]
    operators: OperatorRates

    def generation(self, name: str) -> GenerationRates:
        """The rates of a generation; RateError for an unknown generation."""
        if name not in self.generations:
            known = ", ".join(sorted(self.generations))
            raise RateError(f"no kernel rates for GPU generation {name!r} (known: {known})")
        return self.generations[name]

    def byte_rates(self, operator: str, implementation: str) -> ByteRates:
        table: dict[str, ByteRates] = getattr(self.operators, operator)
        return table[implementation]

    def attention(self, generation: str, backend: str) -> AttentionRates:
        """The rates of a fused attention backend; RateError, with the known backends, if it has
        none."""
        rates = self.generation(generation)
        if why := self.refusal(generation, backend) or self.lacks(generation, backend):
            raise RateError(why)
        return rates.attention[backend]

    def refusal(self, generation: str, backend: str) -> str:
        """Why a generation cannot run a fused backend; empty if it can or has no rates at all."""
        if generation not in self.generations:
            return ""
        return self._worded(generation, backend, self.generations[generation].refused)

    def lacks(self, generation: str, backend: str) -> str:
        """Why a fused backend has no rate on a generation; empty if it has one."""
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
    """The rates in config/kernels; msgspec.ValidationError for an unknown or missing key."""
    files = {path.stem: path for path in sorted(folder.glob("*.yaml")) if path.stem != SOURCES}
    operators = msgspec.yaml.decode(files.pop(OPERATORS).read_bytes(), type=OperatorRates)
    generations = {
        name: msgspec.yaml.decode(path.read_bytes(), type=GenerationRates)
        for name, path in files.items()
    }
    return KernelRates(generations=generations, operators=operators)


def fitted_parameters(rates: KernelRates) -> dict[str, int]:
    """The number of parameters fitted to kernel rows (never to whole steps), by file."""
    parts = {**rates.generations, OPERATORS: rates.operators}
    return {name: _fitted(part) for name, part in parts.items()}


def _fitted(part: object) -> int:
    """The number of fitted fields in a part and in everything inside it."""
    if isinstance(part, Evidence):
        return len(part.fitted)
    if isinstance(part, Struct):
        part = {name: getattr(part, name) for name in part.__struct_fields__}
    return sum(map(_fitted, part.values())) if isinstance(part, dict) else 0
