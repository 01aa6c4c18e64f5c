"""Bytes of a static memory plan beside those that PyTorch's caching allocator reserves."""

from msgspec import Struct

from rematbench.lowering.lower import lower
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.program.replay import replay
from rematbench.simulate.evaluate import fullest_rank, program_bytes
from rematbench.solve.memory_plan import memory_plan


class Fragmentation(Struct, frozen=True, kw_only=True):
    """Device bytes of the fullest rank, states included. `live_bytes` are alive at the peak;
    `planned_bytes` is the two-level plan of MEMO; `reserved_bytes` and `expandable_bytes` are what
    the caching allocator reserves with default and with expandable segments."""

    rank: int
    live_bytes: int
    planned_bytes: int
    reserved_bytes: int
    expandable_bytes: int


def fragmentation(problem: Problem, plan: Plan) -> Fragmentation:
    """The bytes of a plan's fullest rank, replayed through an allocator on an unlimited device."""
    program = lower(plan, problem)
    ranks = program_bytes(problem, plan, program)
    fullest = fullest_rank(ranks)
    held, actions = ranks[fullest], program.ranks[fullest]
    states = (held.parameter, held.gradient, held.optimizer)
    resident = held.blocks(actions.late)
    planned = memory_plan(actions)
    return Fragmentation(
        rank=fullest,
        live_bytes=sum(states) + planned.lower_bound_bytes,
        planned_bytes=sum(states) + planned.peak_bytes,
        reserved_bytes=replay(actions, resident, None).reserved_bytes,
        expandable_bytes=replay(actions, resident, None, mode="expandable").reserved_bytes,
    )
