"""The tables of all studies."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rematbench.studies.answers import StudyAnswer
from rematbench.studies.claims import Claims
from rematbench.studies.lynx import lynx_ladder, lynx_layouts
from rematbench.studies.memo import fragmentation_table, memo_average, memo_lengths, memo_longest
from rematbench.studies.mst import mst_longest, mst_memory
from rematbench.studies.rows import Told, published_numbers
from rematbench.tables.table import Table


def study_tables(
    answers: Sequence[StudyAnswer], rows: Iterable[Mapping[str, str]], claims: Claims
) -> list[Table]:
    """Every table whose study has answers."""
    told = published_numbers(rows, claims)
    makers: dict[str, tuple[Callable[[list[StudyAnswer], Told], Table], ...]] = {
        "lynx": (lynx_ladder, lynx_layouts),
        "mst": (mst_longest, mst_memory),
        "memo": (memo_lengths, memo_longest, memo_average, fragmentation_table),
    }
    made = []
    for study, tables in makers.items():
        own = [answer for answer in answers if answer.study == study]
        made += [make(own, told) for make in tables if own]
    return made
