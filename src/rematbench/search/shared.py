"""What the searches of one model and length share: lowered programs, which no cluster changes."""

from rematbench.choose.programs import Programs
from rematbench.search.probe import Known


class Shared(Programs):
    """Lowered plans, and the lowered programs of probes (`probes`)."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: Known = {}
