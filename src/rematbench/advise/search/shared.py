"""What searches share: lowered programs, which no cluster changes."""

from typing import NamedTuple

from rematbench.advise.search.small import Known
from rematbench.evaluate.evaluator import Evaluator


class Shared(NamedTuple):
    """`probes`: the lowered programs of probes, which the shards of a search share; `programs`:
    lowered plans, where searches of the same model and length on other clusters follow."""

    probes: Known
    programs: Evaluator | None = None
