"""When Megatron-core 0.16.1 holds what a plan rebuilds or moves: rules that no plan can say.

Read in its code and seen in traces at their peaks:

- A checkpointed function's rebuilt output, which its own backward does not need, lives until that
  backward ends (CheckpointFunction.backward), and so does its gradient: what is added to it makes a
  new one.
- A rebuilt norm refills the storage of the first one and lives beside it until its own backward
  ends; both are there from the gradient of its module's output on (CheckpointWithoutOutput).
- Offloaded tensors leave and come back group by group (offloads); messages of a pipeline stay or go
  as its loop's variables do (messages).
- The gradient of a projection that is the embedding too waits for the embedding's.
- The softmax is made in the fp32 copy of the logits, and their gradient in the softmax: of logits
  in fp32, which are that copy, there is one storage (VocabParallelCrossEntropy).
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rematbench.plugins.discover import load_module
from rematbench.problem import Problem
from rematbench.program.action import HOST, Action, Alloc, Kind
from rematbench.program.program import RankProgram
from rematbench.spec.shapes import shapes

if TYPE_CHECKING:
    from baselines.megatron_core import interleaved, messages, offloads
    from baselines.megatron_core.plan import MegatronCore
else:  # this file is loaded by its path
    interleaved, messages, offloads = (
        load_module(Path(__file__).with_name(f"{name}.py"))
        for name in ("interleaved", "messages", "offloads")
    )

HOOKS = {"mlp_norm": "fc2", "attn_norm": "proj"}
"""The last linear of a norm's module: the gradient of its output rebuilds the norm."""
LAST = "fc2"
"""The operator with which the backward of a layer starts."""
LABEL = 8
"""Bytes of a label, of which a forward has a copy on every stage (of the loss's stack.py tells)."""
MADE_IN = {"H.loss_saved": "H.logits", "d:H.logits": "H.loss_saved"}
"""In whose storage the loss makes what it makes, if both have as many bytes."""


Key = tuple[str, str]
"""A part of a chunk (E, L<i>, H) and an operator of it."""


class Span(NamedTuple):
    """Bytes held from before the backward of one operator until that of another is over (`through`)
    or about to start; in one chunk or (None) in all."""

    opens: Key
    closes: Key
    nbytes: int
    through: bool = True
    chunk: int | None = None


def activation_peak(policy: "MegatronCore", problem: Problem, rank: RankProgram) -> int:
    """The rank's largest sum of activations under a policy's plan."""
    spans = tuple(_spans(policy, problem, rank.rank))
    early = policy.recompute == "selective" and "layernorm" in policy.modules
    blocks = [_early(block.actions) if early else block.actions for block in rank.blocks]
    steps = [(blocks[step.block], (step.micro_batch, step.chunk)) for step in rank.steps]
    if problem.layout.vpp > 1:
        moved = "attn_norm" in policy.offload_modules
        steps = interleaved.with_messages(steps, problem, rank.rank, moved=moved)
    labels = LABEL * shapes(problem.workload, problem.layout, problem.system).tokens
    moved_groups = offloads.Groups(policy.moved, problem, steps)
    walk = _Walk(spans, moved_groups, messages.Messages(problem), labels)
    for actions, where in steps:
        for action in actions:
            walk.run(action, where)
    return walk.peak


def _spans(policy: "MegatronCore", problem: Problem, rank: int) -> Iterator[Span]:
    work, lay = problem.workload, problem.layout
    s = shapes(work, lay, problem.system)
    rows = s.shard_tokens * work.model.hidden * s.element_bytes
    count = work.model.num_layers // lay.num_chunks
    if work.model.tied_embeddings and lay.pp == 1:
        table = s.vocab * work.model.hidden * s.element_bytes
        yield Span(("H", "final_norm"), ("E", "embedding"), table)
    if policy.recompute == "full":
        yield from _layers(policy, problem, rank, rows)
    if policy.recompute != "selective":
        return
    for layer in range(count):
        if "mlp" in policy.modules:
            end = f"L{layer}", "mlp_norm"
            yield Span((f"L{layer}", LAST), end, rows, through=False)
            if work.model.dropout:  # else it is that of the residual
                opens = LAST if s.sp else _before(problem, LAST)  # gathered, a plan frees it sooner
                yield Span((f"L{layer}", opens), end, rows, through=False)
        if "layernorm" in policy.modules:
            for norm, opens in HOOKS.items():
                yield Span((f"L{layer}", opens), (f"L{layer}", norm), rows)


def _layers(policy: "MegatronCore", problem: Problem, rank: int, rows: int) -> Iterator[Span]:
    """Of each checkpointed group of layers its rebuilt output, and the gradient that it was given,
    to which the first norm's is not added in place (messages tell of those that were received)."""
    lay = problem.layout
    count = problem.workload.model.num_layers // lay.num_chunks
    block = policy.method == "block"
    size = 1 if block else policy.num_layers
    for first in range(0, policy.num_layers if block else count, size):
        last, end = first + size - 1, (f"L{first}", "attn_norm")
        yield Span((f"L{last}", LAST), end, rows)
        if last < count - 1:
            yield Span((f"L{last}", "mlp_norm"), end, rows)
        elif rank == lay.pp - 1:
            yield Span((f"L{last}", "mlp_norm"), end, rows, chunk=lay.vpp - 1)


def _before(problem: Problem, op: str) -> str:
    """The operator before one of a layer, whose backward comes next."""
    names = [each.name for each in problem.layer(0).ops]
    return names[names.index(op) - 1]


def _early(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    """A backward's actions with each norm rebuilt before the linear that its hook waits for."""
    late = {(a.part, HOOKS[a.op]): a for a in actions if a.kind == Kind.RECOMPUTE and a.op in HOOKS}
    done: set[tuple[str, str]] = set()
    ordered: list[Action] = []
    for action in actions:
        hook = (action.part, action.op)
        if action.kind == Kind.BACKWARD_INPUT and hook in late and hook not in done:
            done.add(hook)
            ordered.append(late[hook])
        if action.kind == Kind.RECOMPUTE and (action.part, HOOKS.get(action.op, "")) in late:
            hook = (action.part, HOOKS[action.op])
            if hook in done:
                continue
            done.add(hook)
        ordered.append(action)
    return tuple(ordered)


class _Walk:
    """Live bytes in issue order, and their peak."""

    def __init__(
        self,
        spans: Iterable[Span],
        moved: "offloads.Groups",
        sent: "messages.Messages",
        labels: int,
    ) -> None:
        self.live = self.peak = 0
        self._moved, self._sent, self._labels = moved, sent, labels
        self._sizes: dict[tuple[tuple[int, int], str], int] = {}
        self._opens: dict[Key, list[Span]] = {}
        self._closes: dict[Key, list[Span]] = {}
        self._ended = 0
        for span in spans:
            self._opens.setdefault(span.opens, []).append(span)
            self._closes.setdefault(span.closes, []).append(span)

    def run(self, action: Action, where: tuple[int, int]) -> None:
        """One action of a micro-batch and a chunk."""
        if action.kind != Kind.BACKWARD_WEIGHT:
            self.live, self._ended = self.live - self._ended, 0
        if action.kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
            self._span(action, where[1])
        self.live += self._moved.before(action, where) + self._sent.before(action, where)
        for alloc in action.allocs:
            if not alloc.name.endswith(HOST):
                self._sizes[where, alloc.name] = alloc.nbytes
                self.live += self._moved.born(action, where, alloc)
                self._replace(where, alloc)
        labels = self._labels if action.kind == Kind.FORWARD and action.op != "loss" else 0
        self.peak = max(self.peak, self.live + action.scratch + labels)
        for name in action.frees:
            nbytes = self._moved.dead(where, name, self._sizes.pop((where, name), 0))
            self.live -= self._sent.dead(where, name, nbytes)

    def _span(self, action: Action, chunk: int) -> None:
        """A backward is about to run: what it opens, what it closes now, and when it is over."""
        key = (action.part, action.op)
        opens, closes = (
            [span for span in spans.get(key, ()) if span.chunk in (None, chunk)]
            for spans in (self._opens, self._closes)
        )
        if action.kind == Kind.BACKWARD_INPUT:
            self.live += sum(span.nbytes for span in opens)
            self.live -= sum(span.nbytes for span in closes if not span.through)
        self._ended = sum(span.nbytes for span in closes if span.through)

    def _replace(self, where: tuple[int, int], alloc: Alloc) -> None:
        """What is made in another's storage takes its bytes over."""
        storage = where, MADE_IN.get(alloc.name, "")
        if self._sizes.get(storage) == alloc.nbytes:
            self._sizes[storage] = 0
            self.live -= alloc.nbytes
