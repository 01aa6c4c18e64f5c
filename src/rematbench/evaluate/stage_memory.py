"""The parts of each pipeline rank's device memory at its peak, as a stacked bar."""

from msgspec import Struct

from rematbench.costs.operators.ops import Part
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.blocks.fates import Resolved, Site, resolve
from rematbench.engine.lowering.lower import rank_orders
from rematbench.engine.lowering.schedule import phases
from rematbench.engine.program.ledger import Live, live_at_peak
from rematbench.engine.program.program import Program
from rematbench.engine.program.storage import COPY, REBUILT, Role, Storage
from rematbench.evaluate.evaluation import PlanEvaluation
from rematbench.evaluate.evaluator import rank_reserved
from rematbench.plan import Plan
from rematbench.problem import Problem

_PARTS: dict[str, Part] = {"E": "embedding", "L": "layer", "H": "head"}
Fates = dict[tuple[int, int], dict[Site, Resolved]]


class StageBytes(Struct, frozen=True, kw_only=True):
    """Device bytes of a pipeline rank at its peak, in the order in which a bar stacks them.

    `saved`: activations kept (or reloaded) for a backward; `transient`: gradients, gathered copies,
    rebuilt tensors and scratch; `staging`: pools of slots; `fragmentation`: bytes that the caching
    allocator reserves beyond the bytes that it hands out; `non_torch`: driver, context and NCCL;
    `free`: unused bytes of the device (negative: the plan does not fit).  `staging` includes
    workspaces of libraries.
    """

    rank: int
    parameter: int
    gradient: int
    optimizer: int
    saved: int
    transient: int
    staging: int
    fragmentation: int
    non_torch: int
    free: int


def stage_bytes(
    problem: Problem, plan: Plan, program: Program, evaluation: PlanEvaluation
) -> tuple[StageBytes, ...]:
    """Return a bar for each pipeline rank.  Its parts and `free` add up to the device memory."""
    bars = []
    for rank, ledger in enumerate(evaluation.ranks):
        live = live_at_peak(program.ranks[rank], ledger.peak_step)
        staged = ledger.pools > problem.workspace_bytes
        saved = _saved_bytes(problem, plan, rank, live, staged=staged)
        saved = min(saved, ledger.activation_peak)
        reserved = rank_reserved(program, rank, ledger, problem.usable_bytes).nbytes
        lost = reserved - ledger.device_peak
        bars.append(
            StageBytes(
                rank=rank,
                parameter=ledger.parameter,
                gradient=ledger.gradient_at_peak,
                optimizer=ledger.optimizer,
                saved=saved,
                transient=ledger.activation_peak - saved,
                staging=ledger.pools,
                fragmentation=lost,
                non_torch=problem.non_torch_bytes,
                free=problem.usable_bytes - ledger.device_peak - lost,
            )
        )
    return tuple(bars)


def _saved_bytes(
    problem: Problem, plan: Plan, rank: int, live: tuple[Live, ...], *, staged: bool
) -> int:
    """Bytes of live tensors that were saved for a backward and not rebuilt.  `staged`: offloaded
    tensors are in staging pools, and not counted."""
    phase = phases(rank_orders(plan, problem)[rank])
    fates: Fates = {}
    total = 0
    for item in live:
        key = (item.micro_batch, item.chunk)
        if key not in fates:
            ops = ChunkOps.of_plan(problem, plan, rank, item.chunk)
            fates[key], _ = resolve(plan, ops.sites, phase[key], item.micro_batch)
        site = _site(item.storage)
        fate = fates[key].get(site) if site else None
        if fate is None or fate.recompute_bytes == fate.nbytes:
            continue
        if not (staged and fate.offload_bytes):
            total += item.nbytes
    return total


def _site(storage: Storage | None) -> Site | None:
    """The site of a storage with a saved tensor or its kept or offloaded rows; else None."""
    if storage is None or storage.role is not Role.ACTIVATION:
        return None
    part = _PARTS.get(storage.part.letter)
    if part is None or storage.rows in (REBUILT, COPY) or storage.piece is not None:
        return None
    return part, max(0, storage.part.number), storage.tensor
