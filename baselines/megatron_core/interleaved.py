"""Messages of megatron-core 0.16.1's interleaved schedule: how long a rank holds them.

Read in forward_backward_pipelining_with_interleaving (p2p not overlapped).  An iteration runs a
forward (warm-up), a forward and a backward (steady) or a backward (cool-down) and ends with one
exchange: what the next iteration reads is received, and only then is the output that was sent freed
(deallocate_output_tensor).  Beside the schedule's lists a message is held

- while its backward runs, by variables of backward_step_helper (a gradient that was received stays
  beside the sum that the backward of the first norm makes of it);
- when it was received, by input_tensor or output_tensor_grad, until the exchange that gives them
  another value is over;
- an input, by the decoder of its chunk (set_input_tensor), until the chunk's next forward;
- a gradient that was sent, by input_tensor_grad until the next backward has returned, and by the
  `.grad` of its input for as long as that lives.
"""

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.problem import Problem
from rematbench.program.action import Action, Alloc, Kind, gradient_of
from rematbench.spec.shapes import shapes

Where = tuple[int, int]
"""A micro-batch and a chunk."""
Step = tuple[tuple[Action, ...], Where]
Key = tuple[Where, str]
"""A message: whose, and its storage."""
INPUT = "L0.layer_input"
RECEIVED = "d:received"
"""A gradient that was received, beside the sum."""


class _Pass(NamedTuple):
    forward: bool
    where: Where
    actions: tuple[Action, ...]


def with_messages(steps: Sequence[Step], problem: Problem, rank: int, *, moved: bool) -> list[Step]:
    """A rank's steps with messages made and freed when that schedule does.  `moved`: the inputs of
    layers are offloaded, so their storages leave by themselves (offloads: but for some of last
    layers)."""
    loop = _Loop(problem, rank, moved=moved)
    passes, rest = [], []
    for actions, where in steps:
        kinds = {action.kind for action in actions}
        if kinds & {Kind.FORWARD, Kind.BACKWARD_INPUT}:
            passes.append(_Pass(Kind.BACKWARD_INPUT not in kinds, where, actions))
        elif not loop.replaces(actions):
            rest.append((actions, where))
    loop.run(passes)
    return [*loop.steps, *rest]


class _Loop:
    """The schedule's loop: its steps, and who holds which message."""

    def __init__(self, problem: Problem, rank: int, *, moved: bool) -> None:
        lay, model = problem.layout, problem.workload.model
        s = shapes(problem.workload, lay, problem.system)
        count = model.num_layers // lay.num_chunks
        self._nbytes = s.shard_tokens * model.hidden * s.element_bytes
        self._output, self._last = f"L{count}.layer_input", f"L{count - 1}"
        self._gradient = gradient_of(self._output)
        self._starts = 0 if rank == 0 else None  # the chunk that receives no input
        self._ends = lay.vpp - 1 if rank == lay.pp - 1 else None  # the chunk that sends no output
        self._warmup = (lay.vpp - 1) * lay.pp + 2 * (lay.pp - rank - 1)
        self._moved, self._one_layer = moved, count == 1
        self._first: Where | None = None
        self._holders: dict[Key, set[str]] = {}
        self.steps: list[Step] = []

    def replaces(self, actions: Sequence[Action]) -> bool:
        """Whether a plan's step only makes, sends or frees a message."""
        mine = {self._output, self._gradient}
        return any(
            (action.kind in (Kind.SEND, Kind.RECV) and action.op in ("f", "b"))
            or (action.kind == Kind.FREE and set(action.frees) <= mine)
            for action in actions
        )

    def run(self, passes: Sequence[_Pass]) -> None:
        """All iterations."""
        self._first = next(item.where for item in passes if not item.forward)
        iterations = self._iterations(passes)
        self._receive(iterations[0])
        for iteration, following in zip(iterations, [*iterations[1:], []], strict=True):
            for item in iteration:
                if item.forward:
                    self._forward(item)
                else:
                    self._backward(item)
            self._exchange(iteration, following)
        for key in list(self._holders):
            self._free(key)

    def _iterations(self, passes: Sequence[_Pass]) -> list[list[_Pass]]:
        """After the warm-up a backward belongs to the iteration of the forward before it."""
        found: list[list[_Pass]] = []
        for item in passes:
            if not item.forward and len(found) > self._warmup and found[-1][-1].forward:
                found[-1].append(item)
            else:
                found.append([item])
        return found

    def _forward(self, item: _Pass) -> None:
        decoder = f"decoder {item.where[1]}"
        self._let_go(decoder)
        self._hold((item.where, INPUT), decoder)
        self.steps.append((item.actions, item.where))

    def _backward(self, item: _Pass) -> None:
        where = item.where
        for name in (INPUT, RECEIVED):
            self._hold((where, name), "backward")
            self._holders.get((where, name), set()).discard("list")
        inputs = (where, INPUT) in self._holders
        drops = inputs and not self._is_moved(where)
        sums = where[1] != self._ends
        self.steps.append(
            (tuple(self._inside(a, drops=drops, sums=sums) for a in item.actions), where)
        )
        self._let_go("input_tensor_grad")
        if inputs:
            self._holders[where, self._gradient] = {"input_tensor_grad", f".grad of {where}"}
        self._let_go("backward")

    def _is_moved(self, where: Where) -> bool:
        """Whether a chunk's input left: a last layer's stays if it is wanted first or next."""
        stays = where == self._first or where[1] == self._ends
        return self._moved and not (self._one_layer and stays)

    def _inside(self, action: Action, *, drops: bool, sums: bool) -> Action:
        """An action of a backward: the chunk's input stays, and the first norm's sum is made."""
        if drops and INPUT in action.frees:
            return replace(action, frees=tuple(name for name in action.frees if name != INPUT))
        first = (action.kind, action.part, action.op) == (
            Kind.BACKWARD_INPUT, self._last, "mlp_norm",
        )  # fmt: skip
        if sums and first:
            return replace(action, allocs=(*action.allocs, Alloc(RECEIVED, self._nbytes)))
        return action

    def _exchange(self, iteration: Sequence[_Pass], following: Sequence[_Pass]) -> None:
        """Receive for the next iteration, then let go of what was sent and received before."""
        ran, comes = ({item.forward for item in part} for part in (iteration, following))
        variables = {"input_tensor"} if True in ran else set()
        if False in ran or comes == {True, False}:
            variables.add("output_tensor_grad")
        flush = ran == {True} and comes == {False}  # all was warm-up: a call of its own receives
        arrived = {} if flush else self._receive(following)
        for variable in variables:
            self._let_go(variable)
            if variable in arrived:
                self._hold(arrived[variable], variable)
        if True in ran and iteration[0].where[1] != self._ends:
            self._add(
                Action(kind=Kind.FREE, stream="compute", frees=(self._output,)), iteration[0].where
            )
        if flush:
            self._receive(following)

    def _receive(self, following: Sequence[_Pass]) -> dict[str, Key]:
        """What the passes of an iteration read from others, by the loop's variable that has it."""
        found: dict[str, Key] = {}
        for item in following:
            if item.where[1] == (self._starts if item.forward else self._ends):
                continue
            name, key = (
                ("input_tensor", INPUT) if item.forward else ("output_tensor_grad", RECEIVED)
            )
            found[name] = item.where, key
            self._holders[found[name]] = {"list"}
            made = INPUT if item.forward else self._gradient
            self._add(
                Action(kind=Kind.RECV, stream="pp_recv", allocs=(Alloc(made, self._nbytes),)),
                item.where,
            )
        return found

    def _add(self, action: Action, where: Where) -> None:
        self.steps.append(((action,), where))

    def _hold(self, key: Key, holder: str) -> None:
        if key in self._holders:
            self._holders[key].add(holder)

    def _let_go(self, holder: str) -> None:
        for key in [key for key, holders in self._holders.items() if holder in holders]:
            self._holders[key].discard(holder)
            if not self._holders[key]:
                self._free(key)

    def _free(self, key: Key) -> None:
        where, name = key
        if self._holders.pop(key, None) is None:
            return
        if name != INPUT or not self._is_moved(where):
            self._add(Action(kind=Kind.FREE, stream="compute", frees=(name,)), where)
        if name == INPUT:
            self._let_go(f".grad of {where}")
