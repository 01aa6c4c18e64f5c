"""Plans that place a base's optimizer states in pieces."""

from collections.abc import Callable

from msgspec.structs import replace

from rematbench.engine.lowering.plan_checks import too_early
from rematbench.engine.lowering.states.state_shards import rank_sharded
from rematbench.plan import Pieces, Place, Plan, StateFate, passes_refusal, slices_refusal
from rematbench.problem import Problem
from rematbench.solve.kept import smallest_fitting


def refusal(
    problem: Problem, base: Plan, pieces: Pieces | None = None, *, gradients: bool = False
) -> str:
    """Why a base's optimizer states cannot be placed in pieces; empty if they can. `pieces`: the
    pieces, if they may start early; `gradients`: whether gradients leave in the backward."""
    optimizer = base.state("optimizer")
    if optimizer.home == "host" or optimizer.pieces is not None:
        return "the base already places the optimizer's states"
    if optimizer.update == "backward":
        return "the base updates in the backward, which leaves no states to place"
    if gradients:
        moved = with_fates(base, replace(base.state("gradient"), home="host"))
        layout = problem.layout
        work, system = problem.workload, problem.system
        passes = passes_refusal(moved, layout, system, work.model)
        if refused := passes or slices_refusal(moved, system, layout, work, problem.attention):
            return refused
    return too_early(base, problem, pieces) if pieces else ""


def with_fates(base: Plan, *fates: StateFate) -> Plan:
    """The base with other fates of some kinds of states, which stand last."""
    kinds = {fate.kind for fate in fates}
    return replace(base, states=(*(fate for fate in base.states if fate.kind not in kinds), *fates))


def shares(problem: Problem, base: Plan) -> list[int]:
    """The number of parameters that each pipeline rank's optimizer updates."""
    fate = base.state("optimizer")
    return [rank_sharded(problem, base, rank, fate) for rank in range(problem.layout.pp)]


def piece_size(problem: Problem, base: Plan, most: int) -> tuple[int, int]:
    """(parameters of a piece, at most `most`; the number of pieces of the largest share)."""
    counts = shares(problem, base)
    size = min(most, *counts)
    return size, -(-max(counts) // size)


def even(count: int, share: float, one: Place, other: Place) -> tuple[Place, ...]:
    """`count` places: a share of them (rounded) is `one`, spread evenly among those of `other`."""
    ones = round(count * share)
    return tuple(
        one if (at + 1) * ones // count > at * ones // count else other for at in range(count)
    )


def placed(problem: Problem, base: Plan, pieces: Pieces, *, gradients: bool) -> Plan:
    """The base with its optimizer states in pieces.  `gradients`: whether gradients of pieces that
    the host updates leave the device once they are reduced, not at the end of the step."""
    if set(pieces.places) == {"device"}:
        return base
    optimizer = replace(base.state("optimizer"), home="host", pieces=pieces)
    gradient = base.state("gradient")
    if gradients and "host" in pieces.places:
        gradient = replace(gradient, home="host")
    return with_fates(base, gradient, optimizer)


def smallest_share(
    problem: Problem, base: Plan, size: int, at: Callable[[float], Plan]
) -> tuple[float, str]:
    """The smallest share of the states, in pieces of `size` parameters, with which the plan
    `at(share)` fits, and what bounds the share."""
    steps = -(-max(shares(problem, base)) // size)
    found = smallest_fitting(problem, lambda k: at(k / steps), steps)
    if found is None:
        return 1.0, "no share fits the device memory"
    return found / steps, "device ledger"
