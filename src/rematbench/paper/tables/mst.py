"""The table of MsT: longest sequences."""

from pathlib import Path

from rematbench.evidence.published.sheets import read_sheet
from rematbench.paper.sheet.table import Column, Table, columns, fixed, whole
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

INPUTS = {"answers": "results/paper/studies/mst.json", "published": "results/published/claims.csv"}
READS = ("config/claims.yaml",)
TABLES = ("mst_longest",)
EARLY = ", early update"


def build(answers: Path, published: Path) -> Table:
    """The table of the study."""
    found = load_answers([answers])
    numbers = published_numbers(read_sheet(published), load_claims())
    return mst_longest(found, numbers)


def mst_longest(answers: list[StudyAnswer], numbers: PublishedNumbers) -> Table:
    """The longest sequence of each method, and its ratios to vanilla and to recomputation."""
    found = of(answers, "longest")
    rows = []
    for answer in found:
        early = EARLY if answer.method.endswith(EARLY) else ""
        same = {a.method: a for a in found if a.workload == answer.workload}
        length = number_of(answer, "seq_len")
        claimed = published_number(numbers, answer, "seq_len")
        rows.append(
            {
                **line(answer),
                "published": claimed,
                "error": length / claimed - 1 if length and claimed else None,
                "over_vanilla": ratio(length, number_of(same.get(f"vanilla{early}"), "seq_len")),
                "over_recompute": ratio(
                    length, number_of(same.get(f"recompute{early}"), "seq_len")
                ),
            }
        )
    order = list(dict.fromkeys(row["workload"] for row in rows))
    rows.sort(key=lambda row: (order.index(row["workload"]), row["method"].endswith(EARLY)))
    return Table(
        name="mst_longest",
        title="MsT: longest sequence on one A100 80 GB",
        columns=(
            WORKLOAD,
            METHOD,
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
