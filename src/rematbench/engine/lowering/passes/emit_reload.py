"""Reloads the tensors that the forward offloaded to the host, in a backward block."""

from rematbench.engine.lowering.blocks.chunk_ops import (
    ChunkOps,
    Unit,
    stays_in_slots,
    trailing_unit,
)
from rematbench.engine.lowering.blocks.fates import Fates
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.passes.emit_op import emit_copies_in
from rematbench.engine.program.action import COMPUTE, HOST, Action, Kind, layer_slot, place
from rematbench.plan import Transfers


class Reloader:
    """The reloads of a chunk.  With chunk granularity all copies precede the block.  With layer
    granularity each layer is reloaded before its backward, into rounding buffers if the plan has
    them.  The first layer is reloaded during the rank's previous pass, into separate memory."""

    def __init__(self, chunk: ChunkOps, fates: Fates, transfers: Transfers, w: BlockWriter) -> None:
        self.chunk, self.transfers, self.w = chunk, transfers, w
        self.stored = chunk.stored(fates)
        self.layerwise = transfers.granularity == "layer"
        self.fetched: dict[str, str] = {}  # unit -> event of its reloads
        self.waited: set[str] = set()
        self.tenants: dict[str, str] = {}  # rounding buffer -> unit whose backward still needs it
        self.positions = {unit.prefix: i for i, unit in enumerate(chunk.units)}
        if self.layerwise and transfers.reload_slots:
            for unit in stays_in_slots(chunk, fates, transfers.reload_slots):
                self._slot(unit)
        self.offloaded = self._offloaded()
        ahead = trailing_unit(chunk, fates, transfers)
        self.ahead = ahead.prefix if ahead else ""  # the unit that an earlier block reloads
        if self.ahead:
            self.fetched[self.ahead] = "h2d"

    def _offloaded(self) -> dict[str, list[tuple[str, int]]]:
        """Offloaded storages (name, bytes) by unit prefix."""
        table: dict[str, list[tuple[str, int]]] = {}
        for unit in self.chunk.units:
            for _, _, site in self.chunk.saved(unit):
                leaving = [(p.name, p.nbytes) for p in self.stored[site] if p.offload]
                if leaving:
                    table.setdefault(unit.prefix, []).extend(leaving)
        return table

    def start(self) -> set[str]:
        """Declare the storages that the forward left alive, on the device and on the host.  With
        chunk granularity, compute first waits for all reloads."""
        arrivals: set[str] = set()
        for unit in self.chunk.units:
            for _, _, site in self.chunk.saved(unit):
                for part in self.stored[site]:
                    if not part.offload or not self.layerwise or unit.prefix == self.ahead:
                        arrivals.add(part.name)
                    if part.offload:
                        arrivals.add(part.name + HOST)
        if self.offloaded and not self.layerwise:
            self.w.wait(COMPUTE, "h2d")
            self._free_on_host([name for parts in self.offloaded.values() for name, _ in parts])
        return arrivals

    def before(self, order: list[Unit], position: int) -> None:
        """Start the H2D copies that are due, and wait for this unit's copies (layer granularity
        only)."""
        if not self.layerwise:
            return
        for unit in order[: position + self.transfers.prefetch_layers + 1]:
            self._fetch(unit)
        self.wait_for(order[position])

    def after(self, unit: Unit) -> None:
        """Mark the unit's backward as done, so that its rounding buffer can be used again."""
        self.tenants = {slot: who for slot, who in self.tenants.items() if who != unit.prefix}

    def wait_for(self, unit: Unit) -> None:
        """Wait for a unit's reloads, if it has any, and free their host copies."""
        if not self.layerwise or unit.prefix not in self.offloaded or unit.prefix in self.waited:
            return
        self.waited.add(unit.prefix)
        self._fetch(unit)
        self.w.wait(COMPUTE, self.fetched[unit.prefix])
        self._free_on_host([name for name, _ in self.offloaded[unit.prefix]])

    def _free_on_host(self, names: list[str]) -> None:
        frees = tuple([name + HOST for name in names])
        self.w.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=frees))

    def _fetch(self, unit: Unit) -> None:
        if unit.prefix in self.offloaded and unit.prefix not in self.fetched:
            self.w.wait("h2d", self.w.mark(COMPUTE))
            coming, slot = self.offloaded[unit.prefix], self._slot(unit)
            names = [name for name, _ in coming if place(name)[0] == unit.prefix]
            self.w.slots = dict.fromkeys(names, slot) if slot else {}
            self.fetched[unit.prefix] = emit_copies_in(self.w, coming, self.w.new_event())
            self.w.slots = {}

    def _slot(self, unit: Unit) -> str:
        """The unit's rounding buffer; "" (new memory) while a group's rebuild needs the buffer."""
        slots = self.transfers.reload_slots
        slot = layer_slot(self.positions[unit.prefix], slots) if slots else ""
        if slot in self.tenants:
            return ""
        if slot:
            self.tenants[slot] = unit.prefix
        return slot
