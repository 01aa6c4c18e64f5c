"""Seconds of copies between device and host memory, and sizes of pinned host blocks."""

from typing import NamedTuple

from rematbench.inputs.constants import CommonConstants


class CopyTraffic(NamedTuple):
    """The traffic that runs while a program copies.

    `two_way_share`: the share of copied bytes that move during a copy in the opposite direction;
    `sent_per_d2h`, `received_per_h2d`: bytes to and from other nodes over the same link, per copied
    byte; `kernel_delay_share`: the share by which kernels become slower because copies use HBM.
    """

    two_way_share: float
    sent_per_d2h: float
    received_per_h2d: float
    kernel_delay_share: float


NO_TRAFFIC = CopyTraffic(0.0, 0.0, 0.0, 0.0)


def shared_link_bytes_per_s(
    one_way_bytes_per_s: float,
    two_way_bytes_per_s: float,
    nic_bytes_per_s: float,
    two_way_share: float,
    messages: float,
) -> float:
    """The bytes/s of copies on a host link. A share `two_way_share` of their bytes moves during a
    copy in the opposite direction. Per copied byte, `messages` bytes to or from other nodes use the
    same link, at no more than the NIC's rate and half of the link's."""
    mean = 1.0 / ((1.0 - two_way_share) / one_way_bytes_per_s + two_way_share / two_way_bytes_per_s)
    rest = max(one_way_bytes_per_s - nic_bytes_per_s, one_way_bytes_per_s / 2)
    return mean / min(1.0 + messages, one_way_bytes_per_s / rest)


def host_copy_s(nbytes: float, link_bytes_per_s: float, common: CommonConstants) -> float:
    """Seconds of a copy between device and pinned host memory: latency + bytes / (link share x
    efficiency).

    `link_bytes_per_s` is one GPU's share of the PCIe link, per direction.  Source: PCI Express Base
    Specification 5.0 for the rate; `pcie_efficiency` is the share that headers of 256-byte payloads
    and flow control leave.
    """
    return common.copy_latency_s + nbytes / (link_bytes_per_s * common.pcie_efficiency)


def pinned_block_bytes(nbytes: int) -> int:
    """Host bytes of one pinned tensor. Torch pins the next power of two (CachingHostAllocator.h,
    PowerOf2Ceil, PyTorch 2.1 to 2.8; 2.11 on an H200) and never returns a pinned block to the
    system. The result is an upper bound if torch pins exact sizes, as our runtime makes it
    (worlds/torch/devices.py)."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0
