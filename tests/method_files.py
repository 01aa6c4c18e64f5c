"""The text of a method's file, for tests that drop one into a folder."""

from textwrap import indent

FILE = '''"""{name}: {does}.

Claim: none.
Source: a test.
Deviations: none.
"""

{head}from typing import ClassVar

from msgspec import Struct

from rematbench.plan import Offload, Plan, Recompute, Rule, Select, Unsupported
from rematbench.problem import Problem


class Mine(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Its settings."""

    name: ClassVar[str] = "{name}"
{fields}
    def plan(self, problem: Problem, base: Plan) -> Plan:
        """Its plan."""
{body}
'''


def method_file(
    name: str, body: str = "return base", *, does: str = "a test", head: str = "", fields: str = ""
) -> str:
    """A file of a method with more imports, fields and another plan."""
    inside = indent(fields, "    ") + "\n" if fields else ""
    body = indent(body, "        ")
    return FILE.format(name=name, does=does, head=head, fields=inside, body=body)
