"""Writes parameter gathers and gradient reductions inside chunk blocks (ZeRO, FSDP, overlap)."""

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

from rematbench.costs.operators.ops import Comm, CommKind, Group
from rematbench.costs.states import OPTIMIZER_STAGE
from rematbench.engine.lowering.blocks.chunk_ops import Unit
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.states.state_shards import has_whole_gradients, sharded
from rematbench.engine.program.action import (
    COMPUTE,
    GRADIENTS_DOWN,
    SHARD_UP,
    Action,
    Alloc,
    Kind,
)
from rematbench.engine.program.storage import (
    EXPERTS,
    REDUCED,
    Event,
    ModelPart,
    Role,
    Storage,
    storage_of,
)
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System
from rematbench.plan import StateFate


class Reduced(NamedTuple):
    """A unit whose gradients are reduced. After `events` no stream uses its gradients or those of
    units reduced earlier."""

    unit: ModelPart
    events: tuple[Event, ...]


class Gathered(NamedTuple):
    """A part of a unit's parameters that is gathered at once: its storage, its number of
    parameters, the group that holds its shards, and the number that products read quantised."""

    storage: Storage
    parameters: int
    group: Group
    quantised: int = 0


def weights_of(unit: ModelPart, tensor: str = "") -> Storage:
    """The buffer for a unit's gathered parameters, or only for its experts' or an operator's."""
    return storage_of(unit, tensor, Role.WEIGHTS)


def updated(unit: Unit, fate: StateFate, layout: Layout) -> int:
    """The number of a unit's trained parameters whose state one rank holds."""
    experts = unit.table.trained_experts
    return sharded(unit.trained - experts, experts, fate, layout)


def gathered_parts(unit: Unit, fate: StateFate, layout: Layout) -> list[Gathered]:
    """Return the parts of a unit's parameters that are gathered: those of experts from expert
    data-parallel peers, if there are any, and all others."""
    experts = unit.table.expert_parameters
    here = layout.state_shards == 1 and fate.home == "device"
    found: list[Gathered] = []
    if unit.parameters > experts and not (fate.gather == "layer" and here):
        rest = unit.parameters - experts
        narrow = min(rest, unit.table.quantised)
        found.append(Gathered(weights_of(unit.prefix), rest, "dp", narrow))
    if experts and layout.expert_shards > 1:
        narrow = min(experts, unit.table.quantised)
        found.append(Gathered(weights_of(unit.prefix, EXPERTS), experts, "edp", narrow))
    if fate.release == "step":
        return [part._replace(storage=part.storage.held) for part in found]
    return found


class ParameterGatherer:
    """Gathers each unit's parameters on the dp stream before their use.

    A layer gather (ZeRO-3, FSDP) allocates the full parameters, `width` bytes each, and runs
    `prefetch_layers` ahead; in a stack without gather_overlap compute waits for each gather, and no
    gather runs ahead. A step gather (ZeRO-1 with overlap) fills resident buffers of all units at
    once. A shard in host memory is copied into its part of the full parameters before its gather;
    without peers the shard is everything, and there is no gather. Weights of experts are gathered
    over another group, into a separate buffer. `release`: whether a unit's gathered copy is freed
    after its use (with `keeps_ends`, embedding and head are not freed). `tied`: the embedding whose
    weight the head of the same rank uses; if its gathered copy is freed, the head gathers the
    weight again. `in_turn`: each gather is issued just before its use, into memory of another
    stream, so that a GPU has two copies alive and issue order only one (FSDP's limit_all_gathers).
    """

    def __init__(
        self,
        fate: StateFate,
        system: System,
        layout: Layout,
        width: int,
        tied: Unit | None = None,
        *,
        release: bool,
        keeps_ends: bool = False,
    ) -> None:
        self.layout, peers = layout, layout.state_shards > 1
        self.layerwise = fate.gather == "layer"
        self.tied = tied if self.layerwise else None
        self.keeps_ends = keeps_ends
        self.fate, self.system, self.peers, self.release = fate, system, peers, release
        self.beside = system.zero.gather_overlap
        self.width = width
        self.survivors: set[Storage] = set()
        self.pending: dict[object, Event] = {}  # the ends of gathers, by unit
        self.released: Event | None = None
        self.in_turn = False
        self.released_before: Event | None = None  # the previous value of `released`
        self.for_the_head = False

    def parts(self, unit: Unit) -> list[Gathered]:
        return gathered_parts(unit, self.fate, self.layout)

    def own(self, unit: Unit) -> tuple[Storage, ...]:
        return tuple(part.storage for part in self.parts(unit))

    def _read(self, unit: Unit) -> list[Unit]:
        """The units whose weights a unit's kernels read (for a tied head, also the embedding)."""
        shared = self.tied if unit.table.part == "head" else None
        return [unit, shared] if shared else [unit]

    def buffers(self, unit: Unit) -> tuple[Storage, ...]:
        """Return the storages from which a unit's kernels read weights."""
        return tuple(chain.from_iterable(map(self.own, self._read(unit))))

    def arrive(self, w: BlockWriter, units: list[Unit]) -> set[Storage]:
        """Return the storages of parameters that the forward left gathered: those of all units
        under FSDP's shard-grad-op (ZeRO-2), or those of embedding and head if the plan keeps them
        (`keeps_ends`)."""
        fate = self.fate
        kept = [
            unit
            for unit in units
            if fate.release == "backward" or (fate.keeps_ends and unit.table.part != "layer")
        ]
        whole = [unit for unit in kept if self.parts(unit)]
        if kept:
            self.pending |= dict.fromkeys([unit.prefix for unit in whole], w.mark(COMPUTE))
        for unit in whole:
            w.parameters[unit.prefix] = self.buffers(unit)
        return {*chain.from_iterable(map(self.own, whole))}

    def before(self, w: BlockWriter, units: list[Unit], position: int) -> None:
        """Issue the gathers that are due and wait for this unit's gather."""
        overlap = self.beside and not self.in_turn
        ahead = self.fate.prefetch_layers * overlap if self.layerwise else len(units)
        for unit in units[position : position + ahead + 1]:
            self._want(w, unit)
        self.ready(w, units[position])

    def ready(self, w: BlockWriter, unit: Unit) -> None:
        """Wait for the weights that a unit's kernels read; gather them first if necessary."""
        self._want(w, unit)
        for read in self._read(unit):
            if self.parts(read):
                w.wait(COMPUTE, self.pending[read.prefix])

    def _want(self, w: BlockWriter, unit: Unit) -> None:
        for read in self._read(unit):
            if self.parts(read) and read.prefix not in self.pending:
                if self.layerwise:
                    w.parameters[read.prefix] = self.buffers(read)
                for part in self.parts(read):
                    event = self._issue(w, read.prefix, part)
                    self.pending[read.prefix] = event
                self.for_the_head |= read is not unit

    def _issue(self, w: BlockWriter, part: ModelPart, whole: Gathered) -> Event:
        buffer, parameters, group, quantised = whole
        narrow = self.system.states.gather_bytes
        payload = narrow * parameters
        if self.layerwise:  # Quantised parameters stay as narrow as they were sent.
            payload = self.width * (parameters - quantised)
            payload += min(self.width, narrow) * quantised
        allocs = (Alloc(buffer, payload),) if self.layerwise else ()
        reads: tuple[Storage, ...] = ()
        if self.layerwise and not self.beside:
            w.wait("dp", w.mark(COMPUTE))
        elif self.layerwise and (free := self.released_before if self.in_turn else self.released):
            w.wait("dp", free)  # The gather reuses the buffer of a released unit.
        if self.layerwise and self.fate.home == "host":
            nbytes = self.system.states.param_bytes * -(-parameters // self.fate.shards)
            ready = w.mark(COMPUTE)
            copied = w.state_copy(Kind.H2D, part, SHARD_UP, nbytes, after=ready, allocs=allocs)
            if not self.peers:
                return copied
            w.wait("dp", copied)
            allocs, reads = (), (buffer,)
        comm = Comm("all_gather", group, payload)
        event = w.issue(comm, part, "parameters", reads, allocs)
        if self.beside:
            w.stall(comm)
        return event

    def after(self, w: BlockWriter, unit: Unit) -> None:
        """Free the gathered copy after the unit's pass, or leave it for the backward."""
        if not self.layerwise or not self.parts(unit):
            return
        self.released_before, self.released = self.released, w.mark(COMPUTE)
        if self.release and not (self.keeps_ends and unit.table.part != "layer"):
            self._free(w, unit)
        else:
            self.survivors.update(self.own(unit))
        if self.tied and self.for_the_head and unit.table.part == "head":
            self.for_the_head = False
            self._free(w, self.tied)

    def _free(self, w: BlockWriter, unit: Unit) -> None:
        del w.parameters[unit.prefix], self.pending[unit.prefix]
        w.free(*self.own(unit))


def norm_reduction(system: System, norms: int, shards: int = 1) -> Comm:
    """Return the all-reduce of norm gradients under sequence parallelism, where each rank only has
    the gradients of its own tokens (Megatron's all-reduce of layer-norm gradients). `norms`: the
    number of norm parameters, of which a rank holds 1 / `shards`."""
    return Comm("all_reduce", "tp", system.states.grad_bytes * -(-norms // shards))


def gradient_reductions(
    layout: Layout, optimizer_shards: int, gradient_shards: int, nbytes: int, experts: int = 0
) -> tuple[Comm, ...]:
    """Return the collectives that sum `nbytes` of gradients over the data-parallel peers: an
    all-reduce or, with a sharded optimizer, a reduce-scatter and an all-reduce of the shards over
    their replicas (if there are any). `experts` of these bytes are summed over expert data
    parallelism instead. A collective over one rank takes no time."""
    if experts:
        found = gradient_reductions(layout, optimizer_shards, gradient_shards, nbytes - experts)
        alone = layout.state_shards == 1 and layout.zero_stage >= OPTIMIZER_STAGE
        kind: CommKind = "reduce_scatter" if optimizer_shards > 1 or alone else "all_reduce"
        found += (Comm(kind, "edp", experts),) if layout.expert_shards > 1 else ()
        if layout.state_replicas > 1:
            shard = -(-experts // layout.expert_shards)
            found += (Comm("all_reduce", "expert_replica", shard),)
        return found
    if optimizer_shards == 1 and gradient_shards == 1:
        return (Comm("all_reduce", "dp", nbytes),)
    scatter = Comm("reduce_scatter", "dp", nbytes)
    if layout.state_replicas == 1:
        return (scatter,)
    return (scatter, Comm("all_reduce", "replica", -(-nbytes // layout.state_shards)))


def parameter_gathers(layout: Layout, system: System, count: int, experts: int) -> list[Comm]:
    width = system.states.gather_bytes
    found = [Comm("all_gather", "dp", width * (count - experts))]
    more = experts > 0 and layout.expert_shards > 1
    return [*found, Comm("all_gather", "edp", width * experts)] if more else found


def allocate_gradients(w: BlockWriter, unit: Unit, storage: Alloc) -> None:
    w.add(
        Action(kind=Kind.ALLOC, stream=COMPUTE, part=unit.prefix, op="gradients", allocs=(storage,))
    )


class GradReducer:
    """Reduces each unit's gradients on the dp stream when the unit's backward is done. If the
    optimizer runs in the backward, it also updates the unit's parameters.

    Sharded gradients (ZeRO-2/3) are in a full buffer, `width` bytes each, until they are reduced;
    in a stack without reduce_overlap compute waits for each reduction. Resident gradients are
    reduced in place, in buckets of `bucket_bytes`. With gradients in host memory, the part that
    this rank updates is copied to the host as soon as it is reduced, during the rest of the
    backward, in every micro-batch, and the host sums these parts (deviation: DeepSpeed moves its
    sum to the device and back, which costs more). `leaving`: for each unit, the number of
    parameters whose gradients go to the host, if the host updates only some pieces of the states.
    `tied`: the embedding's unit if the head of the same rank uses its weight; the head is the first
    to add to that gradient.
    """

    def __init__(
        self,
        gradient: StateFate,
        optimizer: StateFate,
        system: System,
        layout: Layout,
        width: int,
        tied: Unit | None = None,
        leaving: Mapping[ModelPart, int] | None = None,
    ) -> None:
        self.leaving = leaving
        self.update = optimizer.update == "backward"
        self.leaves = gradient.home == "host"
        self.transient = has_whole_gradients(gradient, layout) or self.update or self.leaves
        self.beside = system.zero.reduce_overlap or not layout.has_peers
        self.system, self.optimizer, self.tied = system, optimizer, tied
        self.layout = layout
        self.shared, self.sums_norms = layout.has_peers, layout.sequence_parallel
        self.reductions = partial(gradient_reductions, layout, optimizer.shards, gradient.shards)
        self.width = system.states.grad_bytes if self.update else width
        self.bucket: list[Unit] = []
        self.sums_in_last = False  # norms are summed before each reduction, not after the passes
        self.norms: list[Event] = []
        self.reduced: list[Reduced] = []
        self.down: Event | None = None  # the end of the latest copy to the host
        self.in_flight: list[tuple[Event, Storage]] = []
        self.survivors: set[Storage] = set()  # storages that outlive the block

    def buffer(self, unit: Unit) -> Storage:
        return storage_of(unit.prefix, role=Role.WEIGHT_GRADIENTS)

    def before(self, w: BlockWriter, unit: Unit) -> None:
        if unit is not self.tied:
            self._allocate(w, unit)
        if self.tied and unit.table.part == "head":
            self._allocate(w, self.tied)

    def _allocate(self, w: BlockWriter, unit: Unit) -> None:
        if self.transient and unit.trained:
            allocate_gradients(w, unit, Alloc(self.buffer(unit), self.width * unit.trained))

    def after(self, w: BlockWriter, unit: Unit, *, last: bool) -> None:
        """Reduce a full bucket, and free the buffers of earlier reductions."""
        if self.update and unit.trained:
            self._apply(w, unit)
            return
        if unit.trained:
            self.bucket.append(unit)
        if self.sums_in_last and unit.norm_parameters:
            self.norms.append(self._sum_norms(w, unit))
        size = sum(self.system.states.reduce_bytes * u.trained for u in self.bucket)
        due = self.transient or last or size >= self.system.zero.bucket_bytes
        if self.bucket and due:
            buffers = tuple(map(self.buffer, self.bucket)) if self.transient else ()
            self._reduce_storages(w, size, buffers, ())
        if self.transient:
            self._drain(w, 0 if last or not self.beside else 1)
        if last:
            self._record_end(w)

    def _sum_norms(self, w: BlockWriter, unit: Unit) -> Event:
        reads = [self.buffer(unit)] if self.transient else []
        norms = norm_reduction(self.system, unit.norm_parameters)
        return w.collective(norms, unit.prefix, "norm_gradients", reads, [])

    def _record_end(self, w: BlockWriter) -> None:
        if self.shared:
            w.wait("dp", w.mark(COMPUTE))
            w.add(Action(kind=Kind.EVENT, stream="dp", event=REDUCED))

    def _apply(self, w: BlockWriter, unit: Unit) -> None:
        if self.shared:
            reads = [self.buffer(unit)]
            width = self.system.states.reduce_bytes
            for comm in self.reductions(width * unit.trained, width * unit.table.trained_experts):
                w.wait(COMPUTE, w.collective(comm, unit.prefix, "gradients", reads, []))
        if self.sums_norms and unit.norm_parameters:
            w.wait(COMPUTE, self._sum_norms(w, unit))
        count = updated(unit, self.optimizer, self.layout)
        w.add(
            Action(
                kind=Kind.OPTIMIZER,
                stream=COMPUTE,
                part=unit.prefix,
                op="optimizer",
                reads=(self.buffer(unit),),
                nbytes=self.system.states.param_bytes * count,
            )
        )
        w.free(self.buffer(unit))

    def _reduce_storages(
        self, w: BlockWriter, size: int, storages: tuple[Storage, ...], allocs: tuple[Alloc, ...]
    ) -> None:
        """Reduce the bucket's `size` bytes, which are in `storages` or in the new `allocs`, and
        copy this rank's part to the host if gradients live there."""
        event = self._exchange(w, size, storages, allocs) if self.shared else w.mark(COMPUTE)
        if self.norms and not self.shared:
            event = self.norms[-1]
        self.norms = []
        storages = (*storages, *(alloc.storage for alloc in allocs))
        if self.leaves:
            part = self.bucket[-1].prefix
            if nbytes := self.system.host.host_grad_bytes * sum(map(self._leaving, self.bucket)):
                event = self.down = w.state_copy(
                    Kind.D2H, part, GRADIENTS_DOWN, nbytes, after=event, reads=storages
                )
        self.in_flight += [(event, storage) for storage in storages]
        events = (event, self.down) if self.down not in (None, event) else (event,)
        self.reduced += [Reduced(unit.prefix, events) for unit in self.bucket]
        self.bucket = []

    def _leaving(self, unit: Unit) -> int:
        """The number of parameters in this rank's part of a unit whose gradients go to the host."""
        if self.leaving is not None:
            return self.leaving[unit.prefix]
        return updated(unit, self.optimizer, self.layout)

    def _exchange(
        self, w: BlockWriter, size: int, storages: tuple[Storage, ...], allocs: tuple[Alloc, ...]
    ) -> Event:
        w.wait("dp", w.mark(COMPUTE))
        for norm in self.norms[-1:]:
            w.wait("dp", norm)
        experts = sum(unit.table.trained_experts for unit in self.bucket)
        comms = self.reductions(size, self.system.states.reduce_bytes * experts)
        for comm in comms:
            event = w.issue(comm, self.bucket[-1].prefix, "gradients", storages, allocs)
            storages, allocs = (*storages, *(alloc.storage for alloc in allocs)), ()
        for comm in comms if self.beside else ():
            w.stall(comm)
        if not self.beside:
            w.wait(COMPUTE, event)
        return event

    def _drain(self, w: BlockWriter, leave: int) -> None:
        while len(self.in_flight) > leave:
            event, storage = self.in_flight.pop(0)
            w.wait(COMPUTE, event)
            w.free(storage)
