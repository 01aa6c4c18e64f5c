"""Coverage: the share of published errors inside the bands that other sources teach.

For each source in turn, its rows are judged by the bands learnt from all other sources.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from msgspec import Struct

from rematbench.evidence.accuracy import SPEED, Row, number
from rematbench.evidence.bands import (
    Errors,
    bands_of,
    by_source,
    own_quantile,
    quantile,
    ratio_errors,
)
from rematbench.evidence.job_evidence import Known
from rematbench.evidence.left_out import log_error


class Coverage(Struct, frozen=True, kw_only=True):
    """How well bands hold a source's rows: the share of rows inside, the median half-width, and the
    80 % quantile of the rows' absolute errors (both logarithms)."""

    source: str
    rows: int
    inside: float
    half_width: float
    error: float


def coverage(known: Sequence[Known]) -> list[Coverage]:
    """The coverage of every source under bands learnt from the other sources."""
    found = []
    for source, own in by_source(known).items():
        bands = bands_of([cell for cell in known if cell.source != source])
        widths = [bands.band(cell.job).half_width for cell in own]
        errors = [abs(cell.log_error) for cell in own]
        found.append(
            Coverage(
                source=source,
                rows=len(own),
                inside=fmean(e <= w for e, w in zip(errors, widths, strict=True)),
                half_width=median(widths),
                error=own_quantile(errors),
            )
        )
    return found


def shipped_coverage(rows: Sequence[Row]) -> list[Coverage]:
    """The coverage of every source under the bands in the columns of its predicted rows."""
    cells: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        error, high, made = log_error(row), number(row, "pred_high"), number(row, f"pred_{SPEED}")
        if error is not None and high and made:
            cells[row["source"]].append((abs(error), math.log(high / made)))
    return [
        Coverage(
            source=source,
            rows=len(some),
            inside=fmean(error <= width for error, width in some),
            half_width=median(width for _, width in some),
            error=own_quantile([error for error, _ in some]),
        )
        for source, some in cells.items()
    ]


def ratio_coverage(known: Iterable[Known], *, one_layout: bool) -> list[Coverage]:
    """The coverage of every source's ratios (its pairs of rows) under the band that the ratios of
    the other sources teach."""
    errors = ratio_errors(known, one_layout=one_layout)
    found = []
    for source, own in errors.items():
        width = quantile({key: some for key, some in errors.items() if key != source})
        found.append(
            Coverage(
                source=source,
                rows=len(own),
                inside=fmean(error <= width for error in own),
                half_width=width,
                error=own_quantile(own),
            )
        )
    return found


def pooled(found: Sequence[Coverage], errors: Errors) -> Coverage:
    """The coverage over all sources, each of weight 1; `errors`: those that `found` is about."""
    return Coverage(
        source="all, each source weighs 1",
        rows=sum(map(len, errors.values())),
        inside=fmean(one.inside for one in found),
        half_width=median(one.half_width for one in found),
        error=quantile(errors),
    )
