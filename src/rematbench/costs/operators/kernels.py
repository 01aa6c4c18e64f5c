"""The shapes of kernels, which operator tables contain and from which formulas compute seconds."""

from typing import Literal

from msgspec import Struct

from rematbench.inputs.system import NormKernel, RopeKernel


class Gemm(Struct, frozen=True, tag="gemm"):
    """`batch` GEMMs (m x k) @ (k x n): m rows (tokens), n output columns, reduction k.  `narrow`:
    the workload's recipe quantises both operands."""

    m: int
    n: int
    k: int
    batch: int = 1
    narrow: bool = False


class Attention(Struct, frozen=True, tag="attention"):
    """Causal attention of one rank: `q_rows` query rows attend to `kv_rows` prefix rows.

    `heads`: the heads of one rank; `head_dim`: the columns of a head of queries and keys; `v_dim`:
    the columns of a head of values (0: `head_dim`); `pairs`: the (query, key) pairs per sequence
    and head under the causal mask (and window), summed over the rank's query rows; `fused`: a flash
    kernel, which does not store scores. `documents`: the documents of a sequence, which a
    variable-length kernel computes separately (1: one, or the full square).
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
    """Memory-bound kernels: the bytes that they read and write, and their launches. `batch`: a loop
    issues the launches once for each of this many groups; `of_weights`: the bytes are weights, all
    of which are read even for some of the rows."""

    hbm_bytes: int
    launches: int = 1
    batch: int = 1
    of_weights: bool = False


class Named(Struct, frozen=True, tag="named"):
    """A memory-bound operator over `elements` of `element_bytes`. config/kernels/operators.yaml
    has, by its name, its traffic and launches in each direction."""

    operator: Literal["norm", "rope"]
    implementation: NormKernel | RopeKernel
    elements: int
    element_bytes: int


Kernel = Gemm | Attention | Elementwise | Named

FLASH_BACKWARD_LAUNCHES = 3
"""Kernels of the backward: row sums of dO * O, the main kernel, the conversion of dQ (Dao 2023)."""


def launches(kernel: Gemm | Attention | Elementwise, *, forward: bool, dropout: bool) -> int:
    """The number of kernels that the device runs. Unfused attention has two batched GEMMs (four in
    the backward), the softmax, and the dropout if the model has dropout."""
    match kernel:
        case Attention(fused=True):
            return 1 if forward else FLASH_BACKWARD_LAUNCHES
        case Attention():
            return (2 if forward else 4) + 1 + int(dropout)
        case Elementwise():
            return kernel.launches
    return 1
