"""The space of a search: every layout that the stack can run, and counts of refusals by rule."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from rematbench.plan import Plan
from rematbench.problem import even_partition
from rematbench.spec.cluster import Cluster
from rematbench.spec.layout import Layout, LayoutError, check_layout
from rematbench.spec.problemspec import ProblemSpec
from rematbench.spec.system import System, ZeroStage
from rematbench.workload import Workload

DEGREES = ("tp", "cp", "pp", "vpp", "dp")
"""The degrees that tables show of every layout, in this order."""

MOST_MICRO_BATCH = 64
"""Most sequences in a micro-batch: no kernel becomes faster with more."""


class Fixed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Degrees that the user has fixed; None for a degree to search."""

    tp: int | None = None
    cp: int | None = None
    ulysses: int | None = None
    pp: int | None = None
    vpp: int | None = None
    micro_batch: int | None = None
    zero_stage: ZeroStage | None = None


class Choice(Struct, frozen=True):
    """A layout and the layers of each of its chunks, in pipeline order.  `even`: the partition is
    the even one; `hosted`: the optimizer's states are in host memory, although the stack keeps them
    on the device."""

    layout: Layout
    sizes: tuple[int, ...]
    even: bool = True
    hosted: bool = False

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


def space(
    spec: ProblemSpec, fixed: Fixed, work: Workload, cluster: Cluster, system: System
) -> Space:
    """All layouts of `spec`'s GPUs and global batch with the `fixed` degrees; LayoutError where the
    fixed degrees do not divide the GPUs."""
    refused: Counter[str] = Counter()
    ranks = (fixed.tp or 1) * (fixed.cp or 1) * (fixed.pp or 1) * (fixed.ulysses or 1)
    if spec.gpus % ranks:
        raise LayoutError(f"gpus {spec.gpus} must be a multiple of the degrees given = {ranks}")
    choices: list[Choice] = []
    for layout in layouts(spec, fixed, work, system, refused):
        try:
            check_layout(layout, work, cluster, system)
        except LayoutError as error:
            rule, _, _ = str(error).partition(", but ")
            refused[re.sub(r"\b[1-9]\d*\b(?! x )", "N", rule)] += 1  # 2 x cp is the rule's own
            continue
        found = list(partitions(layout, work.model.num_layers))
        choices += found
        if spec.optimizer is None and may_host(cluster, system):
            choices += [replace(choice, hosted=True) for choice in found]
    return Space(tuple(choices), dict(refused))


def may_host(cluster: Cluster, system: System) -> bool:
    """Whether the optimizer's states may go to host memory and the cluster has a rate for their
    update there."""
    return not system.optimizer_on_host and cluster.host_update_parameters_per_s is not None


def layouts(
    spec: ProblemSpec, fixed: Fixed, work: Workload, system: System, refused: Counter[str]
) -> Iterator[Layout]:
    """Every product of degrees that uses all GPUs; the rules of layouts are not yet checked.  Adds
    to `refused` the degrees whose replicas do not divide the batch."""
    asked = spec.gpus
    spreads = product(
        _degrees(fixed.tp, asked, work.model.num_heads),
        _degrees(fixed.cp, asked, asked if _rings(system) else 1),
        _degrees(fixed.pp, asked, work.model.num_layers),
    )
    for tp, cp, pp in spreads:
        dp, rest = divmod(asked, tp * cp * pp)
        if rest or dp == 0:
            continue
        for ulysses in _degrees(fixed.ulysses, dp, dp if "ulysses" in system.features else 1):
            replicas, rest = divmod(dp, ulysses)
            if rest or not replicas:
                refused["dp is no multiple of ulysses"] += 1
                continue
            if spec.global_batch % replicas:
                refused["global batch is no multiple of the replicas"] += 1
                continue
            for micro_batch, vpp, zero in product(
                _micro_batches(fixed.micro_batch, spec.global_batch // replicas),
                _chunks(fixed.vpp, pp, work.model.num_layers),
                _stages(fixed.zero_stage, pp, dp * cp),
            ):
                yield Layout(
                    tp=tp, sp=tp > 1, cp=cp, pp=pp, vpp=vpp, dp=dp, zero_stage=zero,
                    ulysses=ulysses, micro_batch=micro_batch, global_batch=spec.global_batch,
                )  # fmt: skip


def _rings(system: System) -> bool:
    return system.cp_kind in ("allgather", "ring")


def _degrees(fixed: int | None, total: int, most: int) -> list[int]:
    if fixed is not None:
        return [fixed]
    return [n for n in range(1, min(total, most) + 1) if total % n == 0]


def _micro_batches(fixed: int | None, sequences: int) -> list[int]:
    if fixed is not None:
        return [fixed]
    return [n for n in _degrees(None, sequences, MOST_MICRO_BATCH) if n & (n - 1) == 0]


def _chunks(fixed: int | None, pp: int, layers: int) -> list[int]:
    """Chunks per rank: 1, and each number for which all chunks have equally many layers."""
    if fixed is not None:
        return [fixed]
    if pp == 1:
        return [1]
    return [1, *(v for v in range(2, layers // pp + 1) if layers % (pp * v) == 0)]


def _stages(fixed: ZeroStage | None, pp: int, shards: int) -> list[ZeroStage]:
    """The modelled ZeRO stages; only stage 1 without data-parallel peers, where all are equal."""
    if fixed is not None:
        return [fixed]
    if shards == 1:
        return [1]
    return [0, 1] if pp > 1 else [0, 1, 2, 3]


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
