"""The facts of layouts that bounds need, and the bounds, as arrays over layouts."""

from collections.abc import Callable, Sequence
from functools import cached_property
from math import floor
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rematbench.costs.operators.ops import OpTable
from rematbench.costs.states import reduce_buckets
from rematbench.engine.lowering.states.state_shards import shards_experts
from rematbench.inputs.layout import Layout
from rematbench.inputs.recipes import resident_bytes
from rematbench.plan import StateFate, state_fates
from rematbench.problem import Problem, gathered_bytes, head_parameters

Array = NDArray[np.float64]


class Columns:
    """The facts that bounds need of the layouts of a group: arrays with an entry per layout.
    `sizes`: the layers of each layout's chunks, in pipeline order.  `resident`: if a method places
    optimizer states, the parameters of the first, the second and the last rank whose states are on
    the device, [3, layouts]."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        sizes: Sequence[tuple[int, ...]],
        problem: Problem,
        resident: Array | None = None,
    ) -> None:
        self.layouts, self.sizes, self.problem, self._resident = layouts, sizes, problem, resident
        self.gpus_per_node = problem.cluster.gpus_per_node
        self.pp = np.array([lay.pp for lay in layouts])
        self.vpp = np.array([lay.vpp for lay in layouts])
        self.count = np.array([lay.num_micro_batches for lay in layouts])
        rows = [_rank_layers(*each) for each in zip(layouts, sizes, strict=True)]
        self.first, self.second, self.last = (np.array([r[i] for r in rows]) for i in range(3))
        self.inner_work = np.array([r[3] for r in rows])
        self.inner_before = np.array([r[4] for r in rows])
        self.inner_rank = np.array([r[5] for r in rows])
        self.before_last = np.array([r[6] for r in rows])
        self.opening = np.array([chunks[0] for chunks in sizes])
        self.ending = np.array([chunks[-1] for chunks in sizes])
        chunks = [own[1 :: lay.pp] or own for lay, own in zip(layouts, sizes, strict=True)]
        self.inner = np.array([min(own) for own in chunks])
        self.fewest = np.array([min(chunks) for chunks in sizes])
        self.most = np.array([max(chunks) for chunks in sizes])
        self._layers_of: dict[int, NDArray[np.int64]] = {}
        self._in_flight_at: dict[int, NDArray[np.int64]] = {}
        self._copying: dict[int, tuple[NDArray[np.int64], ...]] = {}

    @cached_property
    def waits(self) -> NDArray[np.bool_]:
        """Whether all passes of a rank are in flight before its first backward, as in an
        interleaved schedule with as many micro-batches as ranks."""
        found: NDArray[np.bool_] = (self.vpp > 1) & (self.count == self.pp)
        return found

    def layers_of(self, stage: int) -> NDArray[np.int64]:
        """The layers of the smallest chunk of the rank `stage`; 0 if there is no such rank."""
        if stage not in self._layers_of:
            pairs = zip(self.layouts, self.sizes, strict=True)
            fewest = [min(own[stage :: lay.pp], default=0) for lay, own in pairs]
            self._layers_of[stage] = np.array(fewest)
        return self._layers_of[stage]

    def in_flight_at(self, stage: int) -> NDArray[np.int64]:
        """The most passes in flight of the rank `stage`; of the last rank if there is no such
        rank."""
        if stage not in self._in_flight_at:
            after = np.maximum(0, self.pp - 1 - stage)
            self._in_flight_at[stage] = self.in_flight_before(after)
        return self._in_flight_at[stage]

    @cached_property
    def nodes(self) -> tuple[dict[int, NDArray[np.int64]], ...]:
        """The passes in flight, summed over the GPUs of a stage on one node, by stage: on the first
        node, and on the first node that has no rank of the first stage."""
        ranks = np.array([lay.tp * lay.cp * lay.dp for lay in self.layouts])
        node = self.gpus_per_node
        found: list[dict[int, NDArray[np.int64]]] = []
        for begun in (0 * ranks, -(-ranks // node) * node):  # this many ranks come before the node
            found.append({})
            for stage in range(2 + 2 * node // int(ranks.min())):
                end = np.minimum((stage + 1) * ranks, begun + node)
                here = np.maximum(0, end - np.maximum(stage * ranks, begun))
                # The last stage of a pipeline may keep everything on the device.
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
        """The number of passes whose copies to the host hold device memory during the forward after
        which the most passes are in flight, on the first, second and last rank.  Copies back for
        the first backward begin before that forward, so that pass's copies must have ended."""
        if release_lag not in self._copying:
            self._copying[release_lag] = self._copying_of(release_lag)
        return self._copying[release_lag]

    def _copying_of(self, release_lag: int) -> tuple[NDArray[np.int64], ...]:
        found = []
        for rank, after in enumerate((self.pp - 1, np.maximum(self.pp - 2, 0), 0 * self.pp)):
            others = self.in_flight[rank] - 1
            # Forwards since that of the pass whose copies come back first.
            since = np.where(self.vpp == 1, others, 2 * after)
            since = np.where(self.waits, self.pp - 1, since)
            own = (since >= 1) & (since <= release_lag)
            found.append(np.maximum(np.minimum(release_lag, others) - own, 0))
        return tuple(found)

    @cached_property
    def sum_bytes(self) -> tuple[Array, Array, Array]:
        """Bytes of whole accumulated gradients on the first, the second and the last rank while the
        most passes are in flight, if further passes follow."""
        width = np.array([_held(lay, self.problem)[2] for lay in self.layouts])
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
        """(parameters without experts, parameters of experts) on the first, the second and the last
        rank; with `trained` only those that have a gradient."""
        problem = self.problem
        dense_layer, layer, experts = least_parameters(problem, trained=trained)
        head = head_parameters(problem)[trained]
        embedding = _counted(problem.embedding, trained)
        single, dense = self.pp == 1, problem.workload.model.first_dense
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
        """Bytes of training states, of permanent buckets and of parameters that a pipeline keeps
        gathered, on a device of the first, the second and the last rank."""
        problem, system = self.problem, self.problem.system
        work, generation = problem.workload, problem.cluster.generation
        fewer = min(0, floor(resident_bytes(work, system, generation, 0)))
        own = system.states.param_bytes + fewer
        sizes = (own, system.states.grad_bytes, system.states.optimizer_bytes)
        per = np.array([_shards(lay, problem) for lay in self.layouts])
        held = np.array([reduce_buckets(0, lay, system).standing for lay in self.layouts])
        apart = np.array([_expert_shards(lay, problem) for lay in self.layouts])
        whole = np.array([_held(lay, problem)[:2] for lay in self.layouts])
        kinds, placed = list(enumerate(sizes)), self._resident
        if placed is not None:
            kinds.pop()
        found: list[Array] = []
        for rank, ((n, m), updated) in enumerate(zip(self._parameters, self._trained, strict=True)):
            total: Array = held + (0 if placed is None else sizes[2] * placed[rank])
            total = total + whole[:, 0] * n + whole[:, 1] * m
            states: Array = np.zeros_like(total)
            for i, nbytes in kinds:
                many = updated if i else (n, m)
                spread: Array = -(-many[0] // per[:, i]) - (-many[1] // apart[:, i])
                states = states + spread * nbytes
            found.append(total + states)
        first, second, last = found
        return first, second, last


def least_parameters(problem: Problem, *, trained: bool) -> tuple[int, int, int]:
    """The fewest parameters of a dense layer before those with experts (0 without such layers), of
    any other layer without its experts, and of its experts; with `trained` only those that have a
    gradient."""
    kinds = problem.layer_kinds
    later = [table for table in kinds if table.expert_parameters] or kinds
    experts = min(t.trained_experts if trained else t.expert_parameters for t in later)
    dense = [_counted(table, trained) for table in kinds if table not in later]
    return min(dense, default=0), min(_counted(t, trained) for t in later) - experts, experts


def _counted(table: OpTable, trained: bool) -> int:
    return table.trained if trained else table.parameters


def _held(layout: Layout, problem: Problem) -> tuple[int, int, int]:
    """Bytes per parameter that a pipeline holds until its last pass: in gathered copies, in
    gathered copies of experts, and in accumulated whole gradients."""
    parameter, gradient, _ = state_fates(layout, problem.system)
    width = gathered_bytes(problem) if parameter.release == "step" else 0
    if problem.workload.fp8_params:  # a lower bound: some weights are not quantised, and are wider
        width = min(width, problem.system.states.gather_bytes)
    here = layout.state_shards == 1 and parameter.home == "device"
    sums = problem.system.states.reduce_bytes if gradient.release == "step" else 0
    return 0 if here else width, width if layout.expert_shards > 1 else 0, sums


def _shards(layout: Layout, problem: Problem) -> list[int]:
    """The number of ranks over which each kind of state is sharded; 2**60, which leaves almost no
    bytes on the device, for states in host memory and for gradients that may not exist yet."""
    fates = state_fates(layout, problem.system)
    away = [f.home == "host" or _comes_later(f, layout, problem) for f in fates]
    return [1 << 60 if gone else fate.shards for gone, fate in zip(away, fates, strict=True)]


def _comes_later(fate: StateFate, layout: Layout, problem: Problem) -> bool:
    """Whether gradients may not exist at the peak, because they are accumulated as sums until the
    reduction, or because the only backward of the step allocates them."""
    once = layout.num_micro_batches == 1 and layout.pp == 1
    fresh = problem.system.states.fresh_gradients and once
    return fate.kind == "gradient" and (fate.release == "step" or fresh)


def _expert_shards(layout: Layout, problem: Problem) -> list[int]:
    fates = state_fates(layout, problem.system)
    return [
        (1 << 60 if _comes_later(fate, layout, problem) else layout.expert_shards)
        if shards_experts(fate, layout)
        else 1
        for fate in fates
    ]


def _rank_layers(lay: Layout, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The layers of the first, second and last rank; of the inner rank that bounds the step most:
    its layers, the layers before it, and its number; and the layers before the last rank."""
    ranks = [sum(sizes[rank :: lay.pp]) for rank in range(lay.pp)]
    before = [sum(sizes[:rank]) for rank in range(lay.pp)]
    inner = range(1, lay.pp - 1)
    busiest = max(inner, key=lambda r: lay.num_micro_batches * ranks[r] + before[r], default=0)
    second = ranks[1] if lay.pp > 1 else ranks[0]
    return (ranks[0], second, ranks[-1], ranks[busiest], before[busiest], busiest, before[-1])


class Bounds:
    """Lower bounds for each layout, as arrays [steps of the candidate's share, layouts]: bytes of
    the fullest device, host bytes of the fullest node, and seconds of a step (`step_s`)."""

    def __init__(self, peak_bytes: Array, host_bytes: Array, step_s: Callable[[], Array]) -> None:
        self.peak_bytes, self.host_bytes, self._step_s = peak_bytes, host_bytes, step_s

    @cached_property
    def step_s(self) -> Array:
        return self._step_s()


class Wider(NamedTuple):
    """Seconds by which a forward and a backward of all chunks exceed the lines of probes, on the
    first rank, on the inner rank that bounds the step most, and on the last rank."""

    first: Any = 0.0
    inner: Any = 0.0
    last: Any = 0.0


AS_PROBED = Wider()
"""No excess, for models with one kind of layer."""


class Short(NamedTuple):
    """Lower bounds of the bytes that each layout lacks (negative: free bytes), on a device and in a
    node's host memory, at each step of a candidate's share: arrays [steps, layouts]. `falls`: for a
    layout where no step fits, the fewest bytes that it lacks and whether they are host bytes; None
    for the other layouts."""

    device: Array
    host: Array
    falls: list[tuple[float, bool] | None]
