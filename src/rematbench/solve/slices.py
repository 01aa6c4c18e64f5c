"""Lengths of the slices of a sequence: of equal work, or of the least time in a pipeline."""

from collections.abc import Iterable
from itertools import pairwise
from math import fsum, inf, sqrt

from msgspec.structs import replace

from rematbench.costs.operators.kernels import Attention, Gemm
from rematbench.costs.operators.ops import Op, OpTable
from rematbench.engine.lowering.slices import behind, slice_problems
from rematbench.plan import Plan, slices_refusal
from rematbench.problem import Problem
from rematbench.solve.layer_costs import backward_s, forward_s


def refused(problem: Problem, base: Plan, count: int = 2, *, interleaved: bool = False) -> str:
    """Why a base cannot be cut into `count` slices; empty if it can."""
    usual = ("interleaved_1f1b",) if interleaved else ("1f1b", "gpipe")
    if base.schedule not in usual or base.orders or base.slices:
        other = "another order" if base.orders or base.slices else base.schedule
        return f"needs a base with the passes of {' or '.join(usual)}, not {other}"
    probe = replace(base, slices=(problem.workload.seq_len,) * (count > 1))
    of_job = problem.system, problem.layout, problem.workload, problem.attention
    return slices_refusal(probe, *of_job)


def unit_tokens(problem: Problem) -> int:
    """The divisor of every slice's length in tokens: sequence parallelism splits slices."""
    return problem.layout.tp if problem.layout.sequence_parallel else 1


def equal_work(problem: Problem, count: int) -> tuple[int, ...]:
    """Return the lengths of `count` slices with equal FLOPs of layers (Sun et al. 2024, arXiv
    2406.03488): the first x tokens have a x + b x^2 / 2 FLOPs.  Empty if the sequence has too few
    tokens."""
    seq_len, unit = problem.workload.seq_len, unit_tokens(problem)
    layer = problem.layer(0)
    gemms = (kernel for op in layer.ops for kernel in op.forward if isinstance(kernel, Gemm))
    each = sum(2.0 * kernel.n * kernel.k * kernel.m for kernel in gemms) / seq_len
    (kernel,) = (one for one in layer.op("attention").forward if isinstance(one, Attention))
    pair = 2.0 * kernel.batch * kernel.heads * (kernel.head_dim + kernel.values)
    total = each * seq_len + pair * seq_len**2 / 2
    ends = [
        (sqrt(each**2 + 2 * pair * total * number / count) - each) / pair
        for number in range(1, count)
    ]
    cuts = [0, *(unit * round(end / unit) for end in ends), seq_len]
    found = tuple(b - a for a, b in pairwise(cuts))
    return found if min(found) > 0 else ()


def even(problem: Problem, count: int) -> tuple[int, ...]:
    """Return the lengths of `count` equal slices; empty if the sequence has no such slices."""
    size, rest = divmod(problem.workload.seq_len, count)
    return () if rest or size % unit_tokens(problem) else (size,) * count


def least_time(problem: Problem, plan: Plan, pieces: int) -> tuple[int, ...]:
    """Return the lengths of the slices with the least m sum t_i + (pp - 1) max t_j for m
    micro-batches (Li et al. 2021, arXiv 2102.07988, section 3.3); each slice consists of some of
    `pieces` equal pieces of the sequence.  Dynamic programming finds the least sum under each bound
    of t_j.  t is the time of a slice's passes on the longest stage and of two messages (the mean
    over all hops); only attention makes it grow with the tokens before the slice."""
    lay, seq_len = problem.layout, problem.workload.seq_len
    pp, m = lay.pp, lay.num_micro_batches
    size = seq_len // pieces
    layers = max(len(chunk) for rank in plan.partition for chunk in rank)
    lengths = tuple(size * count for count in range(1, pieces + 1))
    tables = [part.layer(0) for part in slice_problems(problem, lengths)]

    def stage_s(table: OpTable, ops: Iterable[Op]) -> float:
        some = replace(table, ops=tuple(ops))
        return layers * (forward_s(problem, some) + backward_s(problem, some))

    def messages_s(table: OpTable) -> float:
        nbytes = table.activations["layer_input"].nbytes
        hops = range(pp - 1)
        sent = [problem.cost.p2p_s(nbytes, r, r + 1, replicated=not lay.sp) for r in hops]
        return 2 * fsum(sent) / max(1, pp - 1)

    rest_s = [
        stage_s(t, (op for op in t.ops if op.name != "attention")) + messages_s(t) for t in tables
    ]

    def seconds(count: int, before: int) -> float:
        """Seconds of a slice of `count` pieces that follows `before` pieces."""
        table = tables[count - 1]
        return rest_s[count - 1] + stage_s(table, [behind(table.op("attention"), before * size)])

    known = {(k, i): seconds(k, i) for i in range(pieces) for k in range(1, pieces - i + 1)}
    best: tuple[float, tuple[int, ...]] = (inf, (seq_len,))
    for bound in sorted(set(known.values())):
        if (pp - 1) * bound >= best[0]:
            break
        least: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for end in range(1, pieces + 1):
            ways_here = (
                (least[end - k][0] + m * known[k, end - k], (*least[end - k][1], k * size))
                for k in range(1, end + 1)
                if known[k, end - k] <= bound
            )
            least.append(min(ways_here, default=(inf, ())))
        found = (least[-1][0] + (pp - 1) * bound, least[-1][1])
        best = min(best, found)
    return best[1]
