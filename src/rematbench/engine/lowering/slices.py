"""Passes that each run one slice of a sequence (Li et al. 2021, arXiv 2102.07988).

Except in attention, a slice is like a sequence of its length. In attention its queries read the
keys and values of earlier slices, which live until their slice's backward, and its backward adds to
their gradients. So a slice has the blocks of a problem of that length. This module adds the slice's
number to the names of tensors, events and messages, and lets attention read the tensors of earlier
slices. Backwards come in reverse order: the last slice's backward allocates the gradients of all
keys and values.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.costs.operators.block import LayerKind
from rematbench.costs.operators.kernels import Attention
from rematbench.costs.operators.ops import Op, OpTable
from rematbench.engine.program.action import Action, Alloc, Kind
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import (
    COPIED_IN,
    COPIED_OUT,
    ENDED,
    RECEIVED,
    SENT,
    Event,
    ModelPart,
    Role,
    Storage,
    event_of,
    storage_of,
)
from rematbench.engine.program.template import renamed
from rematbench.inputs.layout import LayoutError
from rematbench.inputs.shapes import causal_pairs
from rematbench.plan import Keep, Plan, PlanError, Rule, Select
from rematbench.problem import Problem

KEYS = ("k", "v")
"""The activations that later slices read."""
BY_SLICE = frozenset(
    {COPIED_OUT, COPIED_IN, *(each[d] for each in (ENDED, RECEIVED, SENT) for d in "fb")}
)
"""Events that each slice records for itself, so that their names get the slice's number."""
MARK = "%"


@dataclass(frozen=True, eq=False)
class SliceProblem(Problem):
    """The problem of one slice: a sequence of the slice's tokens after `context` earlier tokens,
    whose keys and values attention also reads."""

    context: int = 0

    def _table(self, kind: LayerKind) -> OpTable:
        table = super()._table(kind)
        op = table.op("attention")
        ops = [behind(op, self.context) if each is op else each for each in table.ops]
        return replace(table, ops=tuple(ops))


def behind(op: Op, context: int) -> Op:
    """The attention operator of a slice that follows `context` tokens."""
    kernels = tuple(
        replace(
            kernel,
            kv_rows=kernel.q_rows + context,
            pairs=causal_pairs(kernel.q_rows, 0) + kernel.q_rows * context,
        )
        for kernel in op.forward
        if isinstance(kernel, Attention)
    )
    return replace(op, forward=kernels, backward_input=kernels)


def slice_problems(problem: Problem, slices: tuple[int, ...]) -> tuple[SliceProblem, ...]:
    """The problem of each slice, from its number of tokens; PlanError if the layout refuses it."""
    key = ("slices", slices)
    known = problem.chunks.get(key)
    if isinstance(known, tuple):
        return known
    work, made = problem.workload, []
    model = work.model
    if model.position == "learned" and not model.max_positions:
        model = replace(model, max_positions=work.seq_len)
    fields = {name: getattr(problem, name) for name in Problem.__dataclass_fields__}
    fields |= {"_memo": {}, "_weights": {}, "evaluator": None, "weigher": None}
    for tokens, end in zip(slices, accumulate(slices), strict=True):
        part = replace(work, seq_len=tokens, model=model)
        try:
            made.append(SliceProblem(**{**fields, "workload": part}, context=end - tokens))
        except LayoutError as error:
            raise PlanError(f"a slice of {tokens} tokens: {error}") from error
    problem.chunks[key] = tuple(made)
    return tuple(made)


def of_slice(plan: Plan, number: int) -> tuple[Plan, list[int]]:
    """The plan of one slice, and the index of each of its rules in the whole plan. The last rule,
    which has no index, keeps keys and values on the device, whatever other rules say."""
    places = [
        place
        for place, rule in enumerate(plan.rules)
        if rule.select.slices is None or number in rule.select.slices
    ]
    rules = tuple(
        replace(plan.rules[place], select=replace(plan.rules[place].select, slices=None))
        for place in places
    )
    moves = replace(plan.transfers, reload_slots=0)  # Slots are not modelled for slices.
    rules = (*rules, Rule(Select(parts=("layer",), activations=KEYS), Keep()))
    return replace(plan, slices=(), rules=rules, transfers=moves), places


class SliceNames(NamedTuple):
    """A renaming that adds the slice's number to tensors, as a piece's number."""

    number: int
    events: int = 0

    def storage(self, storage: Storage) -> Storage:
        return storage.of_piece(self.number)

    def part(self, part: ModelPart) -> ModelPart:
        return part


def sliced(block: Block, slices: tuple[int, ...], number: int, kinds: int) -> Block:
    """A block of slice `number`, with this number in its names. `kinds`: the number of the model's
    distinct layers, which keeps the variants of different slices apart."""
    names = SliceNames(number)
    written = tuple([_of_slice(action, names, slices, kinds) for action in block.written])
    return Block(block.label, written, block.periods)


def _of_slice(action: Action, names: SliceNames, slices: tuple[int, ...], kinds: int) -> Action:
    number = names.number
    op = f"{action.op}{MARK}{number}" if action.kind in (Kind.SEND, Kind.RECV) else action.op
    made = replace(
        renamed(action, names),
        event=_event(action.event, number),
        wait=_event(action.wait, number),
        op=op,
        variant=action.variant + number * kinds,
    )
    if op != "attention" or (not number and len(slices) == 1):
        return made
    if action.kind in (Kind.FORWARD, Kind.RECOMPUTE):
        return replace(made, reads=(*_earlier(made, number), *made.reads))
    return _backward(made, slices, number) if action.kind is Kind.BACKWARD_INPUT else made


def _event(event: Event | None, number: int) -> Event | None:
    return event_of(f"{event}{MARK}{number}") if event in BY_SLICE else event


def _earlier(action: Action, number: int, role: Role = Role.ACTIVATION) -> list[Storage]:
    return [
        storage_of(action.part, name, role, piece=each) for each in range(number) for name in KEYS
    ]


def _backward(action: Action, slices: tuple[int, ...], number: int) -> Action:
    """Attention's backward. That of the last slice allocates the gradients of the keys and values
    of all slices; the others add to them from scratch memory."""
    own = {alloc.storage.tensor: alloc for alloc in action.allocs if alloc.storage.tensor in KEYS}
    each = {name: alloc.nbytes // slices[number] for name, alloc in own.items()}
    reads = (*action.reads, *_earlier(action, number))
    if number == len(slices) - 1:
        more = tuple(
            Alloc(storage, each[storage.tensor] * slices[storage.piece or 0])
            for storage in _earlier(action, number, Role.GRADIENT)
        )
        return replace(action, reads=reads, allocs=(*action.allocs, *more))
    left = tuple([alloc for alloc in action.allocs if alloc.storage.tensor not in KEYS])
    totals = [alloc.storage for alloc in own.values()]
    adds = (*_earlier(action, number, Role.GRADIENT), *totals)
    scratch = action.scratch + sum(each.values()) * sum(slices[: number + 1])
    return replace(action, reads=(*reads, *adds), allocs=left, scratch=scratch)


def slice_of(action: Action) -> int:
    """Return the number of an action's slice, from the first tensor with a number that it allocates
    or reads; 0 if there is none."""
    storages = (*(alloc.storage for alloc in action.allocs), *action.reads)
    return next((each.piece for each in storages if each.piece is not None), 0)
