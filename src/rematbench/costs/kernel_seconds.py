"""Seconds of kernels from the published rates in config/kernels. The functions are pure and
broadcast over NumPy arrays. Units: FLOP, bytes, seconds."""

from math import fsum

import numpy as np

from rematbench.costs.formulas import balance_factor
from rematbench.inputs.kernel_rates import (
    AttentionPass,
    AttentionRates,
    ByteRates,
    Device,
    GemmRates,
    Quantity,
    UnfusedAttention,
)

ATTENTION_TILE_ROWS = 128
"""Query rows per thread block of FlashAttention-2 and -3 and of cuDNN at head dimension 128
(Dao 2023, arXiv 2307.08691, section 3.3; Shah et al. 2024, arXiv 2407.08608)."""
UNFUSED_BACKWARD_SHARE = 0.6
"""The backward's share of the passes of a softmax: three of five."""
REFERENCE_ELEMENT_BYTES = 2
"""Bytes per element in the published rows of operators.yaml (bf16 and fp16)."""


def saturation(size: Quantity, half: Quantity) -> Quantity:
    """size / (size + half) (Hockney & Jesshope 1981, the n_1/2 law)."""
    return size / (size + half)


def attention_share(
    rates: AttentionPass, rows: Quantity, heads: Quantity, sm_count: Quantity
) -> Quantity:
    """The share of the peak at head dimension 128: e r/(r + half_rows) w/(w + half_waves), for r
    rows of each sequence, heads of all sequences, and w = heads r / (128 SMs) waves of tiles.
    Reason for the form: diagonal blocks and a block's prologue cost the same at every row length
    (half_rows); the last, partly filled wave costs as much as a whole block (half_waves)."""
    waves = heads * rows / (ATTENTION_TILE_ROWS * sm_count)
    return (
        rates.efficiency * saturation(rows, rates.half_rows) * saturation(waves, rates.half_waves)
    )


def backward_flop(head_dim: Quantity, v_dim: Quantity) -> Quantity:
    """FLOPs of the backward relative to the forward: three GEMMs over the columns of keys and two
    over those of values, against one over each (Dao 2023). 2.5, or 2.6 for 192 and 128 columns."""
    return (3.0 * head_dim + 2.0 * v_dim) / (head_dim + v_dim)


def head_dim_factor(rates: AttentionRates, head_dim: Quantity) -> Quantity:
    """The factor on the speed for a head dimension: linear in log2(head_dim) between published
    values, constant outside."""
    published = sorted(rates.head_dims)
    factors = [rates.head_dims[dim] for dim in published]
    return np.interp(np.log2(head_dim), np.log2(published), factors)


def attention_s(
    rates: AttentionRates,
    device: Device,
    *,
    backward: bool,
    heads: Quantity,
    head_dim: Quantity,
    q_rows: Quantity,
    pairs: Quantity,
    v_dim: "Quantity | None" = None,
) -> Quantity:
    """Seconds of fused attention of `heads` heads (of all sequences), each with q_rows queries and
    `pairs` (query, key) pairs: 4 head_dim pairs heads FLOPs, 2.5 times as many in the backward (Dao
    2023). If values have other columns than keys (`v_dim`), the share of the peak is that of heads
    with the mean of the two.

    The row length in the saturation is twice the mean keys of a query, 2 pairs / q_rows (s for a
    causal square, twice the window for a window), and at most q_rows.
    """
    values = head_dim if v_dim is None else v_dim
    more = backward_flop(head_dim, values) if backward else 1.0
    flop = 2.0 * (head_dim + values) * pairs * heads * more
    rows = np.minimum(q_rows, 2.0 * np.asarray(pairs) / q_rows)
    direction = rates.backward if backward else rates.forward
    factor = head_dim_factor(rates, (head_dim + values) / 2)
    share = attention_share(direction, rows, heads, device.free_sms)
    whole_waves = direction.efficiency * saturation(rows, direction.half_rows) * factor
    slower = balance_factor(whole_waves, device.balance)
    return flop / (device.free_flop_per_s * share * factor) * slower


def gemm_share(
    rates: GemmRates, m: Quantity, n: Quantity, k: Quantity, batch: Quantity, sm_count: Quantity
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
) -> Quantity:
    """Seconds of `batch` GEMMs (m x k) @ (k x n): the longer of arithmetic and traffic (roofline,
    Williams et al. 2009)."""
    share = gemm_share(rates, m, n, k, batch, device.free_sms)
    arithmetic = 2.0 * m * n * k * batch / (device.free_flop_per_s * share)
    whole_waves = rates.efficiency * saturation(k, rates.half_k)
    arithmetic = arithmetic * balance_factor(whole_waves, device.balance)
    traffic = element_bytes * batch * (m * k + k * n + m * n) / device.hbm_bytes_per_s
    seconds: Quantity = np.maximum(arithmetic, traffic)
    return seconds


def bytes_s(
    rates: ByteRates, elements: Quantity, *, backward: bool, hbm_bytes_per_s: Quantity
) -> Quantity:
    """Seconds of a memory-bound operator: bytes / reached HBM rate + fixed seconds."""
    if backward:
        return elements * rates.backward_bytes / hbm_bytes_per_s + rates.backward_fixed_s
    return elements * rates.forward_bytes / hbm_bytes_per_s + rates.forward_fixed_s


def unfused_passes(rates: UnfusedAttention, *, backward: bool, masked: bool) -> float:
    """Passes over the score matrix in one direction. Published rows give the sum of both
    directions. We divide it 2 to 3, as for a softmax (read and write; read two and write one), and
    count the mask only in the forward, because the gradient of a sum moves no bytes."""
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
    """Seconds, both directions together: six GEMMs (`gemms_s`) and passes over `scores`
    elements."""
    passes = fsum(unfused_passes(rates, backward=way, masked=masked) for way in (False, True))
    return gemms_s + passes * scores * element_bytes / hbm_bytes_per_s
