"""Widths and head dimensions that matrix kernels round up, and the cost of unaligned rows.

Token counts are not rounded, because each kernel's curve has the last, partly filled wave.
"""

from collections.abc import Iterator
from math import ceil

from msgspec.structs import replace

from rematbench.costs.operators.kernels import Gemm
from rematbench.inputs.layout import Layout
from rematbench.inputs.shapes import Shapes, shapes
from rematbench.inputs.system import System
from rematbench.workload import Workload

TILE_BYTES = 128
"""Bytes per row of a GEMM's tile: 64 elements of 16 bits.  Source: NVIDIA DU-09798, "Tensor Core
Requirements" (multiples of 128 bytes are the most efficient on A100 and later)."""
ALIGNED_BYTES = 16
"""The alignment in bytes that tensor cores require of 16-bit rows: 8 elements (DU-09798)."""
HEAD_DIM_MULTIPLE = 32
"""The step between the head dimensions for which flash-attention 2 and 3 have kernels (hdim32 to
hdim256), and the k-step of 16-bit GEMM kernels. Other dimensions are padded to the next step."""
UNALIGNED_SHARE = 12.21e12 * 160 / 140 / 312e12
"""The share of the dense 16-bit peak that batched GEMMs reach without tensor cores, if their rows
are not aligned: 140 bf16 columns at 12.21 TFLOP/s on A100, counted as the 160 to which the kernel
pads them.  Source: PyTorch issue 83272 (2022-08-11)."""


def rounded(width: int, multiple: int) -> int:
    return ceil(width / multiple) * multiple


def tiled(kernel: Gemm, element_bytes: int, *, weight_gradient: bool) -> Gemm:
    """The GEMM with its widths rounded up to whole tiles: n and k, but m and n for a weight
    gradient, whose k is the number of tokens."""
    multiple = TILE_BYTES // element_bytes
    n = rounded(kernel.n, multiple)
    if weight_gradient:
        return replace(kernel, m=rounded(kernel.m, multiple), n=n)
    return replace(kernel, n=n, k=rounded(kernel.k, multiple))


def is_aligned(head_dim: int, element_bytes: int) -> bool:
    """Whether rows of `head_dim` elements start at multiples of ALIGNED_BYTES."""
    return head_dim * element_bytes % ALIGNED_BYTES == 0


# Why: docs/decisions/costs.md, What do shapes cost that do not tile?
def untiled(
    work: Workload, layout: Layout, system: System, *, fused_attention: bool
) -> tuple[str, ...]:
    """A sentence for each width on a rank that kernels round up, with the cost."""
    lines = [
        *_untiled_widths(work, layout, system),
        *_untiled_head("head_dim", work.model.head_dim, work, fused_attention),
    ]
    if work.model.latent is not None:
        lines += _untiled_head("latent v", work.model.v_dim, work, fused_attention)
    return tuple(lines)


def _untiled_widths(work: Workload, layout: Layout, system: System) -> Iterator[str]:
    model, s, multiple = work.model, shapes(work, layout, system), TILE_BYTES // work.element_bytes
    heads = "hidden" if model.q_width == model.hidden else "heads x head_dim"
    widths = {
        ("hidden", model.hidden): model.hidden,
        (heads, model.q_width): s.q_width,
        **_projected_widths(work, s),
        ("ffn", model.ffn): s.ffn,
        ("vocab", s.vocab * s.tp): s.vocab,
    }
    if s.q_width % multiple:
        widths.pop((_QKV, s.q_width + 2 * s.kv_width), None)
    for (name, whole), width in widths.items():
        if width % multiple:
            split = f"{whole}/{s.tp} = {width}" if width != whole else f"{width}"
            yield (
                f"{name} {split} is not a multiple of {multiple}: its GEMMs take as "
                f"long as with {rounded(width, multiple)}"
            )


_QKV = "heads + 2 KV heads"


def _projected_widths(work: Workload, s: Shapes) -> dict[tuple[str, int], int]:
    given = work.model.latent
    if given is None:
        whole = s.q_width + 2 * s.kv_width
        return {(_QKV, whole): whole}
    down = {"q_rank": given.q_rank, "kv_rank + rope": given.kv_rank + given.rope}
    return {(name, width): width for name, width in down.items() if width}


def _untiled_head(name: str, dim: int, work: Workload, fused_attention: bool) -> Iterator[str]:
    multiple = HEAD_DIM_MULTIPLE
    costs = f"attention takes as long as with {rounded(dim, multiple)}"
    if not is_aligned(dim, work.element_bytes):
        elements = ALIGNED_BYTES // work.element_bytes
        more = "and copies of queries, keys, values and output"
        if not fused_attention:
            more = f"at {UNALIGNED_SHARE:.3f} of the peak, without tensor cores"
        yield f"{name} {dim} is not a multiple of {elements}: {costs}, {more}"
    elif dim % multiple:
        yield f"{name} {dim} is not a multiple of {multiple}: {costs}"
