"""Seconds of copies between device and host memory, and inside the device."""

from typing import NamedTuple

import numpy as np

from rematbench.costs.formulas import Quantity, memory_s
from rematbench.spec.constants import CommonConstants, GpuConstants


class Crowd(NamedTuple):
    """The traffic beside a program's copies.  `both`: share of the copied bytes that move beside
    copies in the other direction; `sent_per_d2h`, `received_per_h2d`: bytes to and from other
    nodes on the same link per copied byte; `drawn`: share of kernel seconds by which copies, which
    take HBM rate, make kernels longer."""

    both: float
    sent_per_d2h: float
    received_per_h2d: float
    drawn: float


ALONE = Crowd(0.0, 0.0, 0.0, 0.0)


def crowded_bytes_per_s(
    alone_bytes_per_s: float,
    both_bytes_per_s: float,
    messages_bytes_per_s: float,
    both: float,
    messages: Quantity,
) -> Quantity:
    """Rate of copies on a link, with the share `both` of their bytes beside copies in the other
    direction and `messages` bytes to or from other nodes per copied byte.  Messages and copies take
    turns, but messages never take more of the link than the NIC's rate, nor more than half."""
    mean = 1.0 / ((1.0 - both) / alone_bytes_per_s + both / both_bytes_per_s)
    left = max(alone_bytes_per_s - messages_bytes_per_s, alone_bytes_per_s / 2)
    return mean / np.minimum(1.0 + messages, alone_bytes_per_s / left)


def host_copy_s(nbytes: Quantity, link_bytes_per_s: Quantity, common: CommonConstants) -> Quantity:
    """Seconds of a copy between device and pinned host memory: latency + bytes / (link share x
    efficiency).

    `link_bytes_per_s` is one GPU's share of the PCIe link, per direction.  Source: PCI Express Base
    Specification 5.0 for the rate; `pcie_efficiency` is the part left by 256-byte payload headers
    and flow control.
    """
    return common.copy_latency_s + nbytes / (link_bytes_per_s * common.pcie_efficiency)


def pinned_block_bytes(nbytes: int) -> int:
    """Host bytes of one pinned tensor: torch takes the next power of two (CachingHostAllocator.h,
    PowerOf2Ceil, PyTorch 2.1 to 2.8; 2.11 on an H200), and gives no pinned block back to the
    system.  An upper bound where a later torch is told to pin exactly, as our runtime does
    (worlds/torch/devices.py)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def device_copy_s(nbytes: Quantity, hbm_bytes_per_s: Quantity, gpu: GpuConstants) -> Quantity:
    """Seconds of a copy inside the device (SPLIT, JOIN): each byte is read and written once."""
    return memory_s(2.0 * nbytes, hbm_bytes_per_s, gpu)
