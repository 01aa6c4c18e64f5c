"""Seconds of copies between device and host memory, and inside the device."""

from rematbench.cost.constants import CommonConstants, GpuConstants
from rematbench.cost.formulas import Quantity, memory_s


def host_copy_s(nbytes: Quantity, link_bytes_per_s: Quantity, common: CommonConstants) -> Quantity:
    """Copy between device and pinned host memory: latency + bytes / (link share x efficiency).

    `link_bytes_per_s` is one GPU's share of the PCIe link, per direction; both directions run at
    once (PCIe is full duplex).  Source: PCI Express Base Specification 5.0 for the rate;
    `pcie_efficiency` is the part left by 256-byte payload headers and flow control.
    """
    return common.copy_latency_s + nbytes / (link_bytes_per_s * common.pcie_efficiency)


def pinned_block_bytes(nbytes: int) -> int:
    """Host bytes of one pinned tensor: torch takes the next power of two (CachingHostAllocator.h,
    PowerOf2Ceil, PyTorch 2.1 to 2.8), and gives no pinned block back to the system."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def device_copy_s(nbytes: Quantity, hbm_bytes_per_s: Quantity, gpu: GpuConstants) -> Quantity:
    """Copy inside the device (SPLIT, JOIN): each byte is read once and written once."""
    return memory_s(2.0 * nbytes, hbm_bytes_per_s, gpu)
