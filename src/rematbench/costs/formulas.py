"""Seconds of one kernel from the fitted constants of config/calibration.yaml.  The functions are
pure and broadcast over NumPy arrays.

Units: FLOP, bytes, seconds; rates per second.  `gpu` has the constants of the GPU generation.
"""

import numpy as np

from rematbench.spec.constants import GpuConstants
from rematbench.spec.kernel_rates import Quantity


def gemm_flop(m: Quantity, n: Quantity, k: Quantity, batch: Quantity = 1.0) -> Quantity:
    """FLOPs of `batch` GEMMs: 2 m n k batch (a multiply and an add per term)."""
    return 2.0 * m * n * k * batch


def gemm_s(
    m: Quantity,
    n: Quantity,
    k: Quantity,
    batch: Quantity,
    element_bytes: Quantity,
    peak_flop_per_s: Quantity,
    hbm_bytes_per_s: Quantity,
    gpu: GpuConstants,
) -> Quantity:
    """Seconds of `batch` GEMMs (m x k) @ (k x n): max(arithmetic, traffic).

    arithmetic = flop / (peak e) x (1 + half_k / k) x (1 + tail x SMs / tiles), with tiles of
    tile_rows x tile_columns: the prologue of each tile (half_k) and the last, partly filled wave.
    traffic = both operands read and the result written once.
    Source: wave and tile quantisation as in NVIDIA, "Matrix Multiplication Background User's
    Guide" (DU-09798); roofline of Williams et al. 2009.  e, tail and half_k are fitted.
    """
    tiles = m * n * batch / (gpu.tile_rows * gpu.tile_columns)
    tail = 1.0 + gpu.gemm_tail_waves * gpu.sm_count / tiles
    depth = 1.0 + gpu.gemm_half_k / k
    arithmetic = gemm_flop(m, n, k, batch) / (peak_flop_per_s * gpu.gemm_efficiency) * tail * depth
    moved = element_bytes * batch * (m * k + k * n + m * n)
    traffic = memory_s(moved, hbm_bytes_per_s, gpu)
    seconds: Quantity = np.maximum(arithmetic, traffic)
    return seconds


def memory_s(nbytes: Quantity, hbm_bytes_per_s: Quantity, gpu: GpuConstants) -> Quantity:
    """Seconds to move bytes through HBM at the reached share of its rate: bytes / (rate e)."""
    return nbytes / (hbm_bytes_per_s * gpu.hbm_efficiency)


UNFUSED_FORWARD_PASSES = 2.0
"""Score-matrix passes of a fused scale-mask-softmax kernel: read, write."""
UNFUSED_BACKWARD_PASSES = 3.0
"""Softmax backward: read probabilities and gradient, write the gradient."""
DROPOUT_PASSES = 2.5
"""Dropout on probabilities, in either direction: read, write, and a one-byte mask (half an
element)."""


def scores_s(
    count: Quantity,
    passes: Quantity,
    element_bytes: Quantity,
    hbm_bytes_per_s: Quantity,
    gpu: GpuConstants,
) -> Quantity:
    """Seconds of `passes` over a materialised score matrix of `count` elements (softmax, dropout).

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 3 and figure 3 (core attention).
    """
    return memory_s(passes * np.asarray(count) * element_bytes, hbm_bytes_per_s, gpu)


def overlapped_s(seconds: Quantity, concurrent_s: Quantity, slowdown: Quantity) -> Quantity:
    """Seconds of a kernel that overlaps with a collective, which takes SMs and HBM rate from it:
    seconds + (slowdown - 1) min(seconds, concurrent_s).

    Source: the effect as in Rashidi et al., ISCA 2021 (compute and communication share SMs and
    memory rate); the factor is fitted.
    """
    slower: Quantity = seconds + (slowdown - 1.0) * np.minimum(seconds, concurrent_s)
    return slower
