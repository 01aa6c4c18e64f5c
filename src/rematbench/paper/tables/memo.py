"""Tables of MEMO: longest sequences, fragmentation."""

from pathlib import Path

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.sheet.table import (
    Column,
    Table,
    columns,
    gib,
    signed_percent,
    whole,
)
from rematbench.paper.studies.answers import StudyAnswer, line, load_answers
from rematbench.paper.studies.declarations import load_claims
from rematbench.paper.studies.rows import (
    METHOD,
    SIMULATED,
    WORKLOAD,
    PublishedNumbers,
    number_of,
    of,
    published_number,
    published_numbers,
    ratio,
)

INPUTS = {"answers": "results/paper/studies/memo.json", "published": "results/published/claims.csv"}
READS = ("config/claims.yaml",)
TABLES = ("memo_fragmentation", "memo_longest")


def build(answers: Path, published: Path) -> list[Table]:
    """All tables of the study."""
    found = load_answers([answers])
    numbers = published_numbers(read_sheet(published), load_claims())
    return [memo_longest(found, numbers), fragmentation_table(found)]


def memo_longest(answers: list[StudyAnswer], numbers: PublishedNumbers) -> Table:
    """The longest sequence of each system and layout."""
    rows = []
    for answer in of(answers, "longest"):
        claimed, ours = published_number(numbers, answer, "seq_len"), number_of(answer, "seq_len")
        error = ours / claimed - 1 if claimed and ours else None
        rows.append({**line(answer), "published": claimed, "error": error})
    return Table(
        name="memo_longest",
        title="MEMO: longest sequence of 7B on eight A800",
        columns=(
            WORKLOAD,
            METHOD,
            *columns("layout"),
            Column("seq_len", "ours, tokens", whole),
            Column("published", "published (second-hand), tokens", whole),
            *columns("error peak_device_bytes"),
            Column("reason", "next length"),
        ),
        rows=tuple(rows),
        note=SIMULATED + "The published lengths come without a layout, so each of our layouts "
        "repeats them.",
    )


def fragmentation_table(answers: list[StudyAnswer]) -> Table:
    """Bytes of a caching allocator compared with the static plan, for MEMO and its baselines."""
    rows = []
    for answer in of(answers, "fragmentation"):
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
            WORKLOAD,
            METHOD,
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
