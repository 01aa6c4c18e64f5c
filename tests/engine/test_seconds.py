"""Ranks that are alike share compiled blocks: no second may change by it."""

from typing import Any

import pytest

from rematbench.engine.lowering.blocks.fates import ChunkPlace, covered
from rematbench.engine.lowering.lower import lower
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import RankedSeconds, simulate
from rematbench.engine.simulate.seconds import ActionCosts
from rematbench.evaluate.breakdown import WithoutTraffic
from rematbench.plan import Keep, Rule, Select
from tests.problems import BALANCED, half, on, problem, transfers

LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2, "pp": 4, "global_batch": 4},
    {"pp": 4, "cp": 2, "dp": 2, "global_batch": 8},
    {"system": "megatron-kwai", "tp": 2, "sp": False, "pp": 4, "dp": 3, "global_batch": 12},
]


class Apart(WithoutTraffic):
    """The costs of a host that takes its time, with no two ranks alike."""

    def __init__(self, costs: ActionCosts) -> None:
        super().__init__(costs, frozenset())
        self.timing = costs.timing  # type: ignore[method-assign]

    def alike(self, rank: int) -> int:
        """Only the rank itself."""
        return rank


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_action_takes_equally_long_on_ranks_that_are_alike(
    layout: dict[str, Any], gpus: int
) -> None:
    given = on(problem(**layout), gpus_per_node=gpus)
    costs = ActionCosts(given)
    assert isinstance(costs, RankedSeconds)
    program = lower(transfers(given.base_plan.with_rules(BALANCED, half())), given)
    first: dict[Any, int] = {}
    for rank in program.ranks:
        like = first.setdefault(costs.alike(rank.rank), rank.rank)
        for block in rank.blocks:
            for action in block.actions:
                if action.kind.name not in ("FREE", "ALLOC", "RECV", "WAIT", "EVENT"):
                    assert costs(action, rank.rank) == costs(action, like)
                    assert costs.issue_s(action, rank.rank) == costs.issue_s(action, like)
    for run in (simulate, simulate_chunks):
        assert run(program, costs) == run(program, Apart(costs))


def test_links_that_differ_are_told_apart() -> None:
    """Two stages on a node: every other send leaves it."""
    costs = ActionCosts(on(problem(**LAYOUTS[0]), gpus_per_node=4))
    assert [costs.alike(0) == costs.alike(rank) for rank in range(4)] == [True, False, True, False]


def test_what_rules_cover_of_a_chunk() -> None:
    where = ChunkPlace(stage=1, chunk=0, layers=(6, 7))
    selects = [Select(), Select(stages=(0,)), Select(layers=(7, 8)), Select(chunks=(1,))]
    rules = [Rule(select, Keep()) for select in selects]
    assert covered(rules, where) == ((-1,), None, (1,), None)
