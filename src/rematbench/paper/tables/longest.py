"""Tables of MEMO and MsT: longest sequences, and the fragmentation of MEMO's baselines."""

from pathlib import Path
from typing import Any

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.sheet.table import (
    Column,
    Table,
    columns,
    fixed,
    gib,
    signed_percent,
    whole,
)
from rematbench.paper.studies.answers import StudyAnswer, line, load_answers
from rematbench.paper.studies.declarations import load_claims
from rematbench.paper.studies.rows import (
    PublishedNumbers,
    number_of,
    published_number,
    published_numbers,
    ratio,
)

INPUTS = {
    "memo": "results/paper/studies/memo.json",
    "mst": "results/paper/studies/mst.json",
    "published": "results/published/claims.csv",
}
READS = ("config/claims.yaml",)
TABLES = ("memo_fragmentation", "memo_longest", "mst_longest")
EARLY = ", early update"
SIMULATED = "World: simulated. "


def build(memo: Path, mst: Path, published: Path) -> list[Table]:
    """All tables of the two studies."""
    found = load_answers([memo])
    numbers = published_numbers(read_sheet(published), load_claims())
    return [
        memo_longest(longest_rows(found, numbers)),
        fragmentation_table(found),
        mst_longest(longest_rows(load_answers([mst]), numbers)),
    ]


def longest_rows(answers: list[StudyAnswer], numbers: PublishedNumbers) -> list[dict[str, Any]]:
    """The longest sequence of each method beside the published one, and its ratios to vanilla and
    to recomputation with the same kind of update; of a workload early updates come last."""
    found = [answer for answer in answers if answer.ask == "longest"]
    rows = []
    for answer in found:
        early = EARLY if answer.method.endswith(EARLY) else ""
        same = {a.method: a for a in found if a.workload == answer.workload}
        length, claimed = number_of(answer, "seq_len"), published_number(numbers, answer, "seq_len")
        over = (
            number_of(same.get(f"{name}{early}"), "seq_len") for name in ("vanilla", "recompute")
        )
        over_vanilla, over_recompute = (ratio(length, other) for other in over)
        rows.append(
            {
                **line(answer),
                "published": claimed,
                "error": length / claimed - 1 if length and claimed else None,
                "over_vanilla": over_vanilla,
                "over_recompute": over_recompute,
            }
        )
    order = list(dict.fromkeys(row["workload"] for row in rows))
    rows.sort(key=lambda row: (order.index(row["workload"]), row["method"].endswith(EARLY)))
    return rows


def memo_longest(rows: list[dict[str, Any]]) -> Table:
    """The longest sequence of each system and layout."""
    return Table(
        name="memo_longest",
        title="MEMO: longest sequence of 7B on eight A800",
        columns=(
            *columns("workload method layout"),
            Column("seq_len", "ours, tokens", whole),
            Column("published", "published (second-hand), tokens", whole),
            *columns("error peak_device_bytes"),
            Column("reason", "next length"),
        ),
        rows=tuple(rows),
        note=SIMULATED + "The published lengths come without a layout, so each of our layouts "
        "repeats them.",
    )


def mst_longest(rows: list[dict[str, Any]]) -> Table:
    """The longest sequence of each method, and its ratios to vanilla and to recomputation."""
    return Table(
        name="mst_longest",
        title="MsT: longest sequence on one A100 80 GB",
        columns=(
            *columns("workload method"),
            Column("seq_len", "ours, tokens", whole),
            Column("published", "published, tokens", whole),
            *columns("error"),
            Column("over_vanilla", "times vanilla", fixed(1)),
            Column("over_recompute", "times recompute", fixed(1)),
            *columns("peak_device_bytes"),
            Column("reason", "next length"),
        ),
        rows=tuple(rows),
        note=SIMULATED
        + "Early update means an optimizer in the backward; ratios compare two rows with it or "
        "two rows without it. Published lengths are in thousands of tokens. The real stack also "
        "loses memory to fragmentation, which this table does not model.",
    )


def fragmentation_table(answers: list[StudyAnswer]) -> Table:
    """Bytes of a caching allocator compared with the static plan, for MEMO and its baselines."""
    rows = []
    for answer in (a for a in answers if a.ask == "fragmentation"):
        live = number_of(answer, "live_bytes")
        reserved, expandable = (
            number_of(answer, "reserved_bytes"),
            number_of(answer, "expandable_bytes"),
        )
        waste = {"waste": ratio(reserved, live), "expandable_waste": ratio(expandable, live)}
        planned = ratio(number_of(answer, "planned_bytes"), live)
        less = {key: value - 1 for key, value in waste.items() if value}
        rows.append({**line(answer), **less, "plan_waste": planned - 1 if planned else None})
    return Table(
        name="memo_fragmentation",
        title="Fragmentation: what the caching allocator reserves, and what a plan needs",
        columns=(
            *columns("workload method"),
            Column("status", "verdict"),
            Column("live_bytes", "alive at the peak GiB", gib),
            Column("planned_bytes", "planned GiB", gib),
            Column("plan_waste", "planned over alive %", signed_percent),
            *columns("reserved_bytes"),
            Column("waste", "reserved over alive %", signed_percent),
            Column("expandable_bytes", "expandable segments GiB", gib),
            Column("expandable_waste", "expandable over alive %", signed_percent),
            Column("usable_bytes", "usable GiB", gib),
        ),
        rows=tuple(rows),
        note=SIMULATED + "The allocator has no memory limit in this table, so it shows its size "
        "before it releases cached segments. Published for a baseline at 512K tokens: 73.5 GB "
        "reserved for "
        "65.7 allocated and 76.5 for 68.2, 12 % (figure 1a).",
    )
