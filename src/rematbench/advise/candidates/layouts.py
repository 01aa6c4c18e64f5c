"""The layouts of a job, and the layers of their chunks."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from rematbench.host.declared import facts, flat
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.job import Job
from rematbench.inputs.layout import (
    GATHERED_CHUNKS,
    Layout,
    LayoutError,
    even_sizes,
    partition_of_sizes,
)
from rematbench.inputs.layout_rules import check_exchanges, check_layout
from rematbench.inputs.stages import read_stages
from rematbench.inputs.system import Dispatcher, System, ZeroStage, with_facts
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.registry import IDENTITY, Registry
from rematbench.problem import Problem
from rematbench.workload import Workload

DEGREES = ("tp", "cp", "pp", "vpp", "dp")
"""The degrees that tables show of every layout, in this order."""
FLEX: dict[str, Dispatcher] = {"hopper": "deepep", "blackwell": "hybridep"}
"""Dispatchers that send a token once to each node, by the GPU generation that has their kernels
(Megatron-core 0.16.1, core/transformer/moe/fused_a2a.py)."""
ENDS, MOST_LESS = 2, 4
"""With several chunks per rank: how many layers fewer than two other chunks the first and the last
chunk together usually have (for embedding and loss), and how many fewer at most."""
_RULE = re.compile(r"(\d+ x|stages? [\d, ]+|--\w+: [\d, ]+)|\b[1-9]\d*\b")
"""The numbers in a broken rule.  Group 1 matches those that belong to the rule itself (factors and
ZeRO stages) and are kept; numbers of the layout are replaced by N."""
MOST_MICRO_BATCH = 64
"""The most sequences in a micro-batch, because no kernel becomes faster with more."""


class Fixed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Degrees that the user has fixed; None for a degree to search.  `sp`: whether sequence
    parallelism is on.  `shard_degree` is not searched (0: all peers share sharded states).  Facts
    of the job's degrees that this class lacks hold for every layout."""

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


# Why: docs/decisions/advise.md, Are optimizer states on the host part of a method's bounds
class LayoutChoice(Struct, frozen=True):
    """A layout and the numbers of layers of its chunks, in pipeline order (`sizes`). `even`:
    whether the partition is the even one; `hosted`: whether optimizer states are in host memory
    although the stack keeps them on the device; `states`: the method, with settings, that places
    them in pieces (empty: none); `overlaps`: whether experts' exchanges overlap with another
    micro-batch although the stack's do not; `dispatcher`: the dispatcher of experts (None: the
    stack's)."""

    layout: Layout
    sizes: tuple[int, ...]
    even: bool = True
    hosted: bool = False
    states: str = ""
    overlaps: bool = False
    dispatcher: Dispatcher | None = None

    def base(self, plan: Plan) -> Plan:
        """The plan that methods start from: `plan` with this choice's partition."""
        if self.even:
            return plan
        more = sum(len(chunk) for rank in plan.partition for chunk in rank) - sum(self.sizes)
        return replace(plan, partition=partition_of_sizes(self.sizes, self.layout.pp, more))

    def of_sizes(self, sizes: tuple[int, ...]) -> "LayoutChoice":
        even = sizes == even_sizes(sum(sizes), self.layout)
        return replace(self, sizes=sizes, even=even)

    def keeping(self, problem: Problem, registry: Registry) -> Plan | Unsupported:
        """The plan that keeps every activation at this layout, after `states` was applied."""
        base = self.base(problem.base_plan)
        return registry.resolve(self.states or IDENTITY, None, problem).plan(problem, base)

    @property
    def words(self) -> tuple[str, ...]:
        """The command-line option for an uneven partition; empty for the even one."""
        return () if self.even else ("--partition", ",".join(map(str, self.sizes)))


def ended(
    choice: LayoutChoice, layout: Layout, layers: int, first: int, last: int
) -> LayoutChoice | None:
    """The choice with `first` and `last` layers in the end chunks of `layout`, and the remaining
    layers spread evenly over the chunks between, the earlier ones with more; None if a chunk
    between would be empty."""
    between = layout.num_chunks - 2
    rest = layers - first - last
    if min(first, last) < 0 or rest < between or (rest and not between):
        return None
    each, extra = divmod(rest, between) if between else (0, 0)
    sizes = (first, *(each + (i < extra) for i in range(between)), last)
    return replace(choice, layout=layout).of_sizes(sizes)


class Space(Struct, frozen=True):
    """The layouts of a job, and the number of layouts that each rule refused. `apart`: layouts
    whose stages the job states as text, if no bound covers them."""

    choices: tuple[LayoutChoice, ...]
    refused: dict[str, int]
    apart: tuple[LayoutChoice, ...] = ()


def space(spec: Job, fixed: Fixed, work: Workload, cluster: Cluster, system: System) -> Space:
    """All layouts with `spec`'s GPUs and global batch and the `fixed` degrees.  LayoutError if the
    fixed degrees do not divide the GPUs."""
    refused: Counter[str] = Counter()
    ranks = (fixed.tp or 1) * (fixed.cp or 1) * (fixed.pp or 1) * (fixed.ulysses or 1)
    if spec.gpus % ranks:
        raise LayoutError(
            f"gpus {spec.gpus} must be a multiple of {ranks}, the product of the requested degrees"
        )
    if dense := _dense_between_experts(work):
        raise LayoutError(dense)
    choices: list[LayoutChoice] = []
    apart: list[LayoutChoice] = []
    exchanges = _open_exchanges(spec, cluster, system)
    for layout in layouts(spec, fixed, work, system, refused):
        try:
            check_layout(layout, work, system)
        except LayoutError as error:
            rule, _, _ = str(error).partition(", but ")
            refused[_RULE.sub(lambda number: number[1] or "N", rule)] += 1
            continue
        sizes = [len(stage.layers) for stage in read_stages(layout.stages)] if layout.stages else []
        stated = [LayoutChoice(layout, tuple(sizes))] if sizes else []
        results = [
            choice
            for choice in stated or partitions(layout, work.model.num_layers)
            if choice.sizes[0] > work.model.first_dense and choice.sizes[-1]
        ]
        if not results:
            apart += stated
            empty = bool(stated) and not (stated[0].sizes[0] and stated[0].sizes[-1])
            words = "the first chunk has none of the layers with experts (not searched)"
            refused["a chunk has no layers (not searched)" if empty else words] += 1
        choices += results
        for exchange in exchanges:
            if _possible(exchange, layout, work):
                dispatcher, overlaps, _ = exchange
                choices += [
                    replace(choice, dispatcher=dispatcher, overlaps=overlaps) for choice in results
                ]
        hosts = spec.stack.optimizer is None and may_host(cluster, system)
        if hosts and work.model.experts is None:
            choices += [replace(choice, hosted=True) for choice in results]
    return Space(tuple(choices), dict(refused), tuple(apart))


def _dense_between_experts(work: Workload) -> str:
    """Why a model with dense layers between experts is not searched; empty for other models."""
    model = work.model
    if model.experts is None or set(model.experts.dense_layers) == set(range(model.first_dense)):
        return ""
    return (
        f"search needs dense layers to come first, but {model.name} has {model.expert_layers} "
        f"layers with experts of {model.num_layers}; simulate and compare take --ep and --etp"
    )


Exchange = tuple[Dispatcher | None, bool, System]
"""A dispatcher of experts (None: the stack's), whether exchanges overlap, and the stack with both
changes."""


def _open_exchanges(spec: Job, cluster: Cluster, system: System) -> list[Exchange]:
    """Further ways of exchanging tokens that the stack supports and the job does not fix."""
    flex = other_dispatcher(spec, cluster, system)
    overlaps = (False, True) if switches_overlap(spec, system) else (False,)
    return [
        (dispatcher, overlap, with_facts(
            system,
            dispatcher=dispatcher or system.experts.dispatcher,
            ep_overlap="interleaved" if overlap else system.experts.ep_overlap,
        ))
        for dispatcher, overlap in product(dict.fromkeys((None, flex)), overlaps)
        if dispatcher or overlap
    ]  # fmt: skip


def _possible(exchange: Exchange, layout: Layout, work: Workload) -> bool:
    """Whether a layout that the stack runs can be combined with an exchange."""
    _, overlaps, system = exchange
    if layout.ep == 1 or (overlaps and layout.num_micro_batches == 1):
        return False
    try:
        check_exchanges(layout, work, system)
    except LayoutError:
        return False
    return True


def switches_overlap(spec: Job, system: System) -> bool:
    """Whether the stack can overlap experts' exchanges with another micro-batch, does not do so by
    default, and the job leaves it open."""
    has = "ep_overlap" in system.accepts.features and system.experts.ep_overlap == "none"
    return has and spec.stack.ep_overlap is None


def other_dispatcher(spec: Job, cluster: Cluster, system: System) -> Dispatcher | None:
    """The dispatcher to try besides the stack's all-to-all, if the job leaves it open, the GPUs
    have its kernels, and the stack is Megatron-core 0.16 (the only one whose exchanges overlap)."""
    plain = system.experts.dispatcher == "alltoall" and "ep_overlap" in system.accepts.features
    undecided = plain and spec.stack.dispatcher is None
    return FLEX.get(cluster.generation) if undecided else None


def may_host(cluster: Cluster, system: System) -> bool:
    """Whether optimizer states may move to host memory: the stack has them on the device, and the
    cluster has a rate for updates on the host."""
    return not system.host.optimizer_on_host and cluster.host_update_parameters_per_s is not None


def layouts(
    spec: Job, fixed: Fixed, work: Workload, system: System, refused: Counter[str]
) -> Iterator[Layout]:
    """Yield every combination of degrees that uses all GPUs, before layout rules are checked.
    Combinations whose replicas do not divide the batch are counted in `refused`."""
    asked, batch = spec.gpus, spec.degrees.global_batch
    if spec.degrees.tp_columns > 1:
        raise LayoutError(
            "search does not try tp_columns above 1: give the layout to simulate or compare"
        )
    kept = {key: value for key, value in flat(spec.degrees).items() if key not in facts(Fixed)}
    rings = system.parallel.cp_kind in ("allgather", "ring")
    spreads = product(
        _degrees(fixed.tp, asked, work.model.num_heads),
        _degrees(fixed.cp, asked, asked if rings else 1),
        _degrees(fixed.pp, asked, work.model.num_layers),
    )
    for tp, cp, pp in spreads:
        dp, rest = divmod(asked, tp * cp * pp)
        if rest or dp == 0:
            continue
        exchanges = ("ulysses_in_cp" if cp > 1 else "ulysses") in system.accepts.features
        for ulysses in _degrees(fixed.ulysses, dp, dp if exchanges else 1):
            replicas, rest = divmod(dp, ulysses)
            if rest or not replicas:
                refused["dp is not a multiple of ulysses"] += 1
                continue
            if batch % replicas:
                refused["global batch is not a multiple of the number of replicas"] += 1
                continue
            for sp, micro_batch, vpp, (zero, ep, etp) in product(
                _row_shards(fixed.sp, tp, work),
                _degrees(fixed.micro_batch, batch // replicas, MOST_MICRO_BATCH),
                _chunks(fixed.vpp, pp, work.model.num_layers, spec.degrees.stages),
                _states_and_experts(fixed, (tp, cp, pp, dp), work, system),
            ):
                if zero > 1 and pp > 1 and vpp > GATHERED_CHUNKS:
                    continue
                yield Layout(
                    **kept, tp=tp, sp=sp, cp=cp, pp=pp, vpp=vpp, dp=dp, zero_stage=zero,
                    ulysses=ulysses, shard_degree=fixed.shard_degree, micro_batch=micro_batch,
                    ep=ep, etp=etp,
                )  # fmt: skip


def _degrees(fixed: int | None, total: int, most: int) -> list[int]:
    if fixed is not None:
        return [fixed]
    return [n for n in range(1, min(total, most) + 1) if total % n == 0]


def _row_shards(fixed: bool | None, tp: int, work: Workload) -> list[bool]:
    """The settings of sequence parallelism to try: only off at tp 1, only on with experts, which
    need it, otherwise both."""
    if tp == 1:
        return [False]
    if fixed is None and work.model.experts is not None:
        return [True]
    return [True, False] if fixed is None else [fixed]


def _chunks(fixed: int | None, pp: int, layers: int, stages: str) -> list[int]:
    """Chunks per rank to try: the number of stated stages; otherwise 1, and each with which all
    chunks have equally many layers if embedding, head or both count as a layer (Megatron:
    account_for_embedding_in_pipeline_split, account_for_loss_in_pipeline_split).  If there is no
    such number, those with which the end chunks are not empty and together lack at most MOST_LESS
    layers, which the text of stages can express."""
    if fixed is not None:
        return [fixed]
    if stages:
        return [max(1, len(read_stages(stages)) // pp)]
    if pp == 1:
        return [1]
    less = {v: -layers % (pp * v) for v in range(2, layers // pp + 1)}
    usual = [v for v, n in less.items() if n <= ENDS]
    far = [v for v, n in less.items() if n <= MOST_LESS and 2 * -(-layers // (pp * v)) >= n + 2]
    return [1, *(usual or far)]


def _states_and_experts(
    fixed: Fixed, degrees: tuple[int, int, int, int], work: Workload, system: System
) -> list[tuple[ZeroStage, int, int | None]]:
    """The (ZeRO stage, ep, etp) to try at degrees (tp, cp, pp, dp), sorted by stage.  Experts may
    have data-parallel peers although the other parameters have none."""
    (tp, cp, pp, dp), experts = degrees, work.model.experts
    ranks, pairs = tp * cp * dp, list[tuple[int, int | None]]([(1, None)])
    if experts is not None:  # an expert is whole, or is split as attention is
        pairs = [
            (ep, etp)
            for etp in (sorted({1, tp}) if fixed.etp is None else [fixed.etp])
            if ranks % etp == 0
            for ep in _degrees(fixed.ep, ranks // etp, experts.count)
            if experts.count % ep == 0
        ]
    found = [
        (stage, ep, etp)
        for ep, etp in pairs
        for stage in _stages(fixed.zero_stage, pp, dp * cp > 1 or ranks > ep * (etp or tp), system)
    ]
    return sorted(found, key=itemgetter(0))


def _stages(fixed: ZeroStage | None, pp: int, peers: bool, system: System) -> list[ZeroStage]:
    """The ZeRO stages to try: in a pipeline those that the stack supports there, without peers only
    stage 1, because all are equal.  In a pipeline FSDP's stage 2 equals its stage 3."""
    if fixed is not None:
        return [fixed]
    if not peers:
        return [1]
    if pp == 1:
        return [0, 1, 2, 3]
    same = system.zero.data_parallel == "fsdp" and 3 in system.accepts.pipeline_zero_stages
    return [stage for stage in system.accepts.pipeline_zero_stages if not (same and stage == 2)]


def partitions(layout: Layout, layers: int) -> Iterator[LayoutChoice]:
    """Yield the even partition, then its variants. Without interleaving, at pp 3 or more, the first
    rank, the last rank or both have one layer more or fewer. With interleaving, if up to MOST_LESS
    layers are missing to fill all chunks, the missing layers are split in every way between the
    first and the last chunk; the even partition already takes ENDS missing layers from both."""
    sizes = even_sizes(layers, layout)
    even = LayoutChoice(layout, sizes)
    yield even
    if layout.vpp == 1:
        steps = product((-1, 0, 1), repeat=2) if layout.pp > 2 else ()
        ends = [(sizes[0] + first, sizes[-1] + last) for first, last in steps]
    else:
        each = max(sizes)
        less = each * layout.num_chunks - layers
        apart = less not in (0, ENDS) and less <= MOST_LESS
        ends = [(each - n, each - less + n) for n in range(less + 1) if apart]
    for first, last in ends:
        moved = ended(even, layout, layers, first, last)
        if moved is not None and min(moved.sizes) > 0 and not moved.even:
            yield moved
