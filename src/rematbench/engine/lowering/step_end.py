"""The steps after the last pass: gradient reduction, tied embeddings, update, parameter gather."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps
from rematbench.engine.lowering.rank_steps import first_passes, last_backwards
from rematbench.engine.lowering.states.emit_buckets import buckets_of
from rematbench.engine.lowering.states.emit_states import (
    gradient_reductions,
    norm_reduction,
    parameter_gathers,
)
from rematbench.engine.lowering.states.held_states import (
    held_copies,
    holds_parameters,
    sums_block,
    sums_gradients,
    unit_sums,
)
from rematbench.engine.lowering.states.late_tensors import flat_update
from rematbench.engine.lowering.states.ready_pieces import ready_end_block, ready_pieces
from rematbench.engine.lowering.states.state_pieces import piece_widths, update_block
from rematbench.engine.lowering.states.state_shards import has_whole_gradients, rank_sharded
from rematbench.engine.lowering.step_blocks import (
    free_block,
    gather_block,
    optimizer_block,
    reduce_block,
    sum_block,
    tied_recv_block,
    tied_send_block,
    wait_block,
)
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import REDUCED
from rematbench.inputs.precision import FP32
from rematbench.plan import Pass, Plan
from rematbench.problem import Problem, rank_parameters


class Steps(Protocol):
    """The members of a rank's lowering that this module uses."""

    rank: int
    order: tuple[Pass, ...]
    chunks: list[ChunkOps]
    overlap_reduce: bool

    def add(self, key: tuple[object, ...], build: Callable[[], Block], item: Pass) -> None:
        """Append a step. Its block is built when it is first needed."""


def emit_step_end(steps: Steps, plan: Plan, problem: Problem) -> None:
    system, lay = problem.system, problem.layout
    sites = last_backwards(steps.order)
    updated = plan.state("optimizer").update == "backward"
    gradient = plan.state("gradient")
    in_passes = has_whole_gradients(gradient, lay) or gradient.home == "host"
    reduced_already = in_passes or steps.overlap_reduce
    buckets = buckets_of(plan, problem, steps.chunks)
    _end_held(steps, plan, problem)
    if lay.has_peers and not updated and not sums_gradients(plan):
        for chunk in reversed(steps.chunks):
            if not reduced_already:
                width, shards = system.states.reduce_bytes, plan.state("optimizer").shards
                sizes = width * _parameters(chunk), width * _expert_parameters(chunk)
                comms = gradient_reductions(lay, shards, 1, *sizes)
                scratch = buckets.opened + buckets.copy + buckets.part if buckets else 0
                build = partial(reduce_block, comms, scratch)
                steps.add(("reduce", comms), build, sites[chunk.chunk])
            steps.add(("reduced",), partial(wait_block, "reduced", REDUCED), sites[chunk.chunk])
    summed = ready_pieces(steps.chunks, plan) is not None
    if lay.sequence_parallel and not updated and not summed:
        norms = sum(unit.norm_parameters for chunk in steps.chunks for unit in chunk.units)
        comm = norm_reduction(system, norms, gradient.shards)
        steps.add(("norms", comm), partial(sum_block, comm), sites[0])
    if steps.rank in (problem.embedding_ranks or ()):
        _tied_embeddings(steps, problem)
    if not updated:
        _update(steps, plan, problem)
    _end_amaxes(steps, problem)
    _free_shards(steps, plan, problem)
    gathered = plan.state("parameter").gather == "step" and lay.has_peers
    if gathered and not system.zero.gather_overlap:
        for chunk in steps.chunks:
            counts = _parameters(chunk), _expert_parameters(chunk)
            for comm in parameter_gathers(lay, system, *counts):
                steps.add(("gather", comm), partial(gather_block, comm), sites[chunk.chunk])


def _end_amaxes(steps: Steps, problem: Problem) -> None:
    """After the update of quantised parameters, reduce the largest element of each weight over its
    shards, or that of each block if scales are in fp32 (TransformerEngine 2.x,
    pytorch/tensor/utils.py: cast_master_weights_to_fp8; torchao 0.9, float8/fsdp_utils.py:
    precompute_float8_dynamic_scale_for_fsdp)."""
    recipe, tables = problem.cost.recipe, [u.table for c in steps.chunks for u in c.units]
    whole = problem.layout.has_peers and problem.workload.fp8_params
    if recipe is None or recipe.wide_gather or not whole:
        return
    tile = recipe.block**2
    numbers = sum(-(-each.quantised // tile) if tile else each.products for each in tables)
    comm = Comm("amax", "dp", FP32 * numbers)
    build = partial(sum_block, comm, "amaxes", "amaxes")
    steps.add(("amaxes", comm), build, Pass(False, 0, 0))


def _end_held(steps: Steps, plan: Plan, problem: Problem) -> None:
    """Free the parameters and reduce the gradients that a rank holds until its last pass. Each is
    freed for the micro-batch that allocated it."""
    opening = first_passes(steps.order, forward=True)
    summing = first_passes(steps.order, forward=False)
    for chunk in reversed(steps.chunks):
        if holds_parameters(plan, problem):
            copies = held_copies(plan, problem, chunk)
            # The key has the sizes, because other ranks may free other bytes under equal names.
            key = ("release", copies, _parameters(chunk), _expert_parameters(chunk))
            steps.add(key, partial(free_block, copies), opening[chunk.chunk])
        if sums_gradients(plan):
            units = unit_sums(plan, problem, chunk)
            steps.add(("sums", units), partial(sums_block, units), summing[chunk.chunk])


def _free_shards(steps: Steps, plan: Plan, problem: Problem) -> None:
    summing = first_passes(steps.order, forward=False)
    for chunk in steps.chunks if sums_gradients(plan) else ():
        shards = tuple(unit.shard for unit in unit_sums(plan, problem, chunk))
        build = partial(free_block, tuple(shard.storage for shard in shards))
        steps.add(("release", shards), build, summing[chunk.chunk])


def _update(steps: Steps, plan: Plan, problem: Problem) -> None:
    system, optimizer = problem.system, plan.state("optimizer")
    held = rank_parameters(problem, plan, steps.rank, trained=True)
    count = rank_sharded(problem, plan, steps.rank, optimizer)
    nbytes = system.states.param_bytes * count
    if optimizer.home == "device":
        scratch = system.states.step_scratch_bytes * count
        if system.states.flat_step:
            scratch = sum(flat_update(plan, problem, held).scratch)
        down = nbytes if plan.state("parameter").home == "host" else 0
        update = partial(optimizer_block, nbytes, scratch, down)
        steps.add(("OPT", count, down), update, Pass(False, 0, 0))
        return
    pieces, widths = optimizer.cut(count), piece_widths(plan, problem)
    ready, cut = ready_pieces(steps.chunks, plan), optimizer.pieces
    if ready is not None and cut is not None:
        sites = last_backwards(steps.order)
        for chunk in reversed(steps.chunks):
            due = tuple(ready[chunk.chunk].values())
            last = chunk.chunk == 0
            end = partial(ready_end_block, due, cut, widths, last=last)
            if due:
                steps.add(("OPT_READY", due, widths, last), end, sites[chunk.chunk])
        return
    update = partial(update_block, pieces, optimizer.pieces, widths)
    steps.add(("OPT_HOST", pieces, widths), update, Pass(False, 0, 0))


def _parameters(chunk: ChunkOps) -> int:
    return sum(unit.trained for unit in chunk.units)


def _expert_parameters(chunk: ChunkOps) -> int:
    return sum(unit.table.trained_experts for unit in chunk.units)


def _tied_embeddings(steps: Steps, problem: Problem) -> None:
    """The two ranks that have the token embedding exchange its gradient (as in Megatron)."""
    nbytes = problem.system.states.grad_bytes * problem.head.op("lm_head").trained_parameters
    if not nbytes:
        return
    steps.add(("tied_send", nbytes), partial(tied_send_block, nbytes), Pass(False, 0, 0))
    steps.add(("tied_recv", nbytes), partial(tied_recv_block, nbytes), Pass(False, 0, 0))
