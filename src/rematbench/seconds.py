"""Bind a problem's costs to actions: the only bridge between the vocabulary and the formulas."""

from rematbench.action import Action, Kind
from rematbench.ops import Op
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.simulate import Seconds

DIRECTION = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward",
    Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight",
}


def rank_parameters(problem: Problem, plan: Plan, rank: int) -> int:
    """Parameters one rank computes with, after tensor and pipeline parallelism."""
    layers = sum(problem.layer(i).parameters for chunk in plan.partition[rank] for i in chunk)
    ends = problem.embedding.parameters if rank == 0 else 0
    if rank == problem.layout.pp - 1:
        shared = problem.layout.pp == 1 and problem.workload.model.tied_embeddings
        ends += problem.head.parameters - (problem.head.ops[1].parameters if shared else 0)
    return layers + ends


def action_seconds(problem: Problem, plan: Plan) -> Seconds:
    """(action, rank) -> seconds, by kind."""
    cost = problem.cost
    ops: dict[tuple[int, str, str], Op] = {}
    pp = problem.layout.pp

    def op_of(action: Action, rank: int) -> Op:
        part = action.part[:1]
        layer = 0
        if part == "L":  # layers differ only in attention window; any chunk's i-th will do
            layer = next(iter(plan.partition[rank]))[0]
        key = (layer, part, action.op)
        if key not in ops:
            table = {"E": problem.embedding, "H": problem.head}.get(part) or problem.layer(layer)
            ops[key] = next(op for op in table.ops if op.name == action.op)
        return ops[key]

    def compute_s(action: Action, rank: int) -> float:
        seconds = cost.op_s(op_of(action, rank), DIRECTION[action.kind], action.fraction)  # type: ignore[arg-type]
        return seconds * (cost.overlap_factor("compute", action.beside) if action.beside else 1.0)

    def seconds(action: Action, rank: int) -> float:
        match action.kind:
            case (
                Kind.FORWARD | Kind.RECOMPUTE | Kind.BACKWARD_INPUT | Kind.BACKWARD_WEIGHT
            ):
                return compute_s(action, rank)
            case Kind.D2H:
                return cost.copy_s(action.nbytes, "d2h")
            case Kind.H2D:
                return cost.copy_s(action.nbytes, "h2d")
            case Kind.SPLIT | Kind.JOIN:
                return cost.device_copy_s(action.nbytes)
            case Kind.SEND:
                peer = rank + 1 if action.op == "f" else rank - 1
                if action.op == "tied":
                    peer = pp - 1 - rank
                return cost.p2p_s(action.nbytes, rank, peer % pp)
            case Kind.OPTIMIZER:
                shards = plan.state("optimizer").shards
                return cost.optimizer_s(-(-rank_parameters(problem, plan, rank) // shards))
        if action.comm is None:
            raise ValueError(f"no cost for {action.kind}")
        return cost.comm_s(action.comm, rank)

    return seconds
