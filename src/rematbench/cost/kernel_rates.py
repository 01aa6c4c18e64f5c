"""Speeds of kernels by name: config/kernels/, and the seconds that follow from them.

A GPU generation's file has the rates of attention by backend, GEMM, HBM, copies and collectives,
and the SMs and HBM rate that a collective takes from compute beside it.  `operators.yaml` has the
bytes per element of memory-bound operators by implementation, which hold for every generation.  The
functions are pure and broadcast over NumPy arrays.  Units: FLOP, bytes, seconds; shares are of the
dense 16-bit peak, of the HBM rate or of a link's rate.
"""

from math import fsum
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from rematbench.cost.kernels import Named

Quantity: TypeAlias = "float | NDArray[np.float64]"
AttentionBackend = Literal["unfused", "fa1", "fa2", "fa3", "cudnn", "triton"]

OPERATORS = "operators"
SOURCES = "sources"
"""The file that declares rows, exclusions and reasons; no rate is read from it."""
ATTENTION_TILE_ROWS = 128
"""Query rows of a thread block of FlashAttention-2 and -3 and of cuDNN at head dimension 128
(Dao 2023, arXiv 2307.08691, section 3.3; Shah et al. 2024, arXiv 2407.08608)."""
FLASH_BACKWARD_FLOP = 2.5
"""FLOPs of the backward over the forward's: five GEMMs to two (Dao 2023)."""
UNFUSED_BACKWARD_SHARE = 0.6
"""Share of a softmax's passes that are in its backward: three of five."""
REFERENCE_HEAD_DIM = 128
REFERENCE_ELEMENT_BYTES = 2
"""Bytes per element in the rows behind operators.yaml (bf16 and fp16)."""


class RateError(ValueError):
    """One line: config/kernels has no rate for a generation, backend or operator."""


class Outlier(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rows that deviate by more than 10 % from the curve, and why.  `lines`: of
    results/published/kernels.csv; `worst`: the largest measured over predicted speed, minus 1."""

    reason: str
    worst: float
    lines: tuple[int, ...]


class Evidence(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The evidence for an entry's numbers: the `fitted` fields were fitted to `rows` rows of
    `sources` documents; `source` is the source of the other fields."""

    fitted: tuple[str, ...] = ()
    rows: int = 0
    sources: int = 0
    source: str = ""
    outliers: tuple[Outlier, ...] = ()


class AttentionPass(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction of a fused kernel: share of the peak, rows and waves of tiles at half of it."""

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
    """One share of a rate, or a factor, or a count of SMs, as the entry's key says."""

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
    backward together, and the further passes where a separate kernel applies the causal mask."""

    passes: float
    mask_passes: float
    evidence: Evidence


class GenerationRates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config/kernels/GENERATION.yaml.  `half_waves`: by direction, for every backend; `refused`:
    backends that the generation cannot run or that have no published rate, with the reason."""

    sm_count: int
    source: str
    half_waves: dict[str, Share]
    attention: dict[str, AttentionRates]
    refused: dict[str, str]
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
    """One GPU as kernels see it: dense peak of all SMs, reached HBM rate, and `taken_sms`, the SMs
    that a collective beside the kernels holds (one SM for each block of the collective)."""

    peak_flop_per_s: Quantity
    hbm_bytes_per_s: Quantity
    sm_count: Quantity
    taken_sms: Quantity = 0.0

    @property
    def free_sms(self) -> Quantity:
        """SMs that no collective holds."""
        return self.sm_count - self.taken_sms

    @property
    def free_flop_per_s(self) -> Quantity:
        """Dense peak of the SMs that no collective holds."""
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

    def named(self, kernel: Named) -> ByteRates:
        """Rates of a memory-bound operator."""
        table: dict[str, ByteRates] = getattr(self.operators, kernel.operator)
        return table[kernel.implementation]

    def attention(self, generation: str, backend: str) -> AttentionRates:
        """Rates of a fused backend; RateError names the generation's backends."""
        rates = self.generation(generation)
        known = ", ".join(["unfused", *rates.attention])
        if backend in rates.refused:
            why = rates.refused[backend]
            raise RateError(f"attention {backend!r} on {generation}: {why} (known: {known})")
        if backend not in rates.attention:
            raise RateError(f"no attention {backend!r} on {generation} (known: {known})")
        return rates.attention[backend]


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


# -- seconds ----------------------------------------------------------------------------------


def saturation(size: Quantity, half: Quantity) -> Quantity:
    """size / (size + half) (Hockney & Jesshope 1981, the n_1/2 law)."""
    return size / (size + half)


def attention_share(
    rates: AttentionPass, rows: Quantity, heads: Quantity, sm_count: Quantity
) -> Quantity:
    """Share of the peak at head dimension 128: e r/(r + half_rows) w/(w + half_waves).

    r: rows of each sequence; `heads`: of all sequences; w = heads r / (128 SMs): waves of tiles.
    Source of the form: diagonal blocks and a block's prologue cost the same at every row length
    (half_rows); the last, partly filled wave costs one block's time (half_waves).
    """
    waves = heads * rows / (ATTENTION_TILE_ROWS * sm_count)
    return (
        rates.efficiency * saturation(rows, rates.half_rows) * saturation(waves, rates.half_waves)
    )


def head_dim_factor(rates: AttentionRates, head_dim: Quantity) -> Quantity:
    """Factor on the speed: linear in log2(head_dim) between published values, constant outside."""
    known = sorted(rates.head_dims)
    factors = [rates.head_dims[dim] for dim in known]
    return np.interp(np.log2(head_dim), np.log2(known), factors)


def attention_s(
    rates: AttentionRates,
    device: Device,
    *,
    backward: bool,
    heads: Quantity,
    head_dim: Quantity,
    q_rows: Quantity,
    pairs: Quantity,
) -> Quantity:
    """Seconds of fused attention of `heads` heads (of all sequences), each with q_rows queries and
    `pairs` (query, key) pairs: 4 head_dim pairs heads FLOPs, 2.5 times that backward (Dao 2023).

    The row length in the saturation is twice the mean keys of a query, 2 pairs / q_rows (s for a
    causal square, twice the window for a window), and at most q_rows.
    """
    flop = 4.0 * head_dim * pairs * heads * (FLASH_BACKWARD_FLOP if backward else 1.0)
    rows = np.minimum(q_rows, 2.0 * np.asarray(pairs) / q_rows)
    one = rates.backward if backward else rates.forward
    share = attention_share(one, rows, heads, device.free_sms)
    return flop / (device.free_flop_per_s * share * head_dim_factor(rates, head_dim))


def gemm_share(
    rates: GemmRates,
    m: Quantity,
    n: Quantity,
    k: Quantity,
    batch: Quantity,
    sm_count: Quantity,
) -> Quantity:
    """Share of the peak: e k/(k + half_k) w / (tail ceil(w) + (1 - tail) w), w waves of tiles.

    Source: tile and wave quantisation, NVIDIA DU-09798.  tail 1: kernels with one tile size lose
    all idle SMs of the last wave; tail 0: no SM is lost.
    """
    waves = np.asarray(m * n * batch) / (rates.tile_rows * rates.tile_columns * sm_count)
    filled = waves / (rates.tail * np.ceil(waves) + (1.0 - rates.tail) * waves)
    share: Quantity = rates.efficiency * saturation(k, rates.half_k) * filled
    return share


def gemm_s(
    rates: GemmRates,
    device: Device,
    m: Quantity,
    n: Quantity,
    k: Quantity,
    batch: Quantity = 1.0,
    *,
    element_bytes: Quantity,
    accumulate: bool = False,
) -> Quantity:
    """Seconds of `batch` GEMMs (m x k) @ (k x n): the longer of arithmetic and traffic (roofline,
    Williams et al. 2009); `accumulate` adds into an fp32 result."""
    factor = rates.accumulate if accumulate else 1.0
    share = gemm_share(rates, m, n, k, batch, device.free_sms) * factor
    arithmetic = 2.0 * m * n * k * batch / (device.free_flop_per_s * share)
    traffic = element_bytes * batch * (m * k + k * n + m * n) / device.hbm_bytes_per_s
    seconds: Quantity = np.maximum(arithmetic, traffic)
    return seconds


def named_bytes(rates: ByteRates, kernel: Named, *, backward: bool) -> float:
    """Bytes that an operator moves at the reached HBM rate, in proportion to its element size."""
    each = rates.backward_bytes if backward else rates.forward_bytes
    return kernel.elements * each * kernel.element_bytes / REFERENCE_ELEMENT_BYTES


def bytes_s(
    rates: ByteRates, elements: Quantity, *, backward: bool, hbm_bytes_per_s: Quantity
) -> Quantity:
    """Seconds of a memory-bound operator: bytes / reached HBM rate + fixed seconds."""
    if backward:
        return elements * rates.backward_bytes / hbm_bytes_per_s + rates.backward_fixed_s
    return elements * rates.forward_bytes / hbm_bytes_per_s + rates.forward_fixed_s


def unfused_passes(rates: UnfusedAttention, *, backward: bool, masked: bool) -> float:
    """Passes over the score matrix in one direction. The published rows have both together: parted
    2 to 3 as a softmax's own (read, write; read two, write one), and the mask forward, as the
    gradient of a sum moves nothing. The parting is ours."""
    if backward:
        return rates.passes * UNFUSED_BACKWARD_SHARE
    return rates.passes * (1.0 - UNFUSED_BACKWARD_SHARE) + (rates.mask_passes if masked else 0.0)


def unfused_attention_s(
    rates: UnfusedAttention,
    gemms_s: Quantity,
    scores: Quantity,
    element_bytes: Quantity,
    hbm_bytes_per_s: Quantity,
    *,
    masked: bool,
) -> Quantity:
    """Seconds, forward and backward: six GEMMs (`gemms_s`), and passes over `scores` elements."""
    passes = fsum(unfused_passes(rates, backward=way, masked=masked) for way in (False, True))
    return gemms_s + passes * scores * element_bytes / hbm_bytes_per_s
