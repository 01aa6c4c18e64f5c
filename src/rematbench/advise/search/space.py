"""The layouts of a search, and the numbers that bounds need, as arrays over layouts."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import product

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from rematbench.costs.operators.ops import OpTable
from rematbench.costs.states import reduce_buckets
from rematbench.engine.lowering.states.state_shards import shards_experts
from rematbench.host.declared import facts, flat
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.job import Job
from rematbench.inputs.layout import Layout, LayoutError, even_partition
from rematbench.inputs.layout_rules import check_layout
from rematbench.inputs.system import System, ZeroStage
from rematbench.plan import Plan
from rematbench.problem import (
    Problem,
    gathered_bytes,
    head_parameters,
    state_fates,
)
from rematbench.workload import Model, Workload

DEGREES = ("tp", "cp", "pp", "vpp", "dp")
"""The degrees that tables show of every layout, in this order."""


MOST_MICRO_BATCH = 64
"""Most sequences in a micro-batch: no kernel becomes faster with more."""


class Fixed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Degrees that the user has fixed; None for a degree to search.  `sp`: whether tensor
    parallelism shards rows too.  `shard_degree` is not searched (0: all peers share sharded
    states), and a fact of the job's degrees that is no field here is that of every layout."""

    tp: int | None = None
    sp: bool | None = None
    cp: int | None = None
    ulysses: int | None = None
    pp: int | None = None
    vpp: int | None = None
    shard_degree: int = 0
    ep: int | None = None
    etp: int | None = None
    micro_batch: int | None = None
    zero_stage: ZeroStage | None = None


class Choice(Struct, frozen=True):
    """A layout and the layers of each of its chunks, in pipeline order.  `even`: the partition is
    the even one; `hosted`: the optimizer's states are in host memory, although the stack keeps them
    on the device; `states`: the method, with its settings, that places them in pieces (empty:
    none)."""

    layout: Layout
    sizes: tuple[int, ...]
    even: bool = True
    hosted: bool = False
    states: str = ""

    def base(self, plan: Plan) -> Plan:
        """The plan that methods begin with: `plan` with this choice's partition."""
        return plan if self.even else replace(plan, partition=_partition(self.sizes, self.layout))

    @property
    def words(self) -> tuple[str, ...]:
        """The command-line option for an uneven partition; empty for the even one."""
        return () if self.even else ("--partition", ",".join(map(str, self.sizes)))


def _partition(sizes: tuple[int, ...], lay: Layout) -> tuple[tuple[tuple[int, ...], ...], ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = [tuple(range(a, a + n)) for a, n in zip(starts, sizes, strict=True)]
    return tuple(
        tuple(chunks[chunk * lay.pp + rank] for chunk in range(lay.vpp)) for rank in range(lay.pp)
    )


class Space(Struct, frozen=True):
    """The layouts of a job, and the number of layouts that each rule refused."""

    choices: tuple[Choice, ...]
    refused: dict[str, int]


def space(spec: Job, fixed: Fixed, work: Workload, cluster: Cluster, system: System) -> Space:
    """Return all layouts of `spec`'s GPUs and global batch with the `fixed` degrees.  Raises
    LayoutError if the fixed degrees do not divide the GPUs."""
    refused: Counter[str] = Counter()
    ranks = (fixed.tp or 1) * (fixed.cp or 1) * (fixed.pp or 1) * (fixed.ulysses or 1)
    if spec.gpus % ranks:
        raise LayoutError(
            f"gpus {spec.gpus} must be a multiple of {ranks}, the product of the requested degrees"
        )
    if dense := _dense_between_experts(work):
        raise LayoutError(dense)
    choices: list[Choice] = []
    for layout in layouts(spec, fixed, work, system, refused):
        try:
            check_layout(layout, work, system)
        except LayoutError as error:
            rule, _, _ = str(error).partition(", but ")
            refused[re.sub(r"\b[1-9]\d*\b(?! x )", "N", rule)] += 1  # 2 x cp is the rule's own
            continue
        found = [
            choice
            for choice in partitions(layout, work.model.num_layers)
            if choice.sizes[0] > first_dense(work.model)
        ]
        if not found:
            refused["the first chunk has none of the layers with experts (not searched)"] += 1
        choices += found
        if (
            spec.stack.optimizer is None
            and may_host(cluster, system)
            and work.model.experts is None
        ):
            choices += [replace(choice, hosted=True) for choice in found]
    return Space(tuple(choices), dict(refused))


def first_dense(model: Model) -> int:
    """The number of dense layers before a model's layers with experts; 0 without experts."""
    return model.num_layers - model.expert_layers if model.experts else 0


def _dense_between_experts(work: Workload) -> str:
    """Why a model cannot be searched; empty if it can."""
    model = work.model
    if model.experts is None or set(model.experts.dense_layers) == set(range(first_dense(model))):
        return ""
    return (
        f"search needs dense layers to come first, but {model.name} has {model.expert_layers} "
        f"layers with experts of {model.num_layers}; simulate and compare take --ep and --etp"
    )


def may_host(cluster: Cluster, system: System) -> bool:
    """Whether the optimizer's states may go to host memory and the cluster has a rate for their
    update there."""
    return not system.host.optimizer_on_host and cluster.host_update_parameters_per_s is not None


def layouts(
    spec: Job, fixed: Fixed, work: Workload, system: System, refused: Counter[str]
) -> Iterator[Layout]:
    """Yield every product of degrees that uses all GPUs, before the rules of layouts are checked.
    Adds to `refused` the degrees whose replicas do not divide the batch."""
    asked, batch = spec.gpus, spec.degrees.global_batch
    kept = {key: one for key, one in flat(spec.degrees).items() if key not in facts(Fixed)}
    spreads = product(
        _degrees(fixed.tp, asked, work.model.num_heads),
        _degrees(fixed.cp, asked, asked if _rings(system) else 1),
        _degrees(fixed.pp, asked, work.model.num_layers),
    )
    for tp, cp, pp in spreads:
        dp, rest = divmod(asked, tp * cp * pp)
        if rest or dp == 0:
            continue
        for ulysses in _degrees(fixed.ulysses, dp, dp if _exchanges(system, cp) else 1):
            replicas, rest = divmod(dp, ulysses)
            if rest or not replicas:
                refused["dp is not a multiple of ulysses"] += 1
                continue
            if batch % replicas:
                refused["global batch is not a multiple of the number of replicas"] += 1
                continue
            for sp, micro_batch, vpp, zero, (ep, etp) in product(
                _row_shards(fixed.sp, tp),
                _micro_batches(fixed.micro_batch, batch // replicas),
                _chunks(fixed.vpp, pp, work.model.num_layers),
                _stages(fixed.zero_stage, pp, dp * cp, work, system),
                _expert_degrees(fixed, tp, tp * cp * dp, work),
            ):
                yield Layout(
                    **kept, tp=tp, sp=sp, cp=cp, pp=pp, vpp=vpp, dp=dp, zero_stage=zero,
                    ulysses=ulysses, shard_degree=fixed.shard_degree, micro_batch=micro_batch,
                    ep=ep, etp=etp,
                )  # fmt: skip


def _rings(system: System) -> bool:
    return system.parallel.cp_kind in ("allgather", "ring")


def _exchanges(system: System, cp: int) -> bool:
    """Whether the stack has an all-to-all of heads, inside context parallelism of `cp` ranks."""
    return ("ulysses_in_cp" if cp > 1 else "ulysses") in system.accepts.features


def _degrees(fixed: int | None, total: int, most: int) -> list[int]:
    if fixed is not None:
        return [fixed]
    return [n for n in range(1, min(total, most) + 1) if total % n == 0]


def _row_shards(fixed: bool | None, tp: int) -> list[bool]:
    """Sequence parallelism on and off; off alone where one rank has the whole tensors."""
    if tp == 1:
        return [False]
    return [True, False] if fixed is None else [fixed]


def _micro_batches(fixed: int | None, sequences: int) -> list[int]:
    if fixed is not None:
        return [fixed]
    return _degrees(None, sequences, MOST_MICRO_BATCH)


def _chunks(fixed: int | None, pp: int, layers: int) -> list[int]:
    """Chunks per rank: 1, and each number for which all chunks have equally many layers if the
    embedding, the head or both count as a layer (the chunks at the ends then have one layer less;
    Megatron: account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split)."""
    if fixed is not None:
        return [fixed]
    if pp == 1:
        return [1]
    ends = (0, 1, 2)
    return [1, *(v for v in range(2, layers // pp + 1) if -layers % (pp * v) in ends)]


def _expert_degrees(
    fixed: Fixed, tp: int, ranks: int, work: Workload
) -> list[tuple[int, int | None]]:
    """Expert-parallel degrees, and tensor parallelism of an expert: none, or that of attention."""
    experts = work.model.experts
    if experts is None:
        return [(1, None)]
    splits = sorted({1, tp}) if fixed.etp is None else [fixed.etp]
    return [
        (ep, etp)
        for etp in splits
        if ranks % etp == 0
        for ep in _degrees(fixed.ep, ranks // etp, experts.count)
        if experts.count % ep == 0
    ]


def _stages(
    fixed: ZeroStage | None, pp: int, shards: int, work: Workload, system: System
) -> list[ZeroStage]:
    """The ZeRO stages to try, in a pipeline those that the stack has there.  Without data-parallel
    peers all are equal: only stage 1, and stage 0 too for experts, which may have other peers.
    Stage 2 of FSDP in a pipeline is its stage 3."""
    if fixed is not None:
        return [fixed]
    if shards == 1:
        return [0, 1] if work.model.experts is not None else [1]
    if pp == 1:
        return [0, 1, 2, 3]
    same = system.zero.data_parallel == "fsdp" and 3 in system.accepts.pipeline_zero_stages
    return [stage for stage in system.accepts.pipeline_zero_stages if not (same and stage == 2)]


def partitions(layout: Layout, layers: int) -> Iterator[Choice]:
    """The even partition, and the partitions with one layer less or more on the first or the last
    rank (without interleaving, from pp 3 on)."""
    even = even_partition(layers, layout)
    sizes = [len(even[i % layout.pp][i // layout.pp]) for i in range(layout.num_chunks)]
    yield Choice(layout, tuple(sizes))
    if layout.pp < 3 or layout.vpp > 1:
        return
    for first, last in product((-1, 0, 1), repeat=2):
        moved = list(sizes)
        moved[0] += first
        moved[-1] += last
        middle = layers - moved[0] - moved[-1]
        each, extra = divmod(middle, layout.pp - 2)
        inner = [each + (i < extra) for i in range(layout.pp - 2)]
        found = (moved[0], *inner, moved[-1])
        if min(found) > 0 and found != tuple(sizes):
            yield Choice(layout, found, even=False)


Array = NDArray[np.float64]


class Columns:
    """The numbers that bounds need of the layouts of one shard: arrays with an entry per layout.
    `resident`: parameters of the first, the second and the last rank whose optimizer states are on
    the device, where a method places them, [3, layouts]."""

    def __init__(
        self, choices: Sequence[Choice], problem: Problem, resident: Array | None = None
    ) -> None:
        self.choices, self.problem, self._resident = choices, problem, resident
        self.gpus_per_node = problem.cluster.gpus_per_node
        layouts = [choice.layout for choice in choices]
        self.pp = np.array([lay.pp for lay in layouts])
        self.vpp = np.array([lay.vpp for lay in layouts])
        self.count = np.array([lay.num_micro_batches for lay in layouts])
        rows = [_rank_layers(choice) for choice in choices]
        self.first, self.second, self.last = (np.array([r[i] for r in rows]) for i in range(3))
        self.inner_work = np.array([r[3] for r in rows])
        self.inner_before = np.array([r[4] for r in rows])
        self.inner_rank = np.array([r[5] for r in rows])
        self.before_last = np.array([r[6] for r in rows])
        self.opening = np.array([choice.sizes[0] for choice in choices])
        self.ending = np.array([choice.sizes[-1] for choice in choices])
        self.inner = np.array([min(c.sizes[1 :: c.layout.pp] or c.sizes) for c in choices])
        self.layers = np.array([sum(choice.sizes) for choice in choices])
        self.fewest = np.array([min(choice.sizes) for choice in choices])
        self.most = np.array([max(choice.sizes) for choice in choices])
        self._layers_of: dict[int, NDArray[np.int64]] = {}
        self._in_flight_at: dict[int, NDArray[np.int64]] = {}
        self._copying: dict[int, tuple[NDArray[np.int64], ...]] = {}

    @cached_property
    def waits(self) -> NDArray[np.bool_]:
        """Whether all passes of a rank are in flight before its first backward.  This happens in an
        interleaved schedule with as many micro-batches as ranks, whose chunks wait for each
        other."""
        found: NDArray[np.bool_] = (self.vpp > 1) & (self.count == self.pp)
        return found

    def layers_of(self, stage: int) -> NDArray[np.int64]:
        """The layers of the smallest chunk of the rank `stage`; 0 if there is no such rank."""
        if stage not in self._layers_of:
            sizes = [min(c.sizes[stage :: c.layout.pp], default=0) for c in self.choices]
            self._layers_of[stage] = np.array(sizes)
        return self._layers_of[stage]

    @cached_property
    def ranks_of_stage(self) -> NDArray[np.int64]:
        """The ranks of a pipeline stage."""
        return np.array([c.layout.tp * c.layout.cp * c.layout.dp for c in self.choices])

    def in_flight_at(self, stage: int) -> NDArray[np.int64]:
        """The most passes in flight of the rank `stage`; of the last rank if there is no such
        rank."""
        if stage not in self._in_flight_at:
            after = np.maximum(0, self.pp - 1 - stage)
            self._in_flight_at[stage] = self.in_flight_before(after)
        return self._in_flight_at[stage]

    @cached_property
    def nodes(self) -> tuple[dict[int, NDArray[np.int64]], ...]:
        """Passes in flight of all ranks of the first node, and of the first node without the first
        stage, by the stages there."""
        node, ranks = self.gpus_per_node, self.ranks_of_stage
        found: list[dict[int, NDArray[np.int64]]] = []
        for begun in (0 * ranks, -(-ranks // node) * node):  # the number of a node's first rank
            found.append({})
            for stage in range(2 + 2 * node // int(ranks.min())):
                end = np.minimum((stage + 1) * ranks, begun + node)
                here = np.maximum(0, end - np.maximum(stage * ranks, begun))
                # Of several stages the last may keep everything on the device.
                here = np.where((stage > 0) & (stage >= self.pp - 1), 0, here)
                if here.any():
                    found[-1][stage] = here * self.in_flight_at(stage)
        return tuple(found)

    @cached_property
    def in_flight(self) -> tuple[NDArray[np.int64], ...]:
        """The most passes in flight of the first, second and last rank."""
        return self.in_flight_at(0), self.in_flight_at(1), self.in_flight_before(0 * self.pp)

    def in_flight_before(self, after: NDArray[np.int64]) -> NDArray[np.int64]:
        """The most passes in flight (between forward and backward) of a rank with `after` ranks
        after it."""
        total = self.count * self.vpp
        plain = self.vpp == 1
        warm = np.where(plain, after, (self.vpp - 1) * self.pp + 2 * after)
        found: NDArray[np.int64] = np.where(self.waits, total, np.minimum(warm + 1, total))
        return found

    def copying(self, release_lag: int) -> tuple[NDArray[np.int64], ...]:
        """The passes whose copies to the host hold device memory during the forward that brings the
        most passes in flight, on the first, second and last rank.  Copies back for the first
        backward begin before that forward, so its own copies must have ended."""
        if release_lag not in self._copying:
            self._copying[release_lag] = self._copying_of(release_lag)
        return self._copying[release_lag]

    def _copying_of(self, release_lag: int) -> tuple[NDArray[np.int64], ...]:
        found = []
        for rank, after in enumerate((self.pp - 1, np.maximum(self.pp - 2, 0), 0 * self.pp)):
            others = self.in_flight[rank] - 1
            since = np.where(self.vpp == 1, others, 2 * after)  # forwards since its own
            since = np.where(self.waits, self.pp - 1, since)
            own = (since >= 1) & (since <= release_lag)
            found.append(np.maximum(np.minimum(release_lag, others) - own, 0))
        return tuple(found)

    @cached_property
    def sum_bytes(self) -> tuple[Array, Array, Array]:
        """Bytes of the sums of whole gradients that the first, the second and the last rank hold
        while the most passes are in flight, if there are passes after these."""
        width = np.array([_held(c.layout, self.problem)[2] for c in self.choices])
        turn = np.where(self.vpp > 1, (2 * self.vpp - 1) * self.pp, 1)
        first, second, last = (
            np.where(self.count * self.vpp - flights >= turn, width * (rest + own), 0.0)
            for flights, (rest, own) in zip(self.in_flight, self._trained, strict=True)
        )
        return first, second, last

    @cached_property
    def _parameters(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return self._counts(trained=False)

    @cached_property
    def _trained(self) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        return self._counts(trained=True)

    def _counts(self, *, trained: bool) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Parameters of the first, the second and the last rank, or those with a gradient: all but
        those of experts, and those."""
        problem = self.problem
        dense_layer, layer, experts = least_parameters(problem, trained=trained)
        head, table = head_parameters(problem)[trained], problem.embedding
        embedding = _counted(table, trained)
        single, dense = self.pp == 1, first_dense(problem.workload.model)
        begun = dense * single  # a single rank is the first one too
        first, second, last = self.first - dense, self.second - begun, self.last - begun
        counts = (
            first * layer + dense * dense_layer + embedding + np.where(single, head, 0),
            second * layer + begun * dense_layer,
            last * layer + begun * dense_layer + head + np.where(single, embedding, 0),
        )
        own = [experts * layers for layers in (first, second, last)]
        return [*zip(counts, own, strict=True)]

    @cached_property
    def state_bytes(self) -> tuple[Array, Array, Array]:
        """Bytes of training states, of buckets that stay and of gathered parameters that a pipeline
        holds, on a device of the first, the second and the last rank."""
        problem, system = self.problem, self.problem.system
        sizes = (system.states.param_bytes, system.states.grad_bytes, system.states.optimizer_bytes)
        per = np.array([_shards(c.layout, problem) for c in self.choices])
        held = np.array([reduce_buckets(0, c.layout, system).standing for c in self.choices])
        apart = np.array([_expert_shards(c.layout, problem) for c in self.choices])
        whole = np.array([_held(c.layout, problem)[:2] for c in self.choices])
        kinds, placed = list(enumerate(sizes)), self._resident
        if placed is not None:
            kinds.pop()
        first, second, last = (
            held
            + (0 if placed is None else system.states.optimizer_bytes * placed[rank])
            + whole[:, 0] * n
            + whole[:, 1] * m
            + np.asarray(
                sum(
                    (-(-many[0] // per[:, i]) - (-many[1] // apart[:, i])) * nbytes
                    for (i, nbytes), many in ((k, updated if k[0] else (n, m)) for k in kinds)
                )
            )
            for rank, ((n, m), updated) in enumerate(
                zip(self._parameters, self._trained, strict=True)
            )
        )
        return first, second, last


def least_parameters(problem: Problem, *, trained: bool) -> tuple[int, int, int]:
    """The fewest parameters of a dense layer that comes before the layers with experts (0 without
    such layers), of another layer without its experts, and of its experts; with `trained` those
    with a gradient."""
    kinds = problem.layer_kinds
    later = [table for table in kinds if table.expert_parameters] or kinds
    experts = min(t.trained_experts if trained else t.expert_parameters for t in later)
    dense = [_counted(table, trained) for table in kinds if table not in later]
    return min(dense, default=0), min(_counted(t, trained) for t in later) - experts, experts


def _counted(table: OpTable, trained: bool) -> int:
    return table.trained if trained else table.parameters


def _held(layout: Layout, problem: Problem) -> tuple[int, int, int]:
    """Bytes of a parameter that a pipeline holds until its last pass: in gathered copies, in those
    of experts, and in the sums of whole gradients."""
    parameter, gradient, _ = state_fates(layout, problem.system)
    width = gathered_bytes(problem) if parameter.release == "step" else 0
    here = layout.state_shards == 1 and parameter.home == "device"
    sums = problem.system.states.reduce_bytes if gradient.release == "step" else 0
    return 0 if here else width, width if layout.expert_shards > 1 else 0, sums


def _shards(layout: Layout, problem: Problem) -> list[int]:
    """Ranks over which each kind of state is sharded; 2**60 for a state in host memory, which
    leaves next to nothing on the device, and for gradients that are sums until the reduction."""
    fates = state_fates(layout, problem.system)
    away = [f.home == "host" or (f.kind == "gradient" and f.release == "step") for f in fates]
    return [1 << 60 if gone else fate.shards for gone, fate in zip(away, fates, strict=True)]


def _expert_shards(layout: Layout, problem: Problem) -> list[int]:
    """Ranks over which each kind of states of experts is sharded."""
    fates = state_fates(layout, problem.system)
    return [
        (1 << 60 if fate.release == "step" and fate.kind == "gradient" else layout.expert_shards)
        if shards_experts(fate, layout)
        else 1
        for fate in fates
    ]


def _rank_layers(choice: Choice) -> tuple[int, ...]:
    """Layers of the first, second and last rank; for the inner rank that bounds the step most, its
    layers, the layers before it and its number; the layers before the last rank."""
    lay, sizes = choice.layout, choice.sizes
    ranks = [sum(sizes[rank :: lay.pp]) for rank in range(lay.pp)]
    before = [sum(sizes[:rank]) for rank in range(lay.pp)]
    inner = range(1, lay.pp - 1)
    busiest = max(inner, key=lambda r: lay.num_micro_batches * ranks[r] + before[r], default=0)
    second = ranks[1] if lay.pp > 1 else ranks[0]
    return (ranks[0], second, ranks[-1], ranks[busiest], before[busiest], busiest, before[-1])
