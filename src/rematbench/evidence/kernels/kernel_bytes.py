"""Refit operators.yaml: bytes per element of memory-bound operators, by implementation.

Bytes are seconds times the HBM rate that the row's generation reaches, so that the bytes are valid
on other generations.
"""

from collections.abc import Mapping
from math import fsum

import msgspec
import numpy as np

from rematbench.costs.kernel_seconds import bytes_s, gemm_s, unfused_attention_s
from rematbench.evidence.kernels.kernel_rows import (
    KernelRow,
    KernelRowError,
    attention_flop,
    measured,
)
from rematbench.evidence.kernels.kernel_sources import (
    Array,
    ByteRows,
    KernelFitError,
    Rows,
    Sources,
    document_weights,
    evidence,
    rounded,
    solve,
)
from rematbench.spec.kernel_rates import (
    ByteRates,
    Device,
    Evidence,
    GemmRates,
    OperatorRates,
    UnfusedAttention,
)

NEAR = 0.05
"""Logarithmic deviation at which a row's weight starts to fall (soft L1)."""
LEAST_S = 1e-8
"""Fitted fixed seconds below this value are stored as 0."""
HALF = 2
"""Bytes of a bf16 or fp16 element."""
ONCE: dict[tuple[str, str], int] = {
    ("norm", "forward"): 2 * HALF,
    ("norm", "backward"): 3 * HALF,
    ("cross_entropy", "forward"): HALF,
}
"""Bytes per element where the source counts each tensor as read or written once, by (operator,
pass): x and y; x, dy and dx; the logits."""


def elements(row: KernelRow) -> int:
    """Elements that a row's operator works on: the hidden state, q and k, the gated product, or the
    logits."""
    if row.what == "rope":
        return (
            row.size("rows")
            * row.size("hidden")
            * (row.size("h") + row.size("kv"))
            // row.size("h")
        )
    if row.what == "cross_entropy" and "vocab" in row.shape:
        return row.size("rows") * row.size("vocab")
    return row.size("rows") * row.size("hidden")


def seconds(row: KernelRow) -> float:
    """Seconds of a memory-bound row, from seconds or from bytes/s; KernelRowError where the row has
    neither."""
    figure = measured(row)
    if figure.quantity == "seconds":
        return figure.value
    once = ONCE.get((row.what, row.shape.get("pass", "")))
    if figure.quantity != "bytes_per_s" or once is None:
        raise KernelRowError(f"kernels.csv line {row.line}: no seconds in {row.unit}")
    return once * elements(row) / figure.value


def reached_hbm(sources: Sources, row: KernelRow, hbm: Mapping[str, float]) -> float:
    """Reached HBM bytes/s of the row's GPU; `hbm`: reached share of the peak by generation."""
    facts = sources.gpus[row.gpu]
    return facts.hbm_bytes_per_s * hbm[facts.generation]


def predicted_s(rates: ByteRates, row: KernelRow, hbm_bytes_per_s: float) -> float:
    """Predicted seconds of a row's pass or passes."""
    which = row.shape["pass"]
    parts = {"forward": (False,), "backward": (True,), "forward+backward": (False, True)}[which]
    count = float(elements(row))
    return fsum(
        float(bytes_s(rates, count, backward=back, hbm_bytes_per_s=hbm_bytes_per_s))
        for back in parts
    )


def fit_bytes(sources: Sources, told: ByteRows, rows: Rows, hbm: Mapping[str, float]) -> ByteRates:
    """Bytes per element and fixed seconds of both passes, fitted jointly by robust least squares of
    logarithms.  KernelFitError where the rows have only one pass."""
    own = [row for row in rows if told.match.holds(row)]
    kinds = {row.shape.get("pass") for row in own}
    if "forward" not in kinds or len(kinds) < 2:
        raise KernelFitError(f"kernels.csv: not both passes in {msgspec.to_builtins(told.match)}")
    real = np.array([seconds(row) for row in own])
    hbm_rates = [reached_hbm(sources, row, hbm) for row in own]
    weights = document_weights(own)

    def curve(x: Array | list[float]) -> ByteRates:
        return ByteRates(
            forward_bytes=float(x[0]),
            forward_fixed_s=float(x[1]),
            backward_bytes=float(x[2]),
            backward_fixed_s=float(x[3]),
            forward_launches=told.forward_launches,
            backward_launches=told.backward_launches,
            evidence=Evidence(),
        )

    def predicted(rates: ByteRates) -> Array:
        pairs = zip(own, hbm_rates, strict=True)
        return np.array([predicted_s(rates, row, rate) for row, rate in pairs])

    best = solve(
        lambda x: weights * np.log(predicted(curve(x)) / real),
        [10.0, 7e-6, 15.0, 1.5e-5],
        ([0.5, 0.0, 0.5, 0.0], [500.0, 2e-4, 500.0, 4e-4]),
        NEAR,
    )
    rates = curve([rounded(x, LEAST_S) for x in best])
    speeds = dict(zip((row.line for row in own), predicted(rates) / real, strict=True))
    fitted = ("forward_bytes", "forward_fixed_s", "backward_bytes", "backward_fixed_s")
    why = f"launches: {told.launches_source}"
    return msgspec.structs.replace(rates, evidence=evidence(sources, own, speeds, fitted, why))


def fit_unfused(
    sources: Sources, rows: Rows, hbm: Mapping[str, float], gemms: Mapping[str, GemmRates]
) -> UnfusedAttention:
    """The fitted passes over the score matrix that eager attention takes in addition to its
    GEMMs."""
    own = [row for row in rows if sources.operators.unfused_attention.holds(row)]
    known = [_unfused_parts(sources, row, hbm, gemms) for row in own]
    real = np.array([attention_flop(row) / measured(row).value for row in own])

    def curve(x: Array | list[float]) -> UnfusedAttention:
        return UnfusedAttention(passes=float(x[0]), mask_passes=float(x[1]), evidence=Evidence())

    def predicted(rates: UnfusedAttention) -> Array:
        told = [
            float(unfused_attention_s(rates, gemm, scores, HALF, rate, masked=row.causal))
            for row, (gemm, scores, rate) in zip(own, known, strict=True)
        ]
        return np.array(told)

    best = solve(
        lambda x: np.log(predicted(curve(x)) / real), [11.0, 4.0], ([0.0, 0.0], [60.0, 60.0])
    )
    rates = curve([rounded(x) for x in best])
    speeds = dict(zip((row.line for row in own), predicted(rates) / real, strict=True))
    proof = evidence(sources, own, speeds, ("passes", "mask_passes"))
    return msgspec.structs.replace(rates, evidence=proof)


def _unfused_parts(
    sources: Sources, row: KernelRow, hbm: Mapping[str, float], gemms: Mapping[str, GemmRates]
) -> tuple[float, float, float]:
    """Seconds of the GEMMs, elements of the score matrices, and reached HBM bytes/s of a row of
    eager attention."""
    facts = sources.gpus[row.gpu]
    s, d = float(row.size("s")), float(row.size("d"))
    many = float(row.size("b") * row.size("h"))
    device = Device(
        peak_flop_per_s=facts.peak_flop_per_s,
        hbm_bytes_per_s=reached_hbm(sources, row, hbm),
        sm_count=sources.generations[facts.generation].sm_count,
    )
    rates = gemms[facts.generation]
    scores = gemm_s(rates, device, s, s, d, many, element_bytes=HALF)
    values = gemm_s(rates, device, s, d, s, many, element_bytes=HALF)
    return float(2.0 * scores + 4.0 * values), many * s * s, reached_hbm(sources, row, hbm)


def fit_operators(
    sources: Sources, rows: Rows, hbm: Mapping[str, float], gemms: Mapping[str, GemmRates]
) -> OperatorRates:
    """The content of operators.yaml."""
    told = sources.operators

    def every(declared: Mapping[str, ByteRows]) -> dict[str, ByteRates]:
        return {name: fit_bytes(sources, part, rows, hbm) for name, part in declared.items()}

    return OperatorRates(
        unfused_attention=fit_unfused(sources, rows, hbm, gemms),
        norm=every(told.norm),
        rope=every(told.rope),
        activation=every(told.activation),
        loss=every(told.loss),
    )
