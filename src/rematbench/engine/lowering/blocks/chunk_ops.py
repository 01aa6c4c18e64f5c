"""A rank's model chunk as a list of units with operators, storages and fates."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, cast
from weakref import ProxyType, proxy

from rematbench.costs.operators.launches import uncaptured
from rematbench.costs.operators.ops import Activation, OpTable, Part, with_saved, without_activation
from rematbench.engine.lowering.blocks.fates import (
    ChunkPlace,
    ChunkSites,
    Fates,
    Resolved,
    Site,
    phased,
    resolve,
)
from rematbench.engine.lowering.blocks.mini_sequences import MiniRun, mini_runs, piece_bytes
from rematbench.engine.program.storage import (
    EMBEDDING,
    HEAD,
    KEPT,
    OFFLOADED,
    SHARED,
    ModelPart,
    Storage,
    part_of,
    storage_of,
)
from rematbench.plan import VOCABULARY, MiniSequence, Phase, Plan, PlanError, Transfers
from rematbench.problem import Problem, head_parameters

MAX_RECENT_FATES = 64

ChunkFates = tuple[Fates, frozenset[int]]


class ChunkFacts(NamedTuple):
    """The facts of a plan that change a chunk's units. `shares`: stages share the vocabulary, in
    separate passes. `backward_next`: each forward is directly followed by its own backward.
    `turns`: chunks turn back at the last rank."""

    mini_sequences: tuple[MiniSequence, ...] = ()
    held: tuple[str, ...] = ()
    cuts: tuple[int, ...] = ()
    shares: bool = False
    backward_next: bool = False
    turns: bool = False

    @classmethod
    def of(cls, plan: Plan) -> "ChunkFacts":
        """The facts that do not depend on the order of passes."""
        shares = plan.schedule in VOCABULARY
        return cls(plan.mini_sequences, plan.held, plan.cuts, shares, turns=plan.turns)


PLAIN = ChunkFacts()


class Unit(NamedTuple):
    """The embedding, a layer or the head of a chunk.  `prefix` is E, L<i> or H."""

    prefix: ModelPart
    table: OpTable
    place: int  # index in the chunk
    layer: int  # global index; -1: embedding or head; -2 - n: an extra head of virtual stage n
    parameters: int  # on one rank, before any ZeRO sharding
    trained: int  # parameters with a gradient
    variant: int = 0  # index into the problem's distinct layers

    @property
    def norm_parameters(self) -> int:
        """The number of norm and router parameters, which sequence parallelism replicates."""
        ops = self.table.ops
        return sum(op.trained_parameters for op in ops if op.replicated or not op.has_weight)


class ChunkEnds(NamedTuple):
    """The two ends of a chunk. `first`, `last`: whether it has the model's embedding or head.
    `back`: the activation whose gradient the chunk sends back, which is its output if all layers
    share one gradient. `wide_in`, `wide_out`: whether messages also have the columns of a
    prediction. `cut`, `local`: no gradient crosses its input or its output; a `local` chunk has a
    loss of its own, for which it keeps its output. `before`, `after`: the marks of messages (see
    `word`)."""

    first: bool
    last: bool
    output: Storage
    input: Storage
    back: Storage
    wide_in: bool = False
    wide_out: bool = False
    cut: bool = False
    local: bool = False
    before: str = ""
    after: str = ""

    def word(self, direction: str, *, receives: bool = False) -> str:
        """The word of a message (see `engine/program/storage.py:STEP`): its direction, and the mark
        `before` at the chunk's input or `after` at its output."""
        return direction + (self.before if (direction == "f") == receives else self.after)


class ChunkOps:
    """A chunk of a stage: its units, the storage of each activation, and its boundary."""

    def __init__(
        self,
        problem: Problem,
        stage: int,
        chunk: int,
        layers: tuple[int, ...],
        facts: ChunkFacts = PLAIN,
    ) -> None:
        self.facts = facts
        self.mini_sequences, self.held, cuts, self.shares, self.backward_next, self.turns = facts
        pp, vpp = problem.layout.pp, problem.layout.vpp
        self.problem, self.stage, self.chunk, self.layers = problem, stage, chunk, layers
        self.first = stage == 0 and chunk == 0
        self.last = chunk == vpp - 1 and stage == (0 if self.turns else pp - 1)
        virtual = chunk * pp + stage
        self.cut, self.local = virtual in cuts, virtual + 1 in cuts
        self._logits = True
        self._names: dict[str, dict[str, Storage]] = {}  # keyed by unit and activation
        self._stored: tuple[Mapping[Site, Resolved], dict[Site, list[StoredPart]]] = ({}, {})
        self.units: list[Unit] = []
        if self.first:
            table = problem.embedding
            self.units.append(Unit(EMBEDDING, table, 0, -1, table.parameters, table.trained))
        held = self.held
        kinds = [with_saved(table, held) if held else table for table in problem.layer_kinds]
        for i, layer in enumerate(layers):
            variant = problem.variant(layer)
            table = kinds[variant]
            counts = table.parameters, table.trained
            self.units.append(Unit(part_of("L", i), table, i, layer, *counts, variant))
        if self.last or self.local:
            # Logits that are computed in pieces never exist as a whole tensor to hold.
            pieces = any("loss" in run.ops and run.count > 1 for run in self.mini_sequences)
            head = without_activation(problem.head, "logits_held") if pieces else problem.head
            self._logits = not pieces
            which = -2 - virtual if self.local else -1
            counts = head_parameters(problem)
            if self.shares:
                head = problem.shared.norm
                counts = head.parameters, head.trained
            self.units.append(Unit(HEAD, head, 0, which, *counts))

    @classmethod
    def of(
        cls,
        problem: Problem,
        stage: int,
        chunk: int,
        layers: tuple[int, ...],
        facts: ChunkFacts = PLAIN,
    ) -> "ChunkOps":
        """Return the chunk from the problem's cache, which all plans of the problem share."""
        key = (stage, chunk, layers, facts)
        found = problem.chunks.get(key)
        if not isinstance(found, cls):
            # The reference to the problem is weak, because the problem's cache holds the chunk.
            weak = problem if isinstance(problem, ProxyType) else cast(Problem, proxy(problem))
            found = problem.chunks[key] = cls(weak, *key)
        return found

    @classmethod
    def of_plan(
        cls, problem: Problem, plan: Plan, rank: int, chunk: int, held: tuple[str, ...] = ()
    ) -> "ChunkOps":
        """Return a new chunk of a plan, without mini-sequences and not in the problem's cache."""
        facts = ChunkFacts.of(plan)._replace(mini_sequences=(), held=held)
        return cls(problem, rank, chunk, plan.partition[rank][chunk], facts)

    def of_layers(self, places: Sequence[int]) -> "ChunkOps":
        layers = tuple([self.layers[place] for place in places])
        return ChunkOps.of(self.problem, self.stage, self.chunk, layers, self.facts)

    @property
    def where(self) -> ChunkPlace:
        return ChunkPlace(stage=self.stage, chunk=self.chunk, layers=self.layers)

    @cached_property
    def shape(self) -> tuple[object, ...]:
        """The facts on which the chunk's blocks depend. Chunks of equal shape have equal blocks."""
        units = tuple((u.prefix, u.variant) for u in self.units)
        of_plan = self.shares, units, self.cut, self.local, *self._marks
        return (self.first, self.last, self.backward_next, *of_plan)

    @property
    def input(self) -> Storage:
        return _layer_input(0)

    @property
    def output(self) -> Storage:
        return _layer_input(len(self.layers))

    @property
    def boundary(self) -> Activation:
        """The activation that pipeline stages exchange (`wide` after a prediction layer)."""
        return self.problem.embedding.activations["layer_input"]

    @property
    def wide(self) -> Activation:
        """The activation that a stage sends after a prediction layer, with the columns of the
        decoder and of the prediction."""
        return self.problem.head.activations["layer_output"]

    @cached_property
    def predicts(self) -> int | None:
        """The place of the layer that predicts one more token; None if the chunk has none."""
        last = self.problem.workload.model.num_layers
        return next((u.place for u in self.layer_unit.values() if u.layer >= last), None)

    @property
    def ends(self) -> ChunkEnds:
        """The facts of the chunk's ends on which the order of steps depends."""
        predicts = self.problem.prediction_rank is not None
        wide_in = predicts and not self.layers and not self.first
        back = self.output if self.predicts is None else _layer_input(self.predicts)
        return ChunkEnds(
            *(self.first, self.last, self.output, self.input, back),
            *(wide_in, self.predicts is not None, self.cut, self.local),
            *self._marks,
        )

    @property
    def _marks(self) -> tuple[str, str]:
        """The marks of the messages at the chunk's input and at its output."""
        if not self.turns:
            return "", ""
        at_last = self.stage == self.problem.layout.pp - 1
        back = "^" if self.chunk else ""
        return "@" if at_last and self.chunk else back, "@" if at_last and not self.chunk else back

    def storage(self, unit: Unit, activation: str) -> Storage:
        """Return the storage of an activation. A layer's output is the input of the next layer."""
        return self.storages(unit)[activation]

    def storages(self, unit: Unit) -> dict[str, Storage]:
        if unit.prefix not in self._names:
            named = {name: self._storage(unit, name) for name in unit.table.activations}
            self._names[unit.prefix] = named
        return self._names[unit.prefix]

    def _storage(self, unit: Unit, activation: str) -> Storage:
        match unit.table.part, activation:
            case "embedding", "layer_input":
                return self.input
            case "layer", "layer_output":
                return _layer_input(unit.place + 1)
            case "head", "layer_output":
                return self.output
        return storage_of(unit.prefix, activation)

    def site(self, unit: Unit, activation: str) -> Site:
        """The site (see fates.py) of a unit's saved tensor."""
        return (unit.table.part, unit.place, activation)

    @cached_property
    def sites(self) -> ChunkSites:
        return ChunkSites(
            stage=self.stage,
            chunk=self.chunk,
            sites={
                self.site(unit, name): unit.table.activations[name]
                for unit in self.units
                for name in unit.table.saved
            },
            layers=self.layers,
        )

    def fates(self, plan: Plan, phase: Phase, micro_batch: int) -> ChunkFates:
        """Return the fates of the chunk's sites, as `resolve` does. Recent results are cached,
        because methods, bounds and lowering all need the fates of the same plan."""
        rules = plan.rules
        known = cast(
            dict[tuple[object, ...], ChunkFates],
            self.problem.chunks.setdefault("recent_fates", {}),
        )
        windows = any(rule.select.micro_batches is not None for rule in rules)
        when = (phase if phased(rules) else "", micro_batch if windows else 0)
        again = self.mini_sequences if self._computes_again else ()
        ends = self._logits, self.local, self.shares
        key = (self.stage, self.chunk, self.layers, self.held, *ends, rules, when, again)
        found = known.get(key)
        if found is None:
            if len(known) >= MAX_RECENT_FATES:
                known.clear()
            fates, matched = resolve(plan, self.sites, phase, micro_batch)
            found = known[key] = (self._with_again(fates) if again else fates), matched
        return found

    @cached_property
    def _computes_again(self) -> bool:
        runs = [run for unit in self.units for run in self.runs(unit).values()]
        return any(run.again for run in runs)

    def _with_again(self, fates: Fates) -> Fates:
        found = dict(fates)
        for unit in self.units:
            for run in self.runs(unit).values():
                for name in run.again:
                    fate = found.get(site := self.site(unit, name))
                    if fate is not None and not fate.offload_bytes:
                        found[site] = Resolved(0, 0, fate.nbytes)
        return found

    def saved(self, unit: Unit) -> list[tuple[str, Storage, Site]]:
        return self._saved[unit.prefix]

    @cached_property
    def _saved(self) -> dict[str, list[tuple[str, Storage, Site]]]:
        return {
            unit.prefix: [(n, self.storage(unit, n), self.site(unit, n)) for n in unit.table.saved]
            for unit in self.units
        }

    def runs(self, unit: Unit) -> dict[str, MiniRun]:
        """Return the unit's mini-sequence runs, by first operator."""
        return self._runs[unit.table.part, unit.variant] if self.mini_sequences else {}

    @cached_property
    def _runs(self) -> dict[tuple[Part, int], dict[str, MiniRun]]:
        tables = {(unit.table.part, unit.variant): unit.table for unit in self.units}
        again = self.problem.system.kernels.tiles_again
        return {
            key: mini_runs(table, self.mini_sequences, again=again and table.part == "layer")
            for key, table in tables.items()
        }

    def run_of(self, unit: Unit, activation: str) -> MiniRun | None:
        if not self.mini_sequences:
            return None
        return self._run_of[unit.table.part, unit.variant].get(activation)

    @cached_property
    def _run_of(self) -> dict[tuple[Part, int], dict[str, MiniRun]]:
        return {
            key: {name: run for run in runs.values() for name in run.interior}
            for key, runs in self._runs.items()
        }

    def parts(
        self, unit: Unit, activation: str, storage: Storage, fate: Resolved
    ) -> list["StoredPart"]:
        """Return the storages that hold a saved tensor after the forward: the whole, parts by fate,
        or pieces. PlanError if a tensor in a mini-sequence is neither kept nor recomputed as a
        whole."""
        run = self.run_of(unit, activation)
        if run is None:
            return stored_parts(storage, fate)
        if fate.mixed or fate.offload_bytes:
            raise PlanError(
                f"{storage} is inside a mini-sequence: keep all of it or recompute all of it (in a "
                "composition, name the method that offloads before the mini-sequence method)"
            )
        if fate.recompute_bytes:
            return []
        tensor = unit.table.activations[activation]
        return [
            StoredPart(
                storage.of_piece(piece.number), run.nbytes(tensor, piece.fraction), offload=False
            )
            for piece in run.pieces
        ]

    def stored(self, fates: Mapping[Site, Resolved]) -> dict[Site, list["StoredPart"]]:
        """Return the storages of every saved tensor (see `parts`). The last result is cached."""
        if self._stored[0] is not fates:
            found = {
                site: self.parts(unit, name, storage, fates[site])
                for unit in self.units
                for name, storage, site in self.saved(unit)
            }
            self._stored = (fates, found)
        return self._stored[1]

    @cached_property
    def layer_unit(self) -> dict[int, Unit]:
        return {unit.place: unit for unit in self.units if unit.table.part == "layer"}


def is_captured(problem: Problem, unit: Unit) -> bool:
    """Whether some of a unit's operators are in the CUDA graphs of layers."""
    kernels = problem.system.kernels
    if not kernels.captures or unit.table.part != "layer":
        return False
    return len(uncaptured(kernels, problem.workload, unit.table)) < len(unit.table.ops)


def graph_of(unit: Unit) -> Storage:
    """The memory that a layer's CUDA graph holds besides the activations."""
    return storage_of(unit.prefix, "graph")


def _layer_input(place: int) -> Storage:
    """The input of the layer at a place of the chunk, or the output of the chunk's last layer."""
    return storage_of(part_of("L", place), "layer_input")


def trailing_unit(chunk: ChunkOps, fates: Fates, transfers: Transfers) -> Unit | None:
    """With layer granularity, return the last unit that offloads a tensor. Its copy runs during the
    rank's next pass, so its tensors have separate memory, freed after that pass. None if the next
    pass is the chunk's own backward, which needs the rounding buffers from its start."""
    if transfers.granularity != "layer" or chunk.backward_next:
        return None
    leaves = (
        unit
        for unit in reversed(chunk.units)
        if any(fates[site].offload_bytes for _, _, site in chunk.saved(unit))
    )
    return next(leaves, None)


def stays_in_slots(chunk: ChunkOps, fates: Fates, slots: int) -> list[Unit]:
    """Return the last layers of a chunk, whose kept tensors stay in the rounding buffers; empty
    unless the chunk's backward is the next pass and neither these layers nor the head offload
    tensors."""
    last = [unit for unit in chunk.units if unit.table.part == "layer"][-slots:]
    after = [*last, *(unit for unit in chunk.units if unit.table.part == "head")]
    swapped = any(fates[site].offload_bytes for u in after for _, _, site in chunk.saved(u))
    return last if chunk.backward_next and not swapped else []


class StoredPart(NamedTuple):
    """A storage saved for the backward, its bytes, and whether it is offloaded."""

    storage: Storage
    nbytes: int
    offload: bool


def stored_parts(storage: Storage, fate: Resolved) -> list[StoredPart]:
    """Return the storages that hold a saved tensor of this fate after the forward."""
    if not fate.mixed:
        if fate.recompute_bytes:
            return []
        return [StoredPart(storage, fate.nbytes, fate.offload_bytes > 0)]
    if fate.peer_bytes:
        kept = fate.nbytes - fate.peer_bytes
        return [StoredPart(storage.with_rows(SHARED), kept, fate.offload_bytes > 0)]
    parts = []
    if fate.keep_bytes:
        parts.append(StoredPart(storage.with_rows(KEPT), fate.keep_bytes, False))
    if fate.offload_bytes:
        parts.append(StoredPart(storage.with_rows(OFFLOADED), fate.offload_bytes, True))
    return parts


def bytes_of(chunk: ChunkOps, unit: Unit, name: str, fraction: float) -> int:
    """Return the bytes of a share of an activation's rows (or heads, in a mini-sequence of
    heads)."""
    tensor, run = unit.table.activations[name], chunk.run_of(unit, name)
    return piece_bytes(tensor, fraction) if run is None else run.nbytes(tensor, fraction)


def rows_of(fates: list[Resolved]) -> float:
    """Return the share of rows to rebuild: the largest share over the given fates."""
    return max((f.recompute_bytes / f.nbytes for f in fates if f.nbytes), default=0.0)
