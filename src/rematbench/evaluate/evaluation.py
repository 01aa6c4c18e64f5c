"""Evaluates a plan on a problem: seconds, speed, bytes per rank, FLOPs.  The plan's method plays no
part."""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from math import nan, sqrt
from typing import get_args

from msgspec import Struct
from msgspec.structs import replace

from rematbench.costs.flops import hfu, mfu
from rematbench.costs.operators.kernels import Attention, Gemm, Kernel
from rematbench.costs.states import reduce_buckets
from rematbench.engine.lowering.lower import lower
from rematbench.engine.lowering.states.held_states import lends_gradients
from rematbench.engine.lowering.states.host_states import host_states, on_device
from rematbench.engine.lowering.states.state_shards import quantised_bytes, rank_sharded
from rematbench.engine.program.action import STATE_COPIES, Kind
from rematbench.engine.program.ledger import RankLedger, fresh_peak, issue_order, pool_bytes
from rematbench.engine.program.program import Late, Program
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import Simulation, simulate
from rematbench.engine.simulate.seconds import action_seconds, table_of
from rematbench.inputs.layout import GATHERED_CHUNKS
from rematbench.inputs.load import load_cluster, names
from rematbench.inputs.system import System
from rematbench.plan import Plan, StateKind, gathers_by_layer
from rematbench.problem import NOT_TIMED, Problem, gathered_bytes, rank_parameters

OTHER_HOST_RATES = {"an H100 of NeMo-RL": 6.4e8}
"""NeMo-RL pull request 3628 (2026-08): the step of Qwen3-0.6B (596 million parameters) on one H100
takes 0.752 s, and 1.678 s with all of Megatron's optimizer on the host, its copies included."""
HOST_RATE = (
    "host_update_parameters_per_s (divide the parameters of all ranks of a node by the seconds of "
    "their CPU Adam's step; declare the rate in a cluster file of your own with base:)"
)


class RankBytes(Struct, frozen=True, kw_only=True):
    """Device and host bytes of a rank: resident states and the ledger's activation peaks.  `pools`:
    staging pools, resident reduce buckets and workspaces of libraries; `peak_step`: the index of
    the rank's step with the device peak.  `host_state`: pinned blocks of states in host memory
    (`HostStates.held`); `host_update`: a temporary copy during their update; `host_rounding`: bytes
    by which pinned blocks exceed the activations in them; `absent`: bytes of gradients that are not
    allocated at the peak."""

    parameter: int
    gradient: int
    optimizer: int
    activation_peak: int
    pools: int
    host_state: int
    host_activation_peak: int
    peak_step: int
    host_rounding: int = 0
    host_update: int = 0
    absent: int = 0

    @property
    def gradient_at_peak(self) -> int:
        return self.gradient - self.absent

    @property
    def device_peak(self) -> int:
        """Peak of allocated device bytes."""
        states = self.parameter + self.gradient_at_peak + self.optimizer
        return states + self.activation_peak + self.pools

    def blocks(self, late: Late | None) -> tuple[int, ...]:
        """Return the bytes of the states and pools that are alive throughout, without tensors that
        the rank allocates late."""
        gradient, optimizer = self.gradient, self.optimizer
        if late is not None:
            gradient, optimizer = gradient - late.gradient_bytes, optimizer - late.state_bytes
        sizes = (self.parameter, gradient, optimizer, self.pools)
        return tuple(nbytes for nbytes in sizes if nbytes > 0)

    @property
    def host_peak(self) -> int:
        """Peak of host bytes.  Activations are back on the device before the update."""
        activations = self.host_activation_peak + self.host_rounding
        return self.host_state + max(activations, self.host_update)


class PlanEvaluation(Struct, frozen=True, kw_only=True):
    """The simulated step of a plan.  Bytes come from the issue-order ledger.  MFU and HFU are
    fractions of the peak.

    `recompute_flop` and `offload_bytes` are sums over all ranks of a step.  `reserved_bytes`: bytes
    that the fullest rank's allocator reserves, or its ledger peak if the allocator was not
    modelled.  `pressed`: whether the allocator had to give cached segments back (None: not
    modelled).  `not_timed`: why the seconds are incomplete and must not be printed; empty if they
    are complete.  If kernels have no rates, speeds are NaN and nothing is simulated.
    """

    step_s: float
    tokens_per_s_per_gpu: float
    mfu_causal: float
    mfu_dense: float
    hfu: float
    ranks: tuple[RankBytes, ...]
    host_node_bytes: int
    reserved_bytes: int
    recompute_flop: float
    offload_bytes: int
    simulation: Simulation
    pressed: bool | None = None
    not_timed: str = ""

    @property
    def peak_device_bytes(self) -> tuple[int, ...]:
        """Peak device bytes per pipeline rank."""
        return tuple(rank.device_peak for rank in self.ranks)

    @property
    def peak_host_bytes(self) -> tuple[int, ...]:
        """Peak pinned host bytes per pipeline rank."""
        return tuple(rank.host_peak for rank in self.ranks)


class Speed(Struct, frozen=True, kw_only=True):
    """The speed of a step: tokens/s per GPU, and MFU as fractions of the GPU's peak FLOP/s in the
    problem's precision (the 16-bit peak if the cluster's file gives no other)."""

    peak_flop_per_s: float
    tokens_per_s_per_gpu: float
    mfu_causal: float
    mfu_dense: float


def speed(problem: Problem, step_s: float) -> Speed:
    """Return the speed of a simulated or measured step of `step_s` seconds."""
    lay, work = problem.layout, problem.workload
    peak = problem.cost.peak_flop_per_s or problem.cluster.peak_flop_per_s
    rate = lay.global_batch * work.seq_len / step_s / lay.gpus
    return Speed(
        peak_flop_per_s=peak,
        tokens_per_s_per_gpu=rate,
        mfu_causal=mfu(rate, work, peak),
        mfu_dense=mfu(rate, work, peak, causal=False),
    )


def evaluate(problem: Problem, plan: Plan) -> PlanEvaluation:
    """Evaluate a plan at the chunk level, without the allocator."""
    return evaluate_program(problem, plan, lower(plan, problem))


def evaluate_program(
    problem: Problem,
    plan: Plan,
    program: Program,
    *,
    ranks: tuple[RankBytes, ...] | None = None,
    record: bool = False,
) -> PlanEvaluation:
    """Evaluate a lowered plan.  `record`: simulate every action instead of chunks, and keep the
    timeline.  `ranks`: the plan's `program_bytes`, if they are known."""
    simulation = _simulated(problem, program, record=record)
    lay, work = problem.layout, problem.workload
    tokens = lay.global_batch * work.seq_len
    found = speed(problem, simulation.step_s)
    rate = found.tokens_per_s_per_gpu
    ranks = ranks or program_bytes(problem, plan, program)
    again, moved = _work(problem, program)
    replicas = lay.stage_ranks  # Ranks of a stage do the same work.
    return PlanEvaluation(
        step_s=simulation.step_s,
        tokens_per_s_per_gpu=rate,
        mfu_causal=found.mfu_causal,
        mfu_dense=found.mfu_dense,
        hfu=hfu(rate, work, found.peak_flop_per_s, again * replicas / tokens),
        ranks=ranks,
        host_node_bytes=host_node_bytes(problem, ranks),
        reserved_bytes=max(rank.device_peak for rank in ranks),
        recompute_flop=again * replicas,
        offload_bytes=moved * replicas,
        simulation=simulation,
        not_timed=not_timed(problem, plan),
    )


NOTHING = Simulation(step_s=nan, rank_end_s=(), stream_busy_s=())
"""The simulation of a problem whose kernels have no rates."""


def _simulated(problem: Problem, program: Program, *, record: bool) -> Simulation:
    if problem.untimed and not record:
        return NOTHING
    problem.cost.require_rates()
    seconds = action_seconds(problem, program)
    return simulate(program, seconds, record=True) if record else simulate_chunks(program, seconds)


def not_timed(problem: Problem, plan: Plan) -> str:
    """Return which part of a plan has no modelled seconds, and how to declare what is missing;
    empty if there is no such part."""
    if problem.untimed:
        return problem.untimed
    parameter = plan.state("parameter")
    if lacks_host_rate(problem, plan):
        known = ", ".join(f"{rate:.1e} on {name}" for name, rate in host_rates().items())
        return (
            f"{NOT_TIMED}an optimizer in host memory on cluster {problem.cluster.name}, whose file "
            f"has no {HOST_RATE}; measured rates in parameters/s a GPU: {known}"
        )
    if parameter.home == "host" and not gathers_by_layer(parameter, problem.layout):
        return f"{NOT_TIMED}parameters are in host memory but are not gathered per layer"
    return ""


def lacks_host_rate(problem: Problem, plan: Plan) -> bool:
    """Whether the host updates states of the plan, but its cluster has no rate for that."""
    optimizer = plan.state("optimizer")
    places = optimizer.pieces.places if optimizer.pieces else (optimizer.home,)
    return "host" in places and problem.cluster.host_update_parameters_per_s is None


@cache
def host_rates() -> dict[str, float]:
    """The measured host rates, in parameters/s of each GPU's cores."""
    clusters = map(load_cluster, names("cluster"))
    rates = ((one, one.host_update_parameters_per_s) for one in clusters)
    known = {one.name: rate / one.gpus_per_node for one, rate in rates if rate is not None}
    return known | OTHER_HOST_RATES


def rated(problem: Problem, plan: Plan) -> Problem:
    """The problem. If the plan needs a host rate that the node lacks, the node gets the geometric
    mean of the slowest and the fastest measured rate."""
    if problem.untimed or not lacks_host_rate(problem, plan):
        return problem
    return at_host_rate(problem, sqrt(min(host_rates().values()) * max(host_rates().values())))


def at_host_rate(problem: Problem, rate: float) -> Problem:
    """The problem where the cores of each GPU update `rate` parameters/s."""
    whole = rate * problem.cluster.gpus_per_node
    cluster = replace(problem.cluster, host_update_parameters_per_s=whole)
    return problem.remade(cluster=cluster)


def program_bytes(problem: Problem, plan: Plan, program: Program) -> tuple[RankBytes, ...]:
    """Return the device and host bytes of every pipeline rank of a lowered plan, without
    simulation."""
    pools = [pool_bytes(rank) for rank in program.ranks]
    found = tuple(
        _rank_bytes(problem, plan, rank, ledger, pools[rank])
        for rank, ledger in enumerate(issue_order(program))
    )
    late = program.ranks[0].late
    if problem.layout.num_micro_batches > 1 or late is None or not late.gradient_bytes:
        return found
    both = late.gradient_bytes + found[0].activation_peak
    return (replace(found[0], absent=both - fresh_peak(program.ranks[0])),)


def fullest(problem: Problem, plan: Plan) -> int:
    """Return the pipeline rank with the largest peak of device bytes."""
    return fullest_rank(program_bytes(problem, plan, lower(plan, problem)))


def fullest_rank(ranks: Sequence[RankBytes]) -> int:
    """Return the rank with the largest peak of device bytes; the first of equal ranks."""
    return max(range(len(ranks)), key=lambda rank: ranks[rank].device_peak)


def _rank_bytes(
    problem: Problem, plan: Plan, rank: int, ledger: RankLedger, pools: int
) -> RankBytes:
    system = problem.system
    count = rank_parameters(problem, plan, rank, trained=True)
    widths = system.states.param_bytes, system.states.grad_bytes, system.states.optimizer_bytes
    standing = reduce_buckets(count, problem.layout, system).standing + problem.workspace_bytes
    standing += dummy_gradient_bytes(problem, plan, rank)
    standing += gathered_chunks_bytes(problem, plan, rank)
    standing += returned_bytes(problem, plan, rank, ledger.device_peak_bytes)
    exact = has_exact_pins(system, plan)
    host = host_states(problem, plan, rank)
    device: dict[str, int] = {}
    for fate, width in zip(map(plan.state, get_args(StateKind)), widths, strict=True):
        lent = fate.kind == "gradient" and lends_gradients(plan)
        here = fate.home == "device" and not lent
        device[fate.kind] = rank_sharded(problem, plan, rank, fate) * width if here else 0
    for kind, left in on_device(problem, plan, rank).items():
        device[kind] += left
    device["parameter"] += quantised_bytes(problem, plan, rank)
    return RankBytes(
        parameter=device["parameter"],
        gradient=device["gradient"],
        optimizer=device["optimizer"],
        activation_peak=ledger.device_peak_bytes,
        pools=pools + standing,
        host_state=host.held,
        host_update=host.update,
        host_activation_peak=ledger.host_peak_bytes,
        host_rounding=0 if exact else ledger.pinned_peak_bytes - ledger.host_peak_bytes,
        peak_step=ledger.peak_step,
    )


def returned_bytes(problem: Problem, plan: Plan, rank: int, activations: int) -> int:
    """Device bytes by which logits that a pipeline's last stage keeps exceed the `activations` at
    its peak: the logits of all other micro-batches or, at the end of the step, of all micro-batches
    and their merged copy.  Source: torch 2.13, distributed/pipelining/stage.py, forward_one_chunk
    (output_chunks), schedules.py, _merge_outputs; pytorch/pytorch issue 159251."""
    work, lay, system = problem.workload, problem.layout, problem.system
    if lay.pp == 1 or rank != plan.head_rank or not system.parallel.returns_outputs:
        return 0
    vocab = system.padded_vocab(work.model.vocab, lay.tp) // lay.tp
    tokens = lay.micro_batch * work.seq_len // (lay.cp * lay.ulysses)
    each, count = tokens * vocab * work.element_bytes, lay.num_micro_batches
    return max((count - 1) * each, 2 * count * each - activations)


def gathered_chunks_bytes(problem: Problem, plan: Plan, rank: int) -> int:
    """Device bytes of the chunks whose parameters a pipeline rank keeps gathered while it gathers
    others again: the largest chunks, less the two layers that a pass gathers anyway."""
    lay, parameter = problem.layout, plan.state("parameter")
    if not lay.gathers_again or not gathers_by_layer(parameter, lay):
        return 0
    layers = [[problem.layer(i).parameters for i in chunk] for chunk in plan.partition[rank]]
    largest = sorted(map(sum, layers))[-GATHERED_CHUNKS:]
    return gathered_bytes(problem) * max(0, sum(largest) - 2 * max(max(each) for each in layers))


def dummy_gradient_bytes(problem: Problem, plan: Plan, rank: int) -> int:
    """Device bytes of the dummy buffers that stand in for gradients of a rank's weights, one for
    each shape.  Source: TransformerEngine, pytorch/module/base.py, get_dummy_wgrad; for the head,
    Megatron-core, core/tensor_parallel/layers.py.  A router's gradient needs none."""
    if not problem.system.states.dummy_gradients:
        return 0
    chunks = plan.partition[rank]
    tables = [problem.layer(layer) for chunk in chunks for layer in chunk]
    tables += [problem.head] * (rank == plan.head_rank)
    shapes = {
        (kernel.m, kernel.n)
        for table in {id(table): table for table in tables}.values()
        for op in table.ops
        for kernel in op.backward_weight
        if isinstance(kernel, Gemm) and not op.replicated
    }
    return problem.system.states.param_bytes * sum(m * n for m, n in shapes)


def host_node_bytes(problem: Problem, ranks: tuple[RankBytes, ...]) -> int:
    """Return the largest sum of peak pinned bytes over the ranks of a node (ranks ordered tp, cp,
    dp, pp)."""
    lay, per_node = problem.layout, problem.cluster.gpus_per_node
    per_stage = lay.stage_ranks
    totals: Counter[int] = Counter()
    for stage, rank in enumerate(ranks):
        first, last = stage * per_stage, (stage + 1) * per_stage
        for node in range(first // per_node, -(-last // per_node)):
            here = min(last, (node + 1) * per_node) - max(first, node * per_node)
            totals[node] += here * rank.host_peak
    return max(totals.values(), default=0)


def kernel_flop(kernel: Kernel) -> float:
    """Return the FLOPs of a forward kernel: two per multiply-add of a GEMM or attention, otherwise
    0."""
    match kernel:
        case Gemm(m=m, n=n, k=k, batch=batch):
            return 2.0 * m * n * k * batch
        case Attention(batch=batch, heads=heads, head_dim=head_dim, pairs=pairs):
            return 2.0 * pairs * heads * (head_dim + kernel.values) * batch
    return 0.0


def _work(problem: Problem, program: Program) -> tuple[float, int]:
    """(recomputed FLOPs, bytes of activations copied to the host) of a step, summed over pipeline
    stages with one rank each."""
    flop, moved = 0.0, 0
    for block, runs in program.block_runs:
        for action, count in block.counted():
            if action.kind is Kind.D2H and action.op not in STATE_COPIES:
                moved += action.nbytes * count * runs
            elif action.kind is Kind.RECOMPUTE:
                op = table_of(problem, program.slices, action).op(action.op)
                share = action.rows.fraction * action.rows.columns
                work = sum(kernel_flop(k) for k in op.forward) * share
                flop += work * count * runs
    return flop, moved


def has_exact_pins(system: System, plan: Plan) -> bool:
    """Whether pinned activations take exactly their bytes of host memory, not torch's larger
    blocks: the stack's allocator is exact, or the plan places its memory itself."""
    return system.host.pinned_blocks == "exact" or plan.addresses == "planned"
