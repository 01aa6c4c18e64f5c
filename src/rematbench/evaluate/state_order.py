"""The part of the proof that checks the order of actions on parameters, gradients and optimizer
states in a step."""

from collections import defaultdict
from collections.abc import Callable

from rematbench.engine.program.action import (
    GRADIENTS_DOWN,
    HOST_UPDATE,
    SHARD_UP,
    STATES_DOWN,
    STREAM_INDEX,
    STREAMS,
    WEIGHTS_DOWN,
    WEIGHTS_UP,
    Action,
    Kind,
)
from rematbench.engine.program.program import RankProgram
from rematbench.engine.program.storage import EXPERTS, ModelPart, Role, Storage, UnitOf, storage_of

Alive = Callable[[Storage, int, int], bool]
"""Whether a storage of a (micro-batch, chunk) is alive."""

VectorClock = list[int]
COMPUTE = STREAM_INDEX["compute"]
BACKWARD = frozenset({Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
KERNELS = BACKWARD | {Kind.FORWARD, Kind.RECOMPUTE}
EXCHANGED = ("gradients", "norm_gradients", "tied", GRADIENTS_DOWN)


class _Uses:
    """The last ticks at which each stream read and wrote a unit's weights (or its gradients)."""

    def __init__(self) -> None:
        self.read: dict[int, int] = {}
        self.wrote: dict[int, int] = {}

    def add(self, stream: int, clock: VectorClock, *, write: bool) -> str:
        """Record a use; return the name of a stream whose earlier, conflicting use may still run
        ("": no stream)."""
        late = self.late(clock, write=write)
        (self.wrote if write else self.read)[stream] = clock[stream]
        return late

    def late(self, clock: VectorClock, *, write: bool) -> str:
        """The stream on which an earlier, conflicting use may still run; empty if none."""
        earlier = [*self.wrote.items(), *(self.read.items() if write else ())]
        return next((STREAMS[other] for other, at in earlier if clock[other] < at), "")


class _Pieces:
    """The order of the actions on each piece of optimizer states: gradients go down, the piece is
    updated, weights go up; for a visit, states go up, are updated and go down."""

    def __init__(self) -> None:
        self.weights: dict[ModelPart, _Uses] = defaultdict(_Uses)
        self.gradients: dict[ModelPart, _Uses] = defaultdict(_Uses)
        self.updated: dict[ModelPart, str] = {}  # the stream that updated each piece
        self.up: set[str] = set()  # the weights of these pieces are on the device again
        self.back: set[str] = set()  # the states of these pieces are on the host again
        self.units: dict[str, frozenset[UnitOf]] = {}  # these pieces cover only these units
        self.shards_up = False

    def fault(self, action: Action, stream: int, clock: VectorClock, *, writes: bool) -> str:
        """The rule that an action on a piece breaks, in words; empty if none."""
        piece = action.part
        if action.kind is Kind.OPTIMIZER:
            if piece in self.updated:
                return f"updates {piece} twice"
            self.updated[piece] = action.stream
        elif action.op == GRADIENTS_DOWN and piece in self.updated:
            return f"sends gradients of {piece} down after their update"
        elif action.op in (WEIGHTS_UP, STATES_DOWN) and piece not in self.updated:
            return f"sends {piece} before its update"
        if action.op == STATES_DOWN:
            self.back.add(piece)
        late = ""
        if action.kind is Kind.OPTIMIZER or action.op == GRADIENTS_DOWN:
            late = self.gradients[piece].add(stream, clock, write=action.kind is Kind.OPTIMIZER)
        elif action.op in (WEIGHTS_UP, STATES_DOWN):
            late = self.gradients[piece].late(clock, write=True)  # The update is the last writer.
        elif action.op == WEIGHTS_DOWN:
            late = self.weights[piece].late(clock, write=False)
        if writes:
            self.up.add(piece)
            late = late or self.weights[piece].add(stream, clock, write=True)
        return f"uses {piece} while {late} may still use it" if late else ""

    def lost(self, frees: tuple[Storage, ...]) -> str:
        """A visit that is freed before its states are back on the host, in words; empty if none."""
        for storage in frees:
            if storage.role is Role.STATES and storage.part not in self.back:
                return f"frees {storage}, which is not back on the host"
        return ""

    def late(
        self, unit: UnitOf, stream: int, clock: VectorClock, *, write: bool
    ) -> tuple[str, str] | None:
        """(piece, stream): among the pieces that may cover weights of a unit (without a part: of
        its chunk), one whose weights a stream may still read or write; None if there is none."""
        for piece, uses in self.weights.items():
            own = self.units.get(piece, frozenset({unit}))
            if not any(one == unit or (not unit[0] and one[1] == unit[1]) for one in own):
                continue
            if late := uses.add(stream, clock, write=write):
                return piece, late
        return None

    def missing(self, clock: VectorClock) -> str:
        """Why a step may not end, in words (empty if it may): a stream may still update a piece, a
        piece was never updated, or its weights are not back on the device. `clock`: the last of
        compute."""
        for piece, uses in (*self.gradients.items(), *self.weights.items()):
            if late := uses.late(clock, write=True):
                return f"the step ends while {late} may still update {piece}"
        numbers = sorted(piece.number for piece in self.updated)
        gap = next((at for at, number in enumerate(numbers) if at != number), None)
        if gap is not None:
            return f"piece P{gap} is never updated"
        if self.shards_up:  # The weights' home is the host.
            return ""
        left = [piece for piece in self.updated if piece not in self.up]
        return f"weights of {left[0]} never return to the device after their update" if left else ""


def _gathered(part: ModelPart) -> set[Storage]:
    """The storages that may have a part's gathered parameters."""
    found = [storage_of(part, tensor, Role.WEIGHTS) for tensor in ("", EXPERTS)]
    return {*found, *(storage.held for storage in found)}


class StateCheck:
    """The order in which one rank uses each unit's weights and gradients: kernels read weights,
    backward kernels add to gradients; then come reductions and exchanges, then the update, then
    gathers."""

    def __init__(self, rank: RankProgram) -> None:
        self.weights: dict[UnitOf, _Uses] = defaultdict(_Uses)
        self.gradients: dict[UnitOf, _Uses] = defaultdict(_Uses)
        self.passed: dict[UnitOf, int] = {}  # the micro-batch whose backward ran last
        self.reduced: set[UnitOf] = set()
        self.sent: set[UnitOf] = set()  # some gradients of these units are on the host
        self.updated: set[UnitOf] = set()
        self.pieces = _Pieces()
        actions = [action for block in rank.blocks for action in block.actions]
        self.buffers = {alloc.storage for action in actions for alloc in action.allocs}
        self.weighted = {a.op for a in actions if not _gathered(a.part).isdisjoint(a.reads)}
        self.reduces = any(a.op == "gradients" and a.exchange.comm for a in actions)

    def fault(
        self,
        action: Action,
        micro_batch: int,
        chunk: int,
        clock: VectorClock,
        alive: Alive,
    ) -> str:
        """The rule that an action on weights or gradients breaks, in words; empty if none."""
        stream, unit = STREAM_INDEX[action.stream], (action.part, chunk)
        if action.frees or action.part.letter == "P":
            return self.pieces.lost(action.frees) or self._piece(action, stream, clock)
        if action.kind in KERNELS:
            words = self._unmet(action, micro_batch, chunk, alive)
            return words or self._kernel(action.kind, unit, micro_batch, clock)
        if action.kind is Kind.OPTIMIZER:
            return self._update(unit, stream, clock)
        self.pieces.shards_up |= action.op == SHARD_UP
        if action.op in ("parameters", SHARD_UP, WEIGHTS_UP, WEIGHTS_DOWN):
            return self._gather(unit, stream, clock, in_place=not action.allocs)
        if action.op in EXCHANGED and action.kind is not Kind.ALLOC:
            units = self._exchanged(action, micro_batch, chunk)
            return self._exchange(action.kind, units, stream, clock)
        if action.op == "gradients":  # another micro-batch gets a new buffer
            self.reduced.discard(unit)
        return ""

    def _unmet(self, action: Action, micro_batch: int, chunk: int, alive: Alive) -> str:
        """The buffer that a kernel needs and that is not alive, in words; empty if none.  A kernel
        that is wrongly issued before its gather names no buffer in `reads`; that it has weights
        follows from other actions of the same operator."""
        part = action.part
        sums = storage_of(part, role=Role.SUMS).held
        either = (storage_of(part, role=Role.WEIGHT_GRADIENTS), sums)
        full = next((storage for storage in either if storage in self.buffers), None)
        if action.kind in BACKWARD and full and not alive(full, micro_batch, chunk):
            return f"adds to {full}, which is not allocated"
        buffers = _gathered(part) & self.buffers
        if action.op in self.weighted and buffers and buffers.isdisjoint(action.reads):
            return f"uses weights of {part}, which are not gathered"
        return ""

    def _kernel(self, kind: Kind, unit: UnitOf, micro_batch: int, clock: VectorClock) -> str:
        part, _ = unit
        if unit in self.updated:
            return f"uses weights of {part} after their update"
        if late := self.weights[unit].add(COMPUTE, clock, write=False):
            return f"uses weights of {part} without waiting until {late} has gathered them"
        if kind not in BACKWARD:
            return ""
        self.passed[unit] = micro_batch
        if unit in self.reduced:
            return f"adds to gradients of {part} after their reduction"
        if unit in self.sent:
            return f"adds to gradients of {part} after they went to the host"
        late = self.gradients[unit].add(COMPUTE, clock, write=True)
        return f"adds to gradients of {part} while {late} may still use them" if late else ""

    def _gather(self, unit: UnitOf, stream: int, clock: VectorClock, *, in_place: bool) -> str:
        """Check a gather of the weights of a unit, or of all units of the chunk: into a new buffer,
        or in place, where kernels and other gathers may still read."""
        if used := self.pieces.late(unit, stream, clock, write=in_place):
            return f"gathers weights of {used[0]} while {used[1]} may still use them"
        of_chunk = [one for one in self.weights if one[1] == unit[1]]
        for one in [unit] if unit[0] else of_chunk:
            if late := self.weights[one].add(stream, clock, write=in_place):
                return f"gathers weights of {one[0]} while {late} may still use them"
        return ""

    def _exchanged(self, action: Action, micro_batch: int, chunk: int) -> list[UnitOf]:
        """The units whose gradients an action exchanges: one unit or all (norms, copies at the
        step's end); embedding and head (tied); the units whose buffers a copy to the host reads; or
        the chunk's units whose backward is done and that are not reduced yet."""
        if action.op == "norm_gradients" or (action.op == GRADIENTS_DOWN and not action.part):
            return [(action.part, chunk)] if action.part else list(self.gradients)
        if action.op == "tied":
            return [unit for unit in self.gradients if unit[0] in ("E", "H")]
        units = [unit for unit in self.gradients if unit[1] == chunk and unit not in self.reduced]
        named = [(a.part, chunk) for a in action.reads if a.role is Role.WEIGHT_GRADIENTS]
        if action.op == GRADIENTS_DOWN and named:
            units = named
        elif action.part:
            units = [unit for unit in units if self.passed.get(unit) == micro_batch]
            units += [(action.part, chunk)] if (action.part, chunk) not in units else []
        self.reduced.update(units)
        return units

    def _exchange(self, kind: Kind, units: list[UnitOf], stream: int, clock: VectorClock) -> str:
        """Check an exchange of gradients: a sum over ranks, or a send to the opposite end of the
        pipeline."""
        for unit in units:
            if unit in self.updated:
                return f"exchanges gradients of {unit[0]} after their update"
            writes = kind not in (Kind.SEND, Kind.D2H)
            late = self.gradients[unit].add(stream, clock, write=writes)
            if late and kind is not Kind.RECV:  # a received gradient has separate memory
                return f"exchanges gradients of {unit[0]} while {late} may still use them"
        return ""

    def _piece(self, action: Action, stream: int, clock: VectorClock) -> str:
        """Check an action on a piece of optimizer states.  A piece covers weights and gradients of
        its `units` (or possibly of any unit), so it must come after their kernels and reductions.
        Pieces share nothing with each other."""
        piece = action.part
        if not piece:
            return ""
        if own := frozenset(piece.units):
            self.pieces.units[piece] = own
        updates = action.kind is Kind.OPTIMIZER
        writes = (updates and action.stream != HOST_UPDATE) or action.op == WEIGHTS_UP
        reads = updates or action.op == GRADIENTS_DOWN
        if reads and (words := self._unready(piece, own, stream, clock)):
            return words
        if writes and (late := self._before_pieces(self.weights, own, stream, clock)):
            return f"updates weights of {late[0]} for {piece} while {late[1]} may still use them"
        if updates:
            units = own or self.gradients.keys()
            if self.reduces and (unit := next(iter(units - self.reduced), None)):
                return f"updates {piece} with gradients of {unit[0]}, which are not reduced"
            self.updated.update(own or self.weights)
            self.reduced.update(own)  # Without peers there is no reduction to record it.
        elif action.op == GRADIENTS_DOWN:
            self.sent.update(own)
        return self.pieces.fault(action, stream, clock, writes=writes)

    def _unready(self, piece: str, own: frozenset[UnitOf], stream: int, clock: VectorClock) -> str:
        """Why the gradients of a piece cannot be used yet, in words; empty if they can."""
        if early := next(iter(own - self.gradients.keys()), None):
            return f"uses gradients of {early[0]} for {piece} before their backward"
        if late := self._before_pieces(self.gradients, own, stream, clock):
            return f"uses gradients of {late[0]} for {piece} while {late[1]} may still use them"
        return ""

    @staticmethod
    def _before_pieces(
        uses: dict[UnitOf, "_Uses"], own: frozenset[UnitOf], stream: int, clock: VectorClock
    ) -> tuple[str, str] | None:
        """(unit, stream): one of `uses` (only of the piece's `own` units, if it has any) for which
        the piece's action has not waited; None if there is none."""
        for unit, one in uses.items():
            late = one.late(clock, write=True) if not own or unit in own else ""
            if late:
                return unit[0], late
        return None

    def _update(self, unit: UnitOf, stream: int, clock: VectorClock) -> str:
        for one in [unit] if unit[0] else list(self.weights):
            if self.reduces and one in self.gradients and one not in self.reduced:
                return f"updates {one[0]} with gradients that are not reduced"
            late = self.gradients[one].add(stream, clock, write=True)  # The update clears them.
            if stream == COMPUTE:  # An update on the host writes no device weights.
                late = late or self.weights[one].add(stream, clock, write=True)
            if late:
                return f"updates {one[0]} while {late} may still use its weights or gradients"
            self.updated.add(one)
        return ""
