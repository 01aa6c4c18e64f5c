"""The kernels of operators as shapes, which operator tables contain and formulas time."""

from typing import Literal

from msgspec import Struct

from rematbench.inputs.system import NormKernel, RopeKernel


class Gemm(Struct, frozen=True, tag="gemm"):
    """`batch` GEMMs (m x k) @ (k x n): m rows (tokens), n output columns, reduction k.  `narrow`:
    both operands are quantised by the recipe of the work."""

    m: int
    n: int
    k: int
    batch: int = 1
    narrow: bool = False


class Attention(Struct, frozen=True, tag="attention"):
    """Causal attention of one rank: `q_rows` query rows against `kv_rows` prefix rows.

    `heads` are those of one rank; `head_dim` are the columns of a head of queries and keys, `v_dim`
    those of a head of values (0: as many); `pairs` is the number of (query, key) pairs per
    sequence and head under the causal mask (and window), summed over the rank's query rows;
    `fused`: a flash kernel, not materialised scores.  `documents`: the documents of a sequence,
    each of which a variable-length kernel computes alone (1: one document, or the full square).
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    q_rows: int
    kv_rows: int
    pairs: int
    fused: bool = True
    documents: int = 1
    v_dim: int = 0

    @property
    def values(self) -> int:
        """Columns of a head of values."""
        return self.v_dim or self.head_dim


class Elementwise(Struct, frozen=True, tag="elementwise"):
    """A memory-bound kernel (or a fused run of them): bytes read plus written, kernels launched;
    `batch`: a loop issues the launches for each of so many groups; `of_weights`: the bytes are
    those of weights, and a part of the rows needs all of them too."""

    hbm_bytes: int
    launches: int = 1
    batch: int = 1
    of_weights: bool = False


class Named(Struct, frozen=True, tag="named"):
    """A memory-bound operator over `elements` of `element_bytes`.  Its traffic and launches in each
    direction are in config/kernels/operators.yaml, by its name."""

    operator: Literal["norm", "rope"]
    implementation: NormKernel | RopeKernel
    elements: int
    element_bytes: int


Kernel = Gemm | Attention | Elementwise | Named

FLASH_BACKWARD_LAUNCHES = 3
"""Kernels of the backward: row sums of dO * O, the main kernel, the conversion of dQ (Dao 2023)."""


def launches(kernel: Gemm | Attention | Elementwise, *, forward: bool, dropout: bool) -> int:
    """Number of kernels that the device runs.  Unfused attention has two batched GEMMs (four in
    the backward), the softmax, and the dropout if the model has dropout."""
    match kernel:
        case Attention(fused=True):
            return 1 if forward else FLASH_BACKWARD_LAUNCHES
        case Attention():
            return (2 if forward else 4) + 1 + int(dropout)
        case Elementwise():
            return kernel.launches
    return 1
