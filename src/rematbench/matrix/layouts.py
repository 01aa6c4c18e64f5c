"""Candidate layouts of a cell: one declared list for all arms, cut by stated rules.

A closed-form estimate cuts and ranks the candidates; the speeds in tables are simulated.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from msgspec import Struct
from msgspec.structs import replace

from rematbench.choose.outcome import make_problem
from rematbench.cost.states import shard
from rematbench.matrix.spec import Grid, MatrixSpec, Work
from rematbench.problem import Problem, rank_parameters
from rematbench.published.bands import leaving_reserve
from rematbench.solve.layers import backward_s, forward_s
from rematbench.spec.cluster import Cluster
from rematbench.spec.layout import Layout, LayoutError
from rematbench.spec.problemspec import ProblemSpec
from rematbench.spec.system import System
from rematbench.workload import Model

KEPT = "tried"
RULES = (
    "a rule of layouts (batch, heads, chunks, nodes)",
    "tokens of a micro-batch on one rank out of range",
    "states alone do not fit",
    "estimated slower than the ones tried",
)
"""The reasons why a candidate is not tried, in the order in which the rules apply."""


class Candidate(Struct, frozen=True, kw_only=True):
    """One candidate of a cell.  `fate`: KEPT, or the rule that dropped the candidate.
    `estimated_s`: estimated seconds of a step; None where an earlier rule dropped the candidate."""

    layout: Layout
    fate: str
    estimated_s: float | None = None
    problem: Problem | None = None


class Estimate(Struct, frozen=True, kw_only=True, order=True):
    """Closed-form estimates of a candidate: seconds of a step, and bytes of the states, of the
    saved tensors of one layer and of the head, and of all saved tensors in flight on the first and
    the last rank.  `usable`: usable bytes of a device.
    """

    step_s: float
    states: int
    layer: float
    head: float
    first: float
    last: float
    usable: int

    def need(self, kept: float) -> float:
        """Bytes of the fuller of the first and the last rank, for a method that keeps the share
        `kept` of the saved tensors."""
        ends = max(kept * self.first, kept * self.last + self.head)
        return self.states + self.layer + ends


def candidates(
    spec: MatrixSpec, work: Work, model: Model, cluster: Cluster, system: System, seq_len: int
) -> list[Candidate]:
    """All candidates of a cell with their fates, in a fixed order."""
    asked = spec.problem(seq_len, model=model, cluster=cluster, system=system, gpus=work.gpus)
    made = [_made(spec.layouts, one) for one in listed(spec.layouts, asked, model.num_layers)]
    alive = [(guess, i) for i, (_, guess) in enumerate(made) if guess is not None]
    chosen = _chosen(spec, alive, [candidate.layout.pp for candidate, _ in made])
    found = []
    for index, (candidate, estimate) in enumerate(made):
        if estimate is None:
            found.append(candidate)
        elif index in chosen:
            found.append(replace(candidate, estimated_s=estimate.step_s))
        else:
            told = replace(candidate, fate=RULES[3], problem=None, estimated_s=estimate.step_s)
            found.append(told)
    return found


def listed(grid: Grid, asked: ProblemSpec, num_layers: int) -> Iterator[ProblemSpec]:
    """The combinations of the declared degrees that use all GPUs, before any rule."""
    for tp, cp, pp in product(grid.tp, grid.cp, grid.pp):
        if asked.gpus % (tp * cp * pp):
            continue
        for layers in grid.layers_per_chunk:
            vpp = 1 if layers == 0 else num_layers // (pp * layers)
            if layers and (pp == 1 or vpp < 2 or num_layers % (pp * layers)):
                continue
            yield replace(asked, tp=tp, cp=cp, pp=pp, vpp=vpp)


def _made(grid: Grid, asked: ProblemSpec) -> tuple[Candidate, Estimate | None]:
    """A candidate after the rules that compare no candidates, and its estimate (None: dropped)."""
    layout = asked.layout
    local = asked.seq_len * layout.micro_batch // (layout.tp * layout.cp)
    if not grid.least_tokens <= local <= grid.most_tokens:
        return Candidate(layout=layout, fate=RULES[1]), None
    try:
        problem = make_problem(asked)
    except LayoutError:
        return Candidate(layout=layout, fate=RULES[0]), None
    problem = leaving_reserve(problem)
    guess = estimate(problem)
    if guess.states >= guess.usable:
        return Candidate(layout=layout, fate=RULES[2]), None
    return Candidate(layout=layout, fate=KEPT, problem=problem), guess


def _chosen(spec: MatrixSpec, alive: list[tuple[Estimate, int]], depth: Sequence[int]) -> set[int]:
    """The indices of the candidates to try.  For each declared share of saved tensors that a method
    may keep: among the candidates that should fit by the estimate, the `fastest` ones, and the
    fastest one with at least `same_layout_pp` pipeline ranks, behind which offload can hide.  And
    the candidate with the fewest bytes.  `depth`: pipeline ranks of each candidate."""
    ranked = sorted(alive, key=lambda pair: (pair[0].step_s, pair[1]))
    chosen: set[int] = set()
    for kept in spec.layouts.kept_shares:
        fitting = [index for guess, index in ranked if guess.need(kept) < guess.usable]
        deep = [index for index in fitting if depth[index] >= spec.same_layout_pp]
        chosen |= {*fitting[: spec.layouts.fastest], *deep[:1]}
    if ranked:
        chosen.add(min(ranked, key=lambda pair: pair[0].need(1.0))[1])
    return chosen


def estimate(problem: Problem) -> Estimate:
    """The estimate of a candidate.  The step is (m v + p - 1) chunks of average layers without
    overlap, for m micro-batches, v chunks per rank and p ranks, plus the head or embedding once per
    micro-batch.  The bytes are those of the layers in flight on the first and the last rank."""
    lay, table = problem.layout, problem.layer_kinds[0]
    slots = lay.num_micro_batches * lay.vpp + lay.pp - 1
    layers = problem.workload.model.num_layers / lay.num_chunks
    layer_s = forward_s(problem, table) + backward_s(problem, table)
    ends = problem.head if lay.pp > 1 else problem.embedding
    ends_s = forward_s(problem, ends) + backward_s(problem, ends)
    warm = (lay.vpp - 1) * lay.pp + 2 * (lay.pp - 1) + 1 if lay.vpp > 1 else lay.pp
    chunks = min(warm, lay.num_micro_batches * lay.vpp)
    return Estimate(
        step_s=slots * layers * layer_s + lay.num_micro_batches * ends_s,
        states=state_bytes(problem),
        layer=float(table.saved_bytes),
        head=float(problem.head.saved_bytes),
        first=chunks * layers * table.saved_bytes,
        last=(chunks - lay.pp + 1 if lay.vpp > 1 else 1) * layers * table.saved_bytes,
        usable=problem.usable_bytes,
    )


def state_bytes(problem: Problem) -> int:
    """Bytes of parameters, gradients and optimizer states on the fuller of the first and the last
    rank, with the shards of the base plan."""
    plan, system = problem.base_plan, problem.system
    count = max(rank_parameters(problem, plan, rank) for rank in (0, problem.layout.pp - 1))
    return (
        shard(count, plan.state("parameter").shards) * system.param_bytes
        + shard(count, plan.state("gradient").shards) * system.grad_bytes
        + shard(count, plan.state("optimizer").shards) * system.optimizer_bytes
    )
