"""Bind a problem's costs to actions: the only bridge between the vocabulary and the formulas."""

from rematbench.action import Action, Kind
from rematbench.cost.bind import Direction
from rematbench.ops import Op
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.simulate import Seconds

DIRECTION: dict[Kind, Direction] = {
    Kind.FORWARD: "forward",
    Kind.RECOMPUTE: "forward",
    Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight",
}


def rank_parameters(problem: Problem, plan: Plan, rank: int) -> int:
    """Parameters one rank holds, after tensor and pipeline parallelism.

    A tied embedding is held once where first and last stage are one rank.
    """
    layers = sum(problem.layer(i).parameters for chunk in plan.partition[rank] for i in chunk)
    ends = problem.embedding.parameters if rank == 0 else 0
    if rank == problem.layout.pp - 1:
        shared = problem.layout.pp == 1 and problem.workload.model.tied_embeddings
        projection = sum(op.parameters for op in problem.head.ops if op.name == "lm_head")
        ends += problem.head.parameters - (projection if shared else 0)
    return layers + ends


class ActionCosts:
    """Seconds of an action on a rank, by what the action is."""

    def __init__(self, problem: Problem, plan: Plan) -> None:
        self.problem, self.plan, self.cost = problem, plan, problem.cost
        self._ops: dict[tuple[str, int, str], Op] = {}
        self._table = {
            Kind.D2H: lambda action, _: self.cost.copy_s(action.nbytes, "d2h"),
            Kind.H2D: lambda action, _: self.cost.copy_s(action.nbytes, "h2d"),
            Kind.SPLIT: lambda action, _: self.cost.device_copy_s(action.nbytes),
            Kind.JOIN: lambda action, _: self.cost.device_copy_s(action.nbytes),
            Kind.SEND: self._send_s,
            Kind.OPTIMIZER: self._optimizer_s,
        }

    def __call__(self, action: Action, rank: int) -> float:
        """Seconds of the action on its stream."""
        if action.kind in DIRECTION:
            return self._compute_s(action, rank)
        if action.comm is not None:
            return self.cost.comm_s(action.comm, rank)
        return self._table[action.kind](action, rank)

    def _compute_s(self, action: Action, rank: int) -> float:
        op = self._op(action, rank)
        seconds = self.cost.op_s(op, DIRECTION[action.kind], action.fraction)
        if action.beside:
            seconds *= self.cost.overlap_factor("compute", action.beside)
        return seconds

    def _op(self, action: Action, rank: int) -> Op:
        """The operator an action runs, in its own layer's table."""
        part = action.part[:1]
        key = (part, action.layer, action.op)
        if key not in self._ops:
            problem = self.problem
            tables = {"E": problem.embedding, "H": problem.head}
            table = tables[part] if part in tables else problem.layer(action.layer)
            self._ops[key] = next(op for op in table.ops if op.name == action.op)
        return self._ops[key]

    def _send_s(self, action: Action, rank: int) -> float:
        pp = self.problem.layout.pp
        peer = {"f": rank + 1, "b": rank - 1, "tied": pp - 1 - rank}[action.op]
        return self.cost.p2p_s(action.nbytes, rank, peer % pp)

    def _optimizer_s(self, action: Action, rank: int) -> float:
        shards = self.plan.state("optimizer").shards
        assert action.kind is Kind.OPTIMIZER
        return self.cost.optimizer_s(-(-rank_parameters(self.problem, self.plan, rank) // shards))


def action_seconds(problem: Problem, plan: Plan) -> Seconds:
    """(action, rank) -> seconds, by kind."""
    return ActionCosts(problem, plan)
