"""Seconds of kernels from the fitted constants of config/calibration.yaml, as pure functions.

Units: FLOP, bytes, seconds; rates per second.  `gpu` has the constants of the GPU generation.
"""

import numpy as np

from rematbench.inputs.constants import GpuConstants
from rematbench.inputs.kernel_rates import Device, Quantity


def gemm_flop(m: Quantity, n: Quantity, k: Quantity, batch: Quantity = 1.0) -> Quantity:
    """FLOPs of `batch` GEMMs (m x k) @ (k x n): a multiply and an add per term."""
    return 2.0 * m * n * k * batch


def balance_factor(share: Quantity, balance: Quantity) -> Quantity:
    """The factor on a kernel's seconds on a GPU whose FLOP per HBM byte are `balance` times those
    of the measured GPU, where the kernel reaches `share` of the peak.

    A FLOP takes 1 / peak seconds, plus (1 / share - 1) / peak seconds in which the arithmetic waits
    for bytes. The first part is inverse to the GPU's FLOP/s and the second to its bytes/s, so a
    kernel never exceeds the peak. Source: roofline (Williams et al. 2009), with arithmetic and
    bytes added, not overlapped. docs/decisions/costs.md compares this law with published kernels.
    """
    factor: Quantity = 1.0 + (balance - 1.0) * np.maximum(0.0, 1.0 - np.asarray(share))
    return factor


def gemm_s(
    m: Quantity,
    n: Quantity,
    k: Quantity,
    batch: Quantity,
    element_bytes: Quantity,
    device: Device,
    gpu: GpuConstants,
) -> Quantity:
    """Seconds of `batch` GEMMs (m x k) @ (k x n): max(arithmetic, traffic).

    arithmetic = flop / (peak e) x (1 + half_k / k) x (1 + tail x SMs / tiles), for tiles of
    tile_rows x tile_columns, their prologue (half_k) and the last, partly filled wave (tail); times
    the balance factor without that wave, because its idle SMs do not wait for bytes.
    traffic = both operands read and the result written once.
    Source: wave and tile quantisation as in NVIDIA, "Matrix Multiplication Background User's
    Guide" (DU-09798); roofline of Williams et al. 2009.  e, tail and half_k are fitted.
    """
    tiles = m * n * batch / (gpu.tile_rows * gpu.tile_columns)
    tail = 1.0 + gpu.gemm_tail_waves * gpu.sm_count / tiles
    depth = 1.0 + gpu.gemm_half_k / k
    peak = device.peak_flop_per_s * gpu.gemm_efficiency
    arithmetic = gemm_flop(m, n, k, batch) / peak * tail * depth
    arithmetic = arithmetic * balance_factor(gpu.gemm_efficiency / depth, device.balance)
    moved = element_bytes * batch * (m * k + k * n + m * n)
    seconds: Quantity = np.maximum(arithmetic, moved / device.hbm_bytes_per_s)
    return seconds


def memory_s(nbytes: Quantity, hbm_bytes_per_s: Quantity, gpu: GpuConstants) -> Quantity:
    """Seconds to move bytes through HBM at the reached share e of its rate: bytes / (rate e)."""
    return nbytes / (hbm_bytes_per_s * gpu.hbm_efficiency)


UNFUSED_FORWARD_PASSES = 2.0
"""Passes over the score matrix of a fused scale-mask-softmax kernel: a read and a write.  Source:
Korthikanti et al. 2022 (arXiv 2205.05198), section 3 and figure 3 (core attention)."""
UNFUSED_BACKWARD_PASSES = 3.0
"""Passes of the softmax's backward: read probabilities and gradient, write the gradient."""
DROPOUT_PASSES = 2.5
"""Passes of dropout on probabilities, in either direction: a read, a write, and a one-byte mask
(half an element)."""


def overlapped_s(seconds: float, concurrent_s: float, slowdown: float) -> float:
    """Seconds of a kernel while a collective takes SMs and HBM rate from it: seconds + (slowdown -
    1) min(seconds, concurrent_s).

    Source: Rashidi et al., ISCA 2021, for the effect (compute and communication share SMs and
    memory rate); the factor is fitted.
    """
    return seconds + (slowdown - 1.0) * min(seconds, concurrent_s)
