"""Refit attention: share of the peak by backend, length, heads and head dimension.

A curve is fitted to medians: at every length to the median log ratio over sources, by least
squares.
"""

from collections.abc import Callable
from statistics import median

import msgspec
import numpy as np

from rematbench.costs.kernel_seconds import attention_share, head_dim_factor
from rematbench.evidence.kernels.kernel_rows import PASSES, KernelRow, measured
from rematbench.evidence.kernels.kernel_sources import (
    Array,
    Rows,
    Sources,
    evidence,
    rounded,
    solve,
)
from rematbench.spec.kernel_rates import (
    REFERENCE_HEAD_DIM,
    AttentionPass,
    AttentionRates,
    Evidence,
    Share,
)

START = (0.5, 500.0)
LOWEST = (0.01, 1.0)
HIGHEST = (1.5, 2e4)
"""Start and bounds of (efficiency, half_rows) of a direction."""


def attention_fraction(sources: Sources, row: KernelRow) -> float:
    """Share of the GPU's dense peak that an attention row reaches, causal pairs counted half."""
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

    The efficiency and, where the rows have several lengths, half_rows are fitted too and dropped.
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

    def told(x: Array | list[float]) -> Array:
        half_rows = 0.0 if one_length else float(x[2])
        one = AttentionPass(efficiency=float(x[0]), half_waves=float(x[1]), half_rows=half_rows)
        return np.array([predicted_fraction(one, one, row, sm_count) for row in rows])

    best = solve(
        lambda x: np.log(told(x) / real), [0.6, 1.0, 400.0], ([0.01, 0.0, 0.0], [2.0, 50.0, 2e4])
    )
    speeds = dict(zip((row.line for row in rows), real / told(best), strict=True))
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
) -> AttentionRates:
    """The fitted rates of a backend: efficiency and half_rows of both directions, then a factor for
    every other head dimension.  `like`: one direction is fitted, and the ratio of backward to
    forward is that of this backend."""
    plain = [row for row in rows if row.size("d") == REFERENCE_HEAD_DIM]
    sides = 2 if like is None else 1

    def passes(x: Array | list[float]) -> tuple[AttentionPass, AttentionPass]:
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

    best = solve(misses, START * sides, (LOWEST * sides, HIGHEST * sides))
    fitted: tuple[str, ...] = ("forward.efficiency", "forward.half_rows")
    why = "half_waves: the generation's"
    if like is None:
        fitted += ("backward.efficiency", "backward.half_rows")
    else:
        why += "; backward over forward: as the backend that sources.yaml names by `like`"
    forward, backward = (
        AttentionPass(
            efficiency=rounded(one.efficiency),
            half_rows=rounded(one.half_rows),
            half_waves=one.half_waves,
        )
        for one in passes(best)
    )
    bare = AttentionRates(
        forward=forward,
        backward=backward,
        head_dims={},
        evidence=Evidence(fitted=fitted, source=why),
    )
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
    speeds = {
        row.line: at_128[row.line] / float(head_dim_factor(rates, float(row.size("d"))))
        for row in rows
    }
    others = tuple(f"head_dims.{dim}" for dim in dims if dim != REFERENCE_HEAD_DIM)
    told = bare.evidence
    proof = evidence(sources, rows, speeds, told.fitted + others, told.source)
    return msgspec.structs.replace(rates, evidence=proof)
