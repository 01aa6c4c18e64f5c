"""keep_all: every activation stays on the device from its forward to its backward.

Claim: the fastest plan wherever it fits, and the reference for all other methods.
Source: the default of every framework.
Deviations: none.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.method import Plan, Problem


class KeepAll(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No parameters."""

    name: ClassVar[str] = "keep_all"

    def plan(self, problem: Problem, base: Plan) -> Plan:
        return base
