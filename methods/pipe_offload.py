"""pipe_offload: offload the chunks that are alive longest, in smaller groups of micro-batches.

Claim: with these chunks on the host, a pipeline's activations need less memory than half of
interleaving's, so less tensor parallelism is needed: up to 19 % faster with less memory.
Source: Wan et al., PipeOffload, arXiv 2503.01328; sail-sg/zero-bubble-pipeline-parallelism,
scheduler/group_interleaved_1f1b.py and offloading.py. Interleaving in groups of g micro-batches,
half of pp <= g <= pp, keeps g (vpp - 1) + pp - r chunks on rank r. The first chunks of every rank,
whose backward comes last, are copied to the host after their forward and back before their
backward.
Deviations: whole chunks are copied, as many as memory requires; the repository recomputes norms and
activation functions, pools host buffers, and lets the two ranks of a PCIe switch copy in turn. The
last rank's last chunk, whose backward follows at once, stays on the device. Weight gradients follow
input gradients. The method has no plan for the probes of `search`, which have one chunk on a rank.
"""

from typing import ClassVar

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import (
    NonNegativeInt,
    Offload,
    Plan,
    PositiveInt,
    Problem,
    Rule,
    Select,
    Settings,
    Transfers,
    Unsupported,
    passes_refusal,
)
from rematbench.solve.kept import no_offload, refused_in_pieces, smallest_fitting, with_live_rules
from rematbench.solve.orders import grouped_orders, smallest_group


class PipeOffload(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`group`: micro-batches in a group (None: the fewest). `chunks`: how many of a rank's chunks
    are offloaded (None: the fewest with which the plan fits)."""

    name: ClassVar[str] = "pipe_offload"
    moves_passes: ClassVar[bool] = True
    grid: ClassVar[tuple[Settings, ...]] = tuple({"chunks": n} for n in range(3))
    group: PositiveInt | None = None
    chunks: NonNegativeInt | None = None

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        lay, group = problem.layout, self.group or smallest_group(problem)
        if lay.vpp == 1 or base.orders:
            words = "the base already orders its passes" if base.orders else "a rank has one"
            return Unsupported(f"needs several chunks on a rank in the layout's order, but {words}")
        if group is None or lay.num_micro_batches % group or not lay.pp <= 2 * group <= 2 * lay.pp:
            words = f"needs a group size from pp / 2 to pp ({lay.pp}) that divides"
            chosen = f"not {group}" if group else "but there is none"
            return Unsupported(f"{words} {lay.num_micro_batches} micro-batches, {chosen}")
        if refused := no_offload(problem):
            return Unsupported(refused)
        made = replace(base, orders=grouped_orders(problem, group))
        every = self.at(problem, made, lay.vpp)
        refused = passes_refusal(made, lay, problem.system, problem.workload.model)
        if refused := refused or refused_in_pieces(problem, every):
            return Unsupported(refused)
        chunks, bound = self.chunks, "given"
        if chunks is None:
            fits = smallest_fitting(problem, lambda n: self.at(problem, made, n), lay.vpp)
            chunks, bound = (lay.vpp, "no number fits") if fits is None else (fits, "device ledger")
        plan = self.at(problem, made, min(chunks, lay.vpp))
        return plan.noting(group=group, chunks=chunks, bound=bound)

    def at(self, problem: Problem, base: Plan, chunks: int) -> Plan:
        first, last = tuple(range(min(chunks, problem.layout.vpp - 1))), problem.layout.pp - 1
        selects = [Select(chunks=first, kept=True)] if first else []
        if chunks == problem.layout.vpp:
            selects.append(Select(stages=tuple(range(last)), chunks=(chunks - 1,), kept=True))
        made = with_live_rules(problem, base, *(Rule(select, Offload()) for select in selects))
        return base if made == base else replace(made, transfers=Transfers())
