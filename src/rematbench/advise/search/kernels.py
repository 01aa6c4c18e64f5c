"""Seconds of a layer's kernels and collectives, from its operator table."""

from math import fsum

from rematbench.advise.search.passes import ChunkCost, PassCost
from rematbench.costs.operators.ops import Comm, Op, OpTable
from rematbench.problem import Problem


def placed_alike(problem: Problem) -> bool:
    """Whether tensor- and context-parallel groups lie alike on nodes in every layout: their ranks
    are neighbours, and a group's size divides a node or is a number of whole nodes."""
    lay, node = problem.layout, problem.cluster.gpus_per_node
    sizes = (lay.tp, lay.tp * lay.cp * lay.ulysses)
    whole = all(node % size == 0 or size % node == 0 for size in sizes)
    return whole and problem.system.rank_order[:2] == ("tp", "cp")


def compute_cost(forward_s: float, backward_s: float) -> ChunkCost:
    """The costs of a chunk of which only the seconds of compute are known."""
    none = (0.0,) * 5
    forward, backward = (PassCost(s, *none, 0, 0) for s in (forward_s, backward_s))
    return ChunkCost(forward, backward, *(0.0,) * (len(ChunkCost._fields) - 2))


def layer_cost(problem: Problem, table: OpTable) -> ChunkCost:
    """Seconds of a layer's kernels and of the collectives that compute waits for."""
    found = [_op_s(problem, op) for op in table.ops]
    return compute_cost(fsum(forward for forward, _ in found), fsum(back for _, back in found))


def _op_s(problem: Problem, op: Op) -> tuple[float, float]:
    """Seconds of an operator's forward and backward, with its collectives before, after or beside
    its kernels as emit_op and emit_backward place them."""
    cost = problem.cost
    gemm = problem.system.tp_overlap == "gemm"
    split = op.has_weight and problem.system.tp_overlap in ("backward", "gemm")
    comm_s = cost.comm_s if placed_alike(problem) else lambda comm, stage: 0.0

    def after(kernel_s: float, *comms: tuple[Comm | None, bool]) -> float:
        beside_s = kernel_s
        for comm, beside in comms:
            if comm and (beside or comm.kind == "ring"):
                beside_s = max(beside_s, comm_s(comm, 0))
            elif comm:
                kernel_s += comm_s(comm, 0)
        return max(kernel_s, beside_s)

    fused = gemm and op.name != "attention"
    forward = after(
        cost.op_s(op, "forward"), (op.gather, fused), (op.reduce, fused and op.has_weight)
    )
    brought = (op.grad_gather, gemm and op.has_weight), (op.regather, split)
    inputs = after(cost.op_s(op, "backward_input"), *brought)
    return forward, inputs + after(cost.op_s(op, "backward_weight"), (op.grad_reduce, split))
