"""The cells of a suite that are measured: one that cannot be planned is a row of its own."""

from pathlib import Path

from rematbench.plan import Plan, Unsupported
from rematbench.worlds.records.cell import cells
from rematbench.worlds.records.suite import load_suite

METHOD = '''"""no_plan: raises.

Claim: none.
Source: ours, for the tests.
Deviations: none.
"""

from typing import ClassVar

from msgspec import Struct

from rematbench.plan import Plan, PlanError
from rematbench.problem import Problem


class NoPlan(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No parameters."""

    name: ClassVar[str] = "no_plan"

    def plan(self, problem: Problem, base: Plan) -> Plan:
        """There is none."""
        raise PlanError("no such plan")
'''
SUITE = """
problems:
  - {name: tiny, why: small, model: tiny-llama, cluster: this-machine, system: rematbench,
     gpus: 1, seq_len: 64, global_batch: 1}
variants:
  - {method: no_plan}
"""


def test_a_method_that_raises_while_planning_does_not_end_the_suite(tmp_path: Path) -> None:
    (tmp_path / "no_plan.py").write_text(METHOD)
    suite = tmp_path / "suite.yaml"
    suite.write_text(SUITE)
    found = {cell.name: cell.plan for cell in cells(load_suite(suite), [tmp_path])}
    assert found["tiny.no_plan.0"] == Unsupported("no such plan")
    assert isinstance(found["tiny.keep_all.0"], Plan)
