"""Reloads the tensors that the forward offloaded to the host, in a backward block."""

from rematbench.engine.lowering.blocks.chunk_ops import (
    ChunkOps,
    Unit,
    stays_in_slots,
    trailing_unit,
)
from rematbench.engine.lowering.blocks.fates import Fates
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.passes.emit_op import emit_copies
from rematbench.engine.program.action import COMPUTE, Kind
from rematbench.engine.program.storage import COPIED_IN, Event, ModelPart, Slot, Storage
from rematbench.plan import Transfers


class Reloader:
    """The reloads of a chunk. With chunk granularity, all copies come before the block. With layer
    granularity, each layer is reloaded before its backward, into rounding buffers if the plan has
    them; the chunk's last unit with offloaded tensors is reloaded during the rank's previous pass,
    into separate memory."""

    def __init__(self, chunk: ChunkOps, fates: Fates, transfers: Transfers, w: BlockWriter) -> None:
        self.chunk, self.transfers, self.w = chunk, transfers, w
        self.stored = chunk.stored(fates)
        self.layerwise = transfers.granularity == "layer"
        self.fetched: dict[ModelPart | None, Event] = {}  # the end of the reloads, by unit
        self.waited: set[ModelPart] = set()
        self.tenants: dict[Slot | None, ModelPart] = {}  # the unit that uses a buffer, by buffer
        self.positions = {unit.prefix: i for i, unit in enumerate(chunk.units)}
        if self.layerwise and transfers.reload_slots:
            for unit in stays_in_slots(chunk, fates, transfers.reload_slots):
                self._slot(unit)
        self.offloaded = self._offloaded()
        ahead = trailing_unit(chunk, fates, transfers)
        self.ahead = ahead.prefix if ahead else None  # an earlier block reloads this unit
        if self.ahead:
            self.fetched[self.ahead] = COPIED_IN

    def _offloaded(self) -> dict[ModelPart, list[tuple[Storage, int]]]:
        table: dict[ModelPart, list[tuple[Storage, int]]] = {}
        for unit in self.chunk.units:
            for _, _, site in self.chunk.saved(unit):
                if leaving := [(p.storage, p.nbytes) for p in self.stored[site] if p.offload]:
                    table.setdefault(unit.prefix, []).extend(leaving)
        return table

    def start(self) -> set[Storage]:
        """Return the storages that the forward left alive, on the device and on the host. With
        chunk granularity, compute first waits for all reloads."""
        arrivals: set[Storage] = set()
        for unit in self.chunk.units:
            for _, _, site in self.chunk.saved(unit):
                for part in self.stored[site]:
                    if not part.offload or not self.layerwise or unit.prefix == self.ahead:
                        arrivals.add(part.storage)
                    if part.offload:
                        arrivals.add(part.storage.on_host)
        if self.offloaded and not self.layerwise:
            self.w.wait(COMPUTE, COPIED_IN)
            self._free_on_host([each for parts in self.offloaded.values() for each, _ in parts])
        return arrivals

    def before(self, order: list[Unit], position: int) -> None:
        if not self.layerwise:
            return
        for unit in order[: position + self.transfers.prefetch_layers + 1]:
            self._fetch(unit)
        self.wait_for(order[position])

    def after(self, unit: Unit) -> None:
        """Note that the unit's backward is done, so that its rounding buffer can be used again."""
        self.tenants = {slot: who for slot, who in self.tenants.items() if who != unit.prefix}

    def wait_for(self, unit: Unit) -> None:
        """Make compute wait for a unit's reloads, if it has any, and free their host copies."""
        if not self.layerwise or unit.prefix not in self.offloaded or unit.prefix in self.waited:
            return
        self.waited.add(unit.prefix)
        self._fetch(unit)
        self.w.wait(COMPUTE, self.fetched[unit.prefix])
        self._free_on_host([each for each, _ in self.offloaded[unit.prefix]])

    def _free_on_host(self, storages: list[Storage]) -> None:
        self.w.free(*[storage.on_host for storage in storages])

    def _fetch(self, unit: Unit) -> None:
        if unit.prefix in self.offloaded and unit.prefix not in self.fetched:
            self.w.wait("h2d", self.w.mark(COMPUTE))
            coming, slot = self.offloaded[unit.prefix], self._slot(unit)
            own = [each for each, _ in coming if each.part == unit.prefix]
            self.w.slots = dict.fromkeys(own, slot) if slot else {}
            self.fetched[unit.prefix] = emit_copies(self.w, Kind.H2D, coming, self.w.new_event())
            self.w.slots = {}

    def _slot(self, unit: Unit) -> Slot | None:
        """The unit's rounding buffer; None (new memory) while another unit still uses it."""
        slots = self.transfers.reload_slots
        slot = Slot(by_layer=True, number=self.positions[unit.prefix] % slots) if slots else None
        if slot in self.tenants:
            return None
        if slot:
            self.tenants[slot] = unit.prefix
        return slot
