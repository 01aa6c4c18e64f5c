"""Curves of kernel rates fitted to published rows: GEMM, attention and memory-bound operators.

GEMM: share of the peak by shape.  Attention: share of the peak by backend, length, heads and head
dimension; a curve is fitted to the median log ratio over sources at every length.  Memory-bound
operators: bytes per element by implementation.  The bytes are seconds times the reached HBM rate of
the row's generation, so they are valid on other generations.
"""

from collections.abc import Callable, Mapping, Sequence
from math import fsum
from statistics import median

import msgspec
import numpy as np

from rematbench.costs.kernel_seconds import (
    attention_share,
    bytes_s,
    gemm_s,
    gemm_share,
    head_dim_factor,
    unfused_attention_s,
)
from rematbench.evidence.kernels.kernel_rows import (
    PASSES,
    Array,
    ByteRows,
    KernelError,
    KernelRow,
    Rows,
    Sources,
    attention_flop,
    evidence,
    measured,
)
from rematbench.inputs.kernel_rates import (
    REFERENCE_HEAD_DIM,
    AttentionPass,
    AttentionRates,
    ByteRates,
    Device,
    Evidence,
    GemmRates,
    OperatorRates,
    Share,
    UnfusedAttention,
)

AT_BOUND = 1e-4
"""A parameter is set to its bound if it is nearer than this share of its start value."""


def solve(
    misses: Callable[[Array], Array],
    start: Sequence[float],
    bounds: tuple[Sequence[float], Sequence[float]],
    near: float | None = None,
) -> list[float]:
    """The parameters within `bounds` that minimise the squared `misses`; deterministic.  `misses`:
    parameters -> residuals (rows,), differences of logarithms.  `near`: the residual at which a
    row's weight starts to fall (soft L1; None: plain least squares)."""
    from scipy.optimize import least_squares  # noqa: PLC0415 (slow, and only fitting needs it)

    best = least_squares(
        misses,
        start,
        bounds=bounds,
        x_scale=start,
        diff_step=np.full(len(start), 1e-4),
        loss="linear" if near is None else "soft_l1",
        f_scale=1.0 if near is None else near,
    )
    ends = np.where(best.x - bounds[0] < np.subtract(bounds[1], best.x), *bounds)
    at_end = np.abs(best.x - ends) < AT_BOUND * np.asarray(start)
    return [float(x) for x in np.where(at_end, ends, best.x)]


def rounded(value: float, smallest: float = 1e-6) -> float:
    """A value rounded to four significant digits, as in the files; 0 if below `smallest`."""
    return float(f"{value:.4g}") if value >= smallest else 0.0


def document_weights(rows: Rows) -> Array:
    """Weights of residuals, shape (rows,); every document gets the same weight in a sum of
    squares."""
    documents = [row.source for row in rows]
    return np.array([documents.count(name) ** -0.5 for name in documents])


# -- GEMM -------------------------------------------------------------------------------------

TILE_ROWS, TILE_COLUMNS = 128.0, 256.0
TILE_SOURCE = "tiles: 128 x 256 of cuBLAS and CUTLASS, NVIDIA DU-09798"
NEAR_GEMM = 0.03
"""Logarithmic deviation at which a GEMM row's weight starts to fall (soft L1)."""


def fit_gemm(sources: Sources, rows: Rows, sm_count: int) -> GemmRates:
    """GEMM rates, by robust least squares of log shares of the peak; every document has the same
    weight."""
    real = np.array([measured(r).value / sources.gpus[r.gpu].peak_flop_per_s for r in rows])
    m, n, k = (np.array([float(r.size(key)) for r in rows]) for key in ("m", "n", "k"))
    adds = np.array([r.shape.get("accumulate") == "True" for r in rows])
    weights = document_weights(rows)

    def curve(x: Array | list[float]) -> GemmRates:
        return GemmRates(
            efficiency=float(x[0]),
            half_k=float(x[1]),
            tail=float(x[2]),
            accumulate=float(x[3]) if adds.any() else 1.0,
            tile_rows=TILE_ROWS,
            tile_columns=TILE_COLUMNS,
            evidence=Evidence(),
        )

    def predicted(rates: GemmRates) -> Array:
        share = np.asarray(gemm_share(rates, m, n, k, 1.0, sm_count), dtype=np.float64)
        factors: Array = np.where(adds, rates.accumulate, 1.0) * share
        return factors

    best = solve(
        lambda x: weights * np.log(predicted(curve(x)) / real),
        [0.7, 150.0, 0.5, 0.95],
        ([0.05, 0.0, 0.0, 0.5], [1.2, 3e3, 1.0, 1.2]),
        NEAR_GEMM,
    )
    rates = curve([rounded(x) for x in best])
    speeds = real / predicted(rates)
    fitted = ("efficiency", "half_k", "tail", *(("accumulate",) if adds.any() else ()))
    proof = evidence(sources, rows, speeds, fitted, TILE_SOURCE)
    return msgspec.structs.replace(rates, evidence=proof)


# -- attention ------------------------------------------------------------------------------------

START = (0.5, 500.0)
LOWEST = (0.01, 1.0)
HIGHEST = (1.5, 2e4)
"""Start and bounds of (efficiency, half_rows) of a direction."""


def attention_fraction(sources: Sources, row: KernelRow) -> float:
    """Share of the GPU's dense peak that an attention row reaches; causal masks halve the pairs."""
    return measured(row).value / sources.gpus[row.gpu].peak_flop_per_s


def predicted_fraction(
    forward: AttentionPass, backward: AttentionPass, row: KernelRow, sm_count: int
) -> float:
    """Predicted share of the peak at the reference head dimension; the share of a row with both
    passes follows from the sum of their seconds."""
    size = (float(row.size("s")), float(row.size("b") * row.size("h")), sm_count)
    ahead = float(attention_share(forward, *size))
    back = float(attention_share(backward, *size))
    if row.what == "attention_forward":
        return ahead
    if row.what == "attention_backward":
        return back
    both, more = PASSES["attention_fwd_bwd"], PASSES["attention_backward"]
    return both / (1.0 / ahead + more / back)


def fit_half_waves(sources: Sources, rows: Rows, sm_count: int) -> dict[str, Share]:
    """`half_waves` of both directions (the waves of tiles at which half the speed is reached), from
    rows whose number of heads varies.

    The fitted efficiency is dropped, and so is half_rows if the rows have several lengths.
    """
    plain = [row for row in rows if row.size("d") == REFERENCE_HEAD_DIM]
    return {
        direction: _half_waves(
            sources, [row for row in plain if row.what == f"attention_{direction}"], sm_count
        )
        for direction in ("forward", "backward")
    }


def _half_waves(sources: Sources, rows: Rows, sm_count: int) -> Share:
    one_length = len({row.size("s") for row in rows}) == 1
    real = np.array([attention_fraction(sources, row) for row in rows])

    def predicted(x: Array | list[float]) -> Array:
        half_rows = 0.0 if one_length else float(x[2])
        one = AttentionPass(efficiency=float(x[0]), half_waves=float(x[1]), half_rows=half_rows)
        return np.array([predicted_fraction(one, one, row, sm_count) for row in rows])

    best = solve(
        lambda x: np.log(predicted(x) / real),
        [0.6, 1.0, 400.0],
        ([0.01, 0.0, 0.0], [2.0, 50.0, 2e4]),
    )
    speeds = real / predicted(best)
    return Share(value=rounded(best[1]), evidence=evidence(sources, rows, speeds, ("value",)))


def medians_by_length(rows: Rows, log_ratio: Callable[[KernelRow], float]) -> Array:
    """The median log ratio over sources for each direction and length, in sorted order: a vector.
    A source is a document and an implementation."""
    groups: dict[tuple[str, int], dict[tuple[str, str], list[float]]] = {}
    for row in rows:
        sources = groups.setdefault((row.what, row.size("s")), {})
        sources.setdefault((row.source, row.implementation), []).append(log_ratio(row))
    return np.array([median(median(v) for v in groups[key].values()) for key in sorted(groups)])


def fit_attention(
    sources: Sources,
    rows: Rows,
    waves: dict[str, Share],
    sm_count: int,
    like: AttentionRates | None = None,
    lengths: AttentionRates | None = None,
) -> AttentionRates:
    """The fitted rates of a backend: efficiency and half_rows of both directions, then a factor for
    every other head dimension.  `like`: only one direction is fitted; the ratio of backward to
    forward is taken from this backend.  `lengths`: half_rows are taken from this backend."""
    plain = [row for row in rows if row.size("d") == REFERENCE_HEAD_DIM]
    sides = 2 if like is None else 1
    numbers = ("efficiency", "half_rows") if lengths is None else ("efficiency",)
    start, *bounds = (side[: len(numbers)] * sides for side in (START, LOWEST, HIGHEST))

    def passes(x: Array | list[float]) -> tuple[AttentionPass, AttentionPass]:
        if lengths is not None:
            x = [x[0], lengths.forward.half_rows, x[-1], lengths.backward.half_rows]
        ahead = (float(x[0]), float(x[1]))
        back = (float(x[-2]), float(x[-1]))
        if like is not None:
            efficiency = like.backward.efficiency / like.forward.efficiency
            back = (
                ahead[0] * efficiency,
                ahead[1] * like.backward.half_rows / like.forward.half_rows,
            )
        return _pass(ahead, waves["forward"]), _pass(back, waves["backward"])

    def misses(x: Array) -> Array:
        both = passes(x)
        return medians_by_length(
            plain,
            lambda row: float(
                np.log(predicted_fraction(*both, row, sm_count) / attention_fraction(sources, row))
            ),
        )

    best = solve(misses, start, (bounds[0], bounds[1]))
    fitted = tuple(f"{side}.{n}" for side in ("forward", "backward")[:sides] for n in numbers)
    why = "half_waves: the generation's" + "; half_rows: of the same one" * (lengths is not None)
    if like is not None:
        why += "; backward over forward: as the backend that sources.yaml names by `like`"
    forward, backward = (
        _pass((rounded(one.efficiency), rounded(one.half_rows)), waves[side])
        for side, one in zip(("forward", "backward"), passes(best), strict=True)
    )
    proof = Evidence(fitted=fitted, source=why)
    bare = AttentionRates(forward=forward, backward=backward, head_dims={}, evidence=proof)
    return _with_head_dims(sources, rows, bare, sm_count)


def _pass(rates: tuple[float, float], waves: Share) -> AttentionPass:
    return AttentionPass(efficiency=rates[0], half_rows=rates[1], half_waves=waves.value)


def _with_head_dims(
    sources: Sources, rows: Rows, bare: AttentionRates, sm_count: int
) -> AttentionRates:
    """The rates with a factor for every other published head dimension (the median over its rows),
    and with the evidence of all rows."""
    at_128 = {
        row.line: attention_fraction(sources, row)
        / predicted_fraction(bare.forward, bare.backward, row, sm_count)
        for row in rows
    }
    dims = sorted({row.size("d") for row in rows})
    factors = {
        dim: rounded(median(at_128[row.line] for row in rows if row.size("d") == dim))
        for dim in dims
    }
    rates = msgspec.structs.replace(bare, head_dims={**factors, REFERENCE_HEAD_DIM: 1.0})
    speeds = [
        at_128[row.line] / float(head_dim_factor(rates, float(row.size("d")))) for row in rows
    ]
    others = tuple(f"head_dims.{dim}" for dim in dims if dim != REFERENCE_HEAD_DIM)
    told = bare.evidence
    proof = evidence(sources, rows, speeds, told.fitted + others, told.source)
    return msgspec.structs.replace(rates, evidence=proof)


# -- memory-bound operators -----------------------------------------------------------------------

NEAR_BYTES = 0.05
"""Logarithmic deviation at which a row's weight starts to fall (soft L1)."""
SMALLEST_S = 1e-8
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
    """Seconds of a memory-bound row, from seconds or from bytes/s; KernelError if it has
    neither."""
    figure = measured(row)
    if figure.quantity == "seconds":
        return figure.value
    once = ONCE.get((row.what, row.shape.get("pass", "")))
    if figure.quantity != "bytes_per_s" or once is None:
        raise KernelError(f"kernels.csv line {row.line}: {row.unit} cannot be converted to seconds")
    return once * elements(row) / figure.value


def reached_hbm(sources: Sources, row: KernelRow, hbm: Mapping[str, float]) -> float:
    """Reached HBM bytes/s of the row's GPU; `hbm`: reached share of the peak by generation."""
    facts = sources.gpus[row.gpu]
    return facts.hbm_bytes_per_s * hbm[facts.generation]


def predicted_s(rates: ByteRates, row: KernelRow, hbm_bytes_per_s: float) -> float:
    which = row.shape["pass"]
    parts = {"forward": (False,), "backward": (True,), "forward+backward": (False, True)}[which]
    count = float(elements(row))
    return fsum(
        float(bytes_s(rates, count, backward=back, hbm_bytes_per_s=hbm_bytes_per_s))
        for back in parts
    )


def fit_bytes(
    sources: Sources, declared: ByteRows, rows: Rows, hbm: Mapping[str, float]
) -> ByteRates:
    """Bytes per element and fixed seconds of both passes, fitted jointly by robust least squares of
    logarithms.  KernelError if the rows have only one pass."""
    own = [row for row in rows if declared.match.holds(row)]
    kinds = {row.shape.get("pass") for row in own}
    if "forward" not in kinds or len(kinds) < 2:
        raise KernelError(f"kernels.csv: a pass has no row: {msgspec.to_builtins(declared.match)}")
    real = np.array([seconds(row) for row in own])
    hbm_rates = [reached_hbm(sources, row, hbm) for row in own]
    weights = document_weights(own)

    def curve(x: Array | list[float]) -> ByteRates:
        return ByteRates(
            forward_bytes=float(x[0]),
            forward_fixed_s=float(x[1]),
            backward_bytes=float(x[2]),
            backward_fixed_s=float(x[3]),
            forward_launches=declared.forward_launches,
            backward_launches=declared.backward_launches,
            evidence=Evidence(),
        )

    def predicted(rates: ByteRates) -> Array:
        pairs = zip(own, hbm_rates, strict=True)
        return np.array([predicted_s(rates, row, rate) for row, rate in pairs])

    best = solve(
        lambda x: weights * np.log(predicted(curve(x)) / real),
        [10.0, 7e-6, 15.0, 1.5e-5],
        ([0.5, 0.0, 0.5, 0.0], [500.0, 2e-4, 500.0, 4e-4]),
        NEAR_BYTES,
    )
    rates = curve([rounded(x, SMALLEST_S) for x in best])
    speeds = predicted(rates) / real
    fitted = ("forward_bytes", "forward_fixed_s", "backward_bytes", "backward_fixed_s")
    why = f"launches: {declared.launches_source}"
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
    speeds = predicted(rates) / real
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
    operators = sources.operators

    def every(declared: Mapping[str, ByteRows]) -> dict[str, ByteRates]:
        return {name: fit_bytes(sources, part, rows, hbm) for name, part in declared.items()}

    return OperatorRates(
        unfused_attention=fit_unfused(sources, rows, hbm, gemms),
        norm=every(operators.norm),
        rope=every(operators.rope),
        activation=every(operators.activation),
        loss=every(operators.loss),
    )
