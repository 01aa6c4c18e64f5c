"""How a program's copies compete with opposite copies, NIC traffic and HBM traffic.

The factors are constant for a program and follow from its actions: the seconds of a copy depend on
the work that overlaps copies on average, not on the work at the time of the copy.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import fsum
from typing import NamedTuple

from rematbench.costs.copies import NO_TRAFFIC, CopyTraffic
from rematbench.costs.operators.ops import Comm
from rematbench.engine.program.action import (
    COMM_KIND,
    COMPUTE,
    HOST_UPDATE,
    STATES_DOWN,
    STATES_UP,
    WEIGHTS_UP,
    Action,
    Kind,
)
from rematbench.engine.program.program import Block, Program, RankProgram
from rematbench.engine.program.storage import COPIED_OUT, STEP, Event
from rematbench.problem import Problem

KERNELS = (Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
COLLECTIVES = frozenset(COMM_KIND.values())
PASSES = ("F", "B")
"""The labels of blocks with kernels."""


# Why: docs/decisions/engine.md, Do rates change while streams share a resource?
def copy_traffic(
    problem: Problem, program: Program, kernel_s: Callable[[Action, int], float]
) -> CopyTraffic:
    """Return the work that overlaps a program's copies. `kernel_s`: seconds of a kernel that
    overlaps no copy.

    Traffic to another node crosses the GPU's x16 link as copies do, because the NIC is on the same
    PCIe switch. This traffic consists of pipeline messages, and of collectives in passes that
    copies overlap. Collectives at the end of a step overlap no copies and do not count.
    """
    moved = {kind: _moved(program, kind) for kind in (Kind.D2H, Kind.H2D)}
    total = sum(moved.values())
    if not total:
        return NO_TRAFFIC
    sends = {
        id(block): [action for action in block.written if action.kind is Kind.SEND]
        for block, _ in program.block_runs
    }
    cost = problem.cost
    # Without sequence parallelism each rank sends a part of the tensor that all of them hold.
    senders = 1 if problem.layout.sp else problem.layout.tp
    sent = fsum(
        action.nbytes / senders * runs
        for rank in program.ranks
        for block, runs in zip(rank.blocks, rank.runs, strict=True)
        for action in sends[id(block)]
        if action.op in STEP and cost.crosses(rank.rank, rank.rank + STEP[action.op])
    )
    exchanged = _exchanged_bytes(problem, program)

    def network_share(kind: Kind) -> float:
        # The labels of the passes that copies of a kind overlap: those that contain the copies, or
        # both labels if some copies have separate blocks.
        labels = {block.label for block, _ in program.block_runs if _copies(block, kind)}
        passes = PASSES if labels.difference(PASSES) else tuple(sorted(labels))
        messages = sent + fsum(exchanged[label] for label in passes)
        return messages / moved[kind] if moved[kind] else 0.0

    busy_s = _kernels_s(program, kernel_s)
    hbm_bytes_per_s = cost.cluster.hbm_bytes_per_s * cost.gpu.hbm_efficiency
    return CopyTraffic(
        two_way_share=_both(program, total),
        sent_per_d2h=network_share(Kind.D2H),
        received_per_h2d=network_share(Kind.H2D),
        kernel_delay_share=total / hbm_bytes_per_s / busy_s if busy_s else 0.0,
    )


class PieceTraffic(NamedTuple):
    """The work that overlaps updates of optimizer states in pieces. `beside`: whether copies
    overlap the host's updates; `visiting_bytes`: bytes that visits copy to the device for each
    parameter that the host updates at the same time; `traffic`: that which overlaps visits."""

    beside: bool = False
    visiting_bytes: float = 0.0
    traffic: CopyTraffic = NO_TRAFFIC


def piece_traffic(ranks: Iterable[Sequence[Block]], param_bytes: int) -> PieceTraffic:
    """Return the work that overlaps updates in pieces on ranks with these blocks. A copy of weights
    or states overlaps all actions that are issued before compute waits for the copy. Copies of
    later blocks overlap an update if they wait for its end."""
    visiting = updated = 0
    beside = two_way = False
    for blocks in ranks:
        for block in blocks:
            flying: dict[Event | None, str] = {}  # maps the end event of a copy to its operator
            for action in block.written:
                if action.op in (WEIGHTS_UP, STATES_UP, STATES_DOWN):
                    flying[action.event] = action.op
                if action.op == STATES_UP:
                    visiting += action.nbytes
                    two_way |= STATES_DOWN in flying.values()
                if action.stream == HOST_UPDATE and action.kind is Kind.OPTIMIZER:
                    updated += action.nbytes // param_bytes
                    event = action.event
                    beside |= bool(flying) or event is None or not event.is_local
                if flying and action.stream == COMPUTE:
                    flying.pop(action.wait, None)
    return PieceTraffic(
        beside,
        visiting / updated if beside else 0.0,
        NO_TRAFFIC._replace(two_way_share=float(two_way)),
    )


def _exchanged_bytes(problem: Problem, program: Program) -> dict[str, float]:
    """Bytes that the collectives of all pipeline ranks send to other nodes, by the label of their
    pass; each pipeline rank counts as one GPU."""
    passes = {
        id(block): collectives(block) for block, _ in program.block_runs if block.label in PASSES
    }
    found: dict[str, list[float]] = {label: [] for label in PASSES}
    for rank in program.ranks:
        for block, runs in zip(rank.blocks, rank.runs, strict=True):
            if id(block) in passes:
                found[block.label] += [
                    problem.cost.network_bytes(comm, rank.rank) * count * runs
                    for comm, count in passes[id(block)].items()
                ]
    return {label: fsum(parts) for label, parts in found.items()}


def collectives(block: Block) -> Counter[Comm]:
    found: Counter[Comm] = Counter()
    for action, count in block.counted():
        comm = action.exchange.comm
        if comm is not None and action.kind in COLLECTIVES:
            found[comm] += count
    return found


def _kernels_s(program: Program, kernel_s: Callable[[Action, int], float]) -> float:
    """Seconds of all kernels of all ranks. The kernels of a shared block take equal seconds on all
    ranks, unless collectives overlap some of them."""
    found: list[float] = []
    ranked: dict[int, list[tuple[Action, int]]] = {}
    for block, runs in program.block_runs:
        kernels = [pair for pair in block.counted() if pair[0].kind in KERNELS]
        if any(action.exchange.overlaps for action, _ in kernels):
            ranked[id(block)] = kernels
        else:
            found.append(fsum(kernel_s(action, 0) * count for action, count in kernels) * runs)
    for rank in program.ranks:
        for block, runs in zip(rank.blocks, rank.runs, strict=True):
            kernels = ranked.get(id(block), [])
            found += [kernel_s(action, rank.rank) * count * runs for action, count in kernels]
    return fsum(found)


def _moved(program: Program, kind: Kind) -> int:
    """Bytes of all copies of a kind, except copies of states after the last kernel."""
    return sum(
        action.nbytes * count * runs
        for block, runs in program.block_runs
        for action, count in _copies(block, kind)
    )


def _both(program: Program, total: int) -> float:
    """The share of copied bytes that overlap a copy in the opposite direction.

    Copies of whole chunks overlap if they are issued next to each other in opposite directions and
    for different (micro-batch, chunk) pairs, because both then run during the same pass. Copies per
    layer stay in their pass, except a forward's last copy: it overlaps reloads if the rank's next
    pass is a backward that has them. Then the copy counts, and as many bytes of the reloads.
    """
    overlapping = 0
    for rank in program.ranks:
        overlapping += _trailing_copies_bytes(rank)
        labels = {
            at: block.label for at, block in enumerate(rank.blocks) if block.label in ("D2H", "H2D")
        }
        copies = [step for step in rank.steps if step[0] in labels] if labels else []
        sizes = {at: sum(a.nbytes * n for a, n in rank.blocks[at].counted()) for at in labels}
        met = {
            at + side
            for at, (one, other) in enumerate(pairwise(copies))
            if labels[one[0]] != labels[other[0]] and one[1:] != other[1:]
            for side in (0, 1)
        }
        overlapping += sum(sizes[copies[at][0]] for at in met)
    return overlapping / total


def _trailing_copies_bytes(rank: RankProgram) -> int:
    """Bytes of the last copies per layer of forwards that continue during a backward, and of the
    reloads that they overlap there."""
    leaving = {
        at: trailing_bytes(block) for at, block in enumerate(rank.blocks) if block.label == "F"
    }
    if not any(leaving.values()):
        return 0
    coming = {
        at: copied_bytes(block, Kind.H2D)
        for at, block in enumerate(rank.blocks)
        if block.label == "B"
    }
    passes = [at for at, _, _ in rank.steps if at in leaving or at in coming]
    return sum(
        leaving[one] + min(leaving[one], coming[other])
        for one, other in pairwise(passes)
        if one in leaving and coming.get(other)
    )


def trailing_bytes(block: Block) -> int:
    """Return the bytes of D2H copies of the layer whose copies outlive the forward (event d2h)."""
    copies = _copies(block, Kind.D2H)
    parts = {action.part for action, _ in copies if action.event is COPIED_OUT}
    return sum(action.nbytes * n for action, n in copies if action.part in parts)


def copied_bytes(block: Block, kind: Kind) -> int:
    return sum([action.nbytes * n for action, n in _copies(block, kind)])


def _copies(block: Block, kind: Kind) -> list[tuple[Action, int]]:
    return [pair for pair in block.copies if pair[0].kind is kind]
