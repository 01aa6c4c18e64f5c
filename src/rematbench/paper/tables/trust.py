"""Two short tables of trust: errors by kind of evidence, and the regret of decisions by source.

The first screen of the report shows both; bands.csv and decisions.csv have the underlying sources
and sweeps.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from rematbench.evidence.bands import LEVEL, Errors, bands_of, by_source, quantile
from rematbench.evidence.decisions import Decision, mean_lines, summary
from rematbench.evidence.job_evidence import Known, covered
from rematbench.host.table import Column, Table, percent, whole

NOTHING, ALL = "nothing", "all rows"
KINDS = (NOTHING, "stack", "generation", "scale", "context", "mechanism", ALL)


def evidence_table(known: Sequence[Known]) -> Table:
    """Errors by the property of a job that no other source published.  A row counts at each of its
    properties outside, or at NOTHING, and at ALL."""
    errors: dict[str, Errors] = {kind: defaultdict(list) for kind in KINDS}
    widths: dict[str, list[float]] = defaultdict(list)
    for source, own in by_source(known).items():
        others = [cell for cell in known if cell.source != source]
        bands, published = bands_of(others), covered(cell.job for cell in others)
        for cell in own:
            width = bands.band(cell.job).half_width
            for kind in (*(published.outside(cell.job) or (NOTHING,)), ALL):
                errors[kind][source].append(abs(cell.log_error))
                widths[kind].append(width)
    rows = [
        {
            "outside": kind,
            "sources": len(some),
            "rows": len(widths[kind]),
            "mean": fmean(fmean(own) for own in some.values()) if some else None,
            "error": quantile(some) if some else None,
            "half_width": median(widths[kind]) if some else None,
        }
        for kind, some in errors.items()
    ]
    return Table(
        name="evidence",
        title="Error by kind of evidence, each source left out",
        columns=(
            Column("outside", "outside"),
            Column("sources", "sources", whole),
            Column("rows", "rows", whole),
            Column("mean", "mean error %", percent),
            Column("error", f"{100 * LEVEL:.0f} % are below %", percent),
            Column("half_width", "band %", percent),
        ),
        rows=tuple(rows),
        note="Outside: what of a published row no other source has; a row counts at each such "
        "thing. Errors of speeds (logarithms); every source weighs 1.",
    )


def regret_table(found: Sequence[Decision]) -> Table:
    """The mean regrets of every source over its sweeps, and over all sweeps."""
    groups: dict[str, list[Decision]] = defaultdict(list)
    for one in found:
        groups[one.job["source"]].append(one)
    lines: list[Mapping[str, Any]] = [
        {"source": source.partition(",")[0], "sweeps": len(some), **summary(some)}
        for source, some in groups.items()
    ]
    lines += [
        {"source": "mean over sweeps", "sweeps": count, **means}
        for count, means in mean_lines(found)
    ]
    return Table(
        name="regret",
        title="Decisions: what the layout predicted to be fastest loses",
        columns=(
            Column("source", "source"),
            Column("sweeps", "sweeps", whole),
            Column("left_out", "left out %", percent),
            Column("regret", "as shipped %", percent),
            Column("floor", "one MFU %", percent),
        ),
        rows=tuple(lines),
        note="Of the best measured speed; a pick that was out of memory loses all. Left out: "
        "constants that never saw the source; as shipped: constants fitted to some rows of each "
        "source. One MFU: with a memory formula. MosaicML and NVIDIA (NeMo) publish no sweep of "
        "four layouts.",
    )
