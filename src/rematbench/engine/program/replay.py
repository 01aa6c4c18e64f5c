"""Replays a rank's allocations and frees on the model of PyTorch's caching allocator."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rematbench.engine.program.action import HOST_UPDATE, Action, Kind
from rematbench.engine.program.allocator import (
    POOLS,
    Allocator,
    AllocatorPeaks,
    Exceeded,
    MemoryBlock,
    Mode,
    OutOfMemory,
    rounded,
)
from rematbench.engine.program.profile import part_lifetimes
from rematbench.engine.program.program import Block, Late, Part, RankProgram, Samples, Step
from rematbench.engine.program.storage import HOST, ModelPart, Role, Storage

Request = tuple[Storage | tuple[ModelPart, str] | None, int, int]
"""(subject, size, stream): a request to the allocator.  size > 0: an allocation on a stream of
POOLS, by its index; size 0: a free (stream > 0: another stream may still read the block); no
subject: scratch, which is freed at once.  With UPDATED, DIFFERENTIATED and WEIGHTED the subject is
a unit (empty: all units) and an operator: the unit was updated, its backward ended, or the
operator's weights got a gradient."""

UPDATED, DIFFERENTIATED, WEIGHTED = -1, -2, -3
READ_BESIDE = (Role.WEIGHTS, Role.WEIGHT_GRADIENTS)
"""Roles of tensors that compute allocates and the stream "dp" reads last, or the reverse."""


class RepeatedRequests(NamedTuple):
    lines: list[Request]
    times: int


def requests(block: Block, *, late: bool = False) -> Iterator[RepeatedRequests]:
    """Yield the device allocations and frees of a block in issue order. Tensors in staging slots
    are left out, because the slots are resident. With `late`, also mark where weights get a
    gradient, where units are updated, and where the backward of a unit ends."""
    if late or not block.periods:
        yield RepeatedRequests(_requests(block.actions, _ends(block) if late else None), 1)
    else:
        yield from _of_parts(block.parts)


def _of_parts(parts: Sequence[Part]) -> Iterator[RepeatedRequests]:
    for part in parts:
        if part.periods is None:
            yield RepeatedRequests(_requests(part.written), 1)
            continue
        one = [*_of_parts(part.inside)]
        births, deaths = part_lifetimes(part)
        crossing = (*births, *deaths)
        if not crossing and len(one) == 1:
            yield RepeatedRequests(one[0].lines, part.times)
            continue
        yield from one
        for shift in part.shifts:  # Storages that die inside their period can keep their names.
            new: dict[object, Storage] = {each: shift.storage(each) for each in crossing}
            for lines, times in one:
                moved = [(new.get(subject, subject), size, at) for subject, size, at in lines]
                yield RepeatedRequests(moved, times)


def _requests(
    actions: Sequence[Action], ends: Mapping[int, ModelPart] | None = None
) -> list[Request]:
    """The requests of some actions. `ends`: the unit whose backward ends, by the index of the
    action; None if no tensors are late."""
    lines: list[Request] = []
    late = ends is not None
    for index, action in enumerate(actions):
        # The stream of POOLS on which an action's outputs are allocated.
        stream, alone = action.stream, not action.exchange.beside
        pool = POOLS.index("" if stream not in POOLS or (stream == "ep" and alone) else stream)
        for alloc in action.allocs:
            if alloc.nbytes and not alloc.slot and alloc.storage.place != HOST:
                lines.append((alloc.storage, rounded(alloc.nbytes), pool))
        if late and action.kind is Kind.OPTIMIZER and action.stream != HOST_UPDATE:
            lines.append(((action.part, ""), UPDATED, 0))
        elif action.scratch:
            lines.append((None, rounded(action.scratch), 0))
        if late and action.kind is Kind.BACKWARD_WEIGHT:
            lines.append(((action.part, action.op), WEIGHTED, 0))
        for freed in action.frees:
            if freed.place != HOST:
                lines.append((freed, 0, int(freed.role in READ_BESIDE)))
        if ends and index in ends:
            lines.append(((ends[index], ""), DIFFERENTIATED, 0))
    return lines


def _ends(block: Block) -> dict[int, ModelPart]:
    """The units whose weights get a gradient in the block, by the index of their last action."""
    weighted = {a.part for a in block.actions if a.kind is Kind.BACKWARD_WEIGHT}
    last = {a.part: index for index, a in enumerate(block.actions) if a.part in weighted}
    return {index: part for part, index in last.items()}


# Why: docs/decisions/engine.md, Over how many steps is the allocator replayed?
def replay(
    rank: RankProgram,
    resident_bytes: tuple[int, ...],
    capacity_bytes: int | None,
    mode: Mode = "default",
    num_steps: int | None = None,
    passes: int = 1,
    enough_bytes: float = math.inf,
) -> AllocatorPeaks:
    """Replay the first `num_steps` steps of a rank (default: all), after allocating its resident
    bytes. With micro-batches of differing lengths, whole training steps are replayed until every
    drawn length has occurred. `passes`: the number of training steps to replay; each finds the
    cached segments of earlier ones. With late tensors, another training step that allocates them
    comes first, and `resident_bytes` leaves them out. It ends once more than `enough_bytes` are
    reserved."""
    memory = Allocator(capacity_bytes, mode, enough_bytes, rank.waiting_frees)
    late, samples, steps = rank.late, rank.samples, rank.steps
    lengths = Lengths(rank, samples) if samples else None
    if lengths is None:
        steps = steps[:num_steps]
    else:
        passes = math.ceil(len(lengths.samples.drawn) / lengths.per_step)
    run = _Run(memory, rank.blocks, late, lengths)
    try:
        for nbytes in resident_bytes:
            memory.allocate(rounded(nbytes))
        if late is not None:
            run.step(steps)
            run.finish()
        for _ in range(passes):
            memory.retries = 0
            run.step(steps)
    except OutOfMemory:
        return memory.peaks(oom_at=run.done)
    except Exceeded:
        return memory.peaks(ended=True)
    return memory.peaks()


class Lengths:
    """The requests of a rank's blocks for micro-batches of differing lengths."""

    def __init__(self, rank: RankProgram, samples: Samples) -> None:
        self.rank, self.samples, self.late = rank, samples, rank.late is not None
        self.known: dict[int, list[list[Request]]] = {}
        self.per_step = 1 + max(step.micro_batch for step in rank.steps)
        self.begun = 0  # the number of micro-batches in earlier training steps

    def lines(self, step: Step) -> list[Request]:
        """The requests of a step's block at the length of its micro-batch: bytes follow a
        polynomial of degree two through those at the three known lengths."""
        x, y, z = self.samples.at
        drawn = self.samples.drawn
        t = drawn[(self.begun + step.micro_batch) % len(drawn)]
        a = (t - y) * (t - z) / ((x - y) * (x - z))
        b = (t - x) * (t - z) / ((y - x) * (y - z))
        if step.block not in self.known:
            every = (self.rank.blocks, *self.samples.shorter)
            self.known[step.block] = [_written(blocks[step.block], self.late) for blocks in every]
        return [
            (subject, p if p == q else rounded(max(1, round(a * p + b * q + (1 - a - b) * r))), at)
            for (subject, p, at), (_, q, _), (_, r, _) in zip(*self.known[step.block], strict=True)
        ]


def _written(block: Block, late: bool) -> list[Request]:
    return [line for lines, times in requests(block, late=late) for line in lines * times]


class _Run:
    def __init__(
        self,
        memory: Allocator,
        blocks: Sequence[Block],
        late: Late | None,
        lengths: Lengths | None = None,
    ) -> None:
        self.memory, self.blocks, self.lengths = memory, blocks, lengths
        self.lines: dict[int, list[RepeatedRequests]] = {}  # these blocks have run
        self.late = late is not None
        self.units = late.units if late else {}
        self.pool = POOLS.index("reduced") if late and late.beside else 0  # gradients use this pool
        self.made: set[tuple[int, ModelPart]] = set()  # units whose states are allocated
        # The key of a gradient is its chunk, unit and operator.
        self.gradients: dict[tuple[int, ModelPart, str], list[MemoryBlock]] = {}
        self.alive: dict[tuple[int, int], dict[object, MemoryBlock]] = {}
        self.rounds: list[tuple[object, list[int]]] = []
        self.done = 0

    def step(self, steps: Sequence[Step]) -> None:
        """Replay a training step or its beginning, after freeing the previous step's tensors."""
        for blocks in (*self.gradients.values(), *(a.values() for a in self.alive.values())):
            self._free(blocks)
        self.gradients, self.alive, self.done = {}, {}, 0
        order = [step.block for step in steps]
        begun, before = 0, None  # no storage was alive at position `begun`
        while self.done < len(steps):
            if not (self.alive or self.units or self.lengths):  # These make equal steps differ.
                state = self.memory.state
                if state == before:
                    self.rounds.append((state, order[begun : self.done]))
                while known := self._known(state, order[self.done :]):
                    self.done += known
                begun, before = self.done, state
                if begun == len(steps):
                    break
            self._run(steps[self.done])
            self.done += 1
        if self.lengths:
            self.lengths.begun += self.lengths.per_step

    def _known(self, state: object, blocks: list[int]) -> int:
        """The number of next blocks that can be skipped, because they repeat a known round, or its
        beginning. A round starts and ends with this state and nothing alive."""
        for before, round_ in self.rounds:
            length = min(len(round_), len(blocks))
            if before == state and round_[:length] == blocks[:length]:
                return length
        return 0

    def _run(self, step: Step) -> None:
        index, micro_batch, chunk = step
        alive = self.alive.setdefault((micro_batch, chunk), {})
        if self.lengths:
            found = [RepeatedRequests(self.lengths.lines(step), 1)]
        else:
            if index not in self.lines:
                self.lines[index] = [*requests(self.blocks[index], late=self.late)]
            found = self.lines[index]
        for lines, times in found:
            for _ in range(times - 1):
                before = self.memory.state
                self._lines(lines, alive, chunk)
                if self.memory.state == before:  # Further repetitions change nothing.
                    break
            else:
                self._lines(lines, alive, chunk)
        if not alive:
            del self.alive[micro_batch, chunk]

    def _lines(self, lines: list[Request], alive: dict[object, MemoryBlock], chunk: int) -> None:
        memory = self.memory
        for subject, size, stream in lines:
            if not size:
                block = alive.pop(subject, None)  # it is None if the tensor is in a staging slot
                if block is not None:
                    memory.free(block, waits=stream > 0)
            elif size < 0:
                assert isinstance(subject, tuple)
                self._late(*subject, size, chunk)
            elif subject is not None:
                alive[subject] = memory.allocate(size, stream)
            else:
                memory.free(memory.allocate(size))

    def _late(self, part: ModelPart, op: str, event: int, chunk: int) -> None:
        """Allocate the late tensors of an event of a unit (empty `part`: of all units)."""
        if event == WEIGHTED:
            self._gradient(chunk, part, op)
            return
        keys = [(chunk, part)] if part else list(self.units)
        if event == DIFFERENTIATED:
            self._differentiated(keys)
        else:
            self._updated(keys)

    def _differentiated(self, keys: Sequence[tuple[int, ModelPart]]) -> None:
        for chunk, part in keys:
            unit = self.units.get((chunk, part))
            for op in unit.gradients if unit is not None else ():
                self._gradient(chunk, part, op)

    def _gradient(self, chunk: int, part: ModelPart, op: str) -> None:
        unit, key = self.units.get((chunk, part)), (chunk, part, op)
        if unit is not None and op in unit.gradients and key not in self.gradients:
            self.gradients[key] = self._place(unit.gradients[op], self.pool)

    def _updated(self, keys: Sequence[tuple[int, ModelPart]]) -> None:
        units = {key: self.units[key] for key in keys if key in self.units}
        for key, unit in units.items():
            if key not in self.made:
                self.made.add(key)
                self._place(unit.states)
        for block in [self._place(unit.scratch) for unit in units.values()]:
            self._free(block)

    def finish(self) -> None:
        """End a training step of which only the beginning was replayed: free its activations,
        allocate all gradients and update all units."""
        for alive in self.alive.values():
            self._free(alive.values())
        self.alive = {}
        self._differentiated(list(self.units))
        self._updated(list(self.units))

    def _place(self, sizes: Sequence[int], pool: int = 0) -> list[MemoryBlock]:
        return [self.memory.allocate(rounded(nbytes), pool) for nbytes in sizes]

    def _free(self, blocks: Iterable[MemoryBlock]) -> None:
        for block in blocks:
            self.memory.free(block)
