"""What searches share: lowered programs, which no cluster changes."""

from typing import NamedTuple

from rematbench.evaluate.programs import Programs
from rematbench.search.small import Known


class Shared(NamedTuple):
    """`probes`: the lowered programs of probes, which the shards of a search share; `programs`:
    lowered plans, where searches of the same model and length on other clusters follow."""

    probes: Known
    programs: Programs | None = None
