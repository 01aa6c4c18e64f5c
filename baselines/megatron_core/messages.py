"""Messages of megatron-core 0.16.1's 1F1B without interleaving: how long a rank holds them
(interleaved.py has those of the other schedule).

An output that was sent is freed at once (deallocate_output_tensor; a plan frees it when the next
pass has been issued).  A gradient that was sent is a variable of the loop until the next one is.
So is one that was received, beside the sum that the backward of the first norm makes of
it; and an input whose backward is over belongs to the graph of an output that is a variable until
the next forward returns.
"""

from rematbench.problem import Problem
from rematbench.program.action import Action, Kind
from rematbench.spec.shapes import shapes

Where = tuple[int, int]
"""A micro-batch and a chunk."""


class Messages:
    """The messages of a rank; every call says by how many bytes the device's sum changes."""

    def __init__(self, problem: Problem) -> None:
        s = shapes(problem.workload, problem.layout, problem.system)
        model = problem.workload.model
        count = model.num_layers // problem.layout.num_chunks
        self._nbytes = s.shard_tokens * model.hidden * s.element_bytes
        self._output, self._last = f"L{count}.layer_input", f"L{count - 1}"
        self._received: set[Where] = set()
        self._sent: set[Where] = set()
        self._gone: set[Where] = set()
        self._inputs: set[Where] = set()
        self._variables = {"received": 0, "sent": 0, "input": 0}
        self._change = 0

    def before(self, action: Action, where: Where) -> int:
        """An action is about to run."""
        if action.kind == Kind.BACKWARD_WEIGHT:
            return 0
        change, self._change = self._change, 0
        if (action.kind, action.op) == (Kind.SEND, "f"):
            self._gone.add(where)
            self._change = -self._nbytes
            change -= self._let_go("input")
        elif (action.kind, action.op) == (Kind.RECV, "f"):
            self._inputs.add(where)
        elif (action.kind, action.op) == (Kind.SEND, "b"):
            self._sent.add(where)
            change -= self._let_go("sent")
        elif (action.kind, action.op) == (Kind.RECV, "b"):
            self._received.add(where)
            self._change = -self._let_go("received")
        elif action.kind == Kind.BACKWARD_INPUT:
            change -= self._let_go("input")
            self._change = self._summed(action.part, action.op) if where in self._received else 0
        return change

    def _summed(self, part: str, op: str) -> int:
        if (part, op) == (self._last, "mlp_norm"):
            self._variables["received"] = self._nbytes
            return self._nbytes
        return 0

    def _let_go(self, name: str) -> int:
        held, self._variables[name] = self._variables[name], 0
        return held

    def dead(self, where: Where, name: str, nbytes: int) -> int:
        """A storage that a plan frees: bytes that go now."""
        if name == self._output and where in self._gone:
            self._gone.remove(where)
            return 0
        if name == "L0.layer_input" and where in self._inputs:
            self._variables["input"] += nbytes
            return 0
        if name == f"d:{self._output}" and where in self._sent:
            self._sent.remove(where)
            self._variables["sent"] += nbytes
            return 0
        return nbytes
