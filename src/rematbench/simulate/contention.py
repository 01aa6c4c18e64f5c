"""Contention of a program's copies with other work: copies in the other direction, NICs, HBM.

The factors are fixed for a whole program and follow from its actions.  A copy's cost does not
depend on the work that runs at its moment, but the plan decides what runs beside copies in general.
"""

from collections.abc import Callable
from itertools import pairwise
from math import fsum

from rematbench.cost.copies import ALONE, Crowd
from rematbench.problem import Problem
from rematbench.program.action import Action, Kind
from rematbench.program.program import Program, RankProgram

KERNELS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def crowd(problem: Problem, program: Program, kernel_s: Callable[[Action, int], float]) -> Crowd:
    """The work that a program's copies run beside; `kernel_s`: seconds of a kernel beside no copy.

    Sends between nodes cross the GPU's x16 link as copies do, because the NIC hangs on the same
    PCIe switch.  Collectives at the end of a step run beside no copies and do not count.
    """
    moved = {kind: _moved(program, kind) for kind in (Kind.D2H, Kind.H2D)}
    total = sum(moved.values())
    if not total:
        return ALONE
    sent = fsum(
        _sent_bytes(problem, action) * runs
        for rank in program.ranks
        for block, runs in zip(rank.blocks, rank.runs, strict=True)
        for action in block.actions
        if action.kind is Kind.SEND and _crosses(problem, action, rank.rank)
    )
    busy_s = _kernels_s(program, kernel_s)
    cost = problem.cost
    hbm_bytes_per_s = cost.cluster.hbm_bytes_per_s * cost.gpu.hbm_efficiency
    return Crowd(
        both=_both(program, total),
        sent_per_d2h=sent / moved[Kind.D2H] if moved[Kind.D2H] else 0.0,
        received_per_h2d=sent / moved[Kind.H2D] if moved[Kind.H2D] else 0.0,
        drawn=total / hbm_bytes_per_s / busy_s if busy_s else 0.0,
    )


def _kernels_s(program: Program, kernel_s: Callable[[Action, int], float]) -> float:
    """Seconds of all kernels of all ranks.  Ranks that share a block share its kernels' seconds,
    unless a collective runs beside one of them."""
    known: dict[tuple[int, int], list[float]] = {}
    found: list[float] = []
    for rank in program.ranks:
        for block, runs in zip(rank.blocks, rank.runs, strict=True):
            kernels = [action for action in block.actions if action.kind in KERNELS]
            alike = not any(action.beside for action in kernels)
            key = (id(block), -1 if alike else rank.rank)
            if key not in known:
                known[key] = [kernel_s(action, rank.rank) for action in kernels]
            found += [seconds * runs for seconds in known[key]]
    return fsum(found)


def _moved(program: Program, kind: Kind) -> int:
    """Bytes of all copies of a kind, except copies of states after the last kernel."""
    return sum(
        action.nbytes * runs
        for rank in program.ranks
        for block, runs in zip(rank.blocks, rank.runs, strict=True)
        for action in block.actions
        if action.kind is kind and action.part
    )


def _both(program: Program, total: int) -> float:
    """The share of copied bytes that run beside a copy in the other direction: bytes of whole-chunk
    copies issued next to a copy of the other direction and of another pass, because both then run
    beside the same pass.  Copies by layer do not count: they run in their own pass, offloads in
    forwards and reloads in backwards."""
    beside = 0
    for rank in program.ranks:
        copies = [step for step in rank.steps if rank.blocks[step.block].label in ("D2H", "H2D")]
        sizes = {step.block: _block_bytes(rank, step.block) for step in copies}
        met = {
            at + side
            for at, (one, other) in enumerate(pairwise(copies))
            if one.block != other.block
            and rank.blocks[one.block].label != rank.blocks[other.block].label
            and one[1:] != other[1:]
            for side in (0, 1)
        }
        beside += sum(sizes[copies[at].block] for at in met)
    return beside / total


def _block_bytes(rank: RankProgram, block: int) -> int:
    return sum(action.nbytes for action in rank.blocks[block].actions)


def _crosses(problem: Problem, action: Action, rank: int) -> bool:
    peer = {"f": rank + 1, "b": rank - 1}.get(action.op)
    return peer is not None and problem.cost.crosses(rank, peer)


def _sent_bytes(problem: Problem, action: Action) -> float:
    """Bytes that one rank sends of a message: a 1/tp part where all tensor-parallel ranks hold the
    whole tensor (no sequence parallelism)."""
    return action.nbytes / (1 if problem.layout.sp else problem.layout.tp)
