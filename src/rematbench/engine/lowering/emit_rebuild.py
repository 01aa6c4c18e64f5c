"""Decides when a backward block rebuilds saved tensors: per layer, per group, or in windows."""

from collections.abc import Callable

from msgspec.structs import replace

from rematbench.engine.lowering.chunk_ops import Unit
from rematbench.engine.lowering.emit_recompute import Recomputer
from rematbench.engine.program.action import COMPUTE, Action, Kind
from rematbench.plan import Group


class Rebuilder:
    """Rebuilds tensors before their readers, at the points that the plan names.  `Recomputer` emits
    the operators."""

    def __init__(self, recomputer: Recomputer, arrive: Callable[[Unit], None]) -> None:
        self.recomputer, self.chunk, self.fates = recomputer, recomputer.chunk, recomputer.fates
        self.windows = any(fate.window is not None for fate in self.fates.values())
        self.visited: set[str] = set()  # units whose layer- or group-scoped work is done
        self.arrive = arrive  # called before a unit is rebuilt early
        self.stalls: list[Action] = []  # emitted when the collective of their window is done

    def scopes(self, unit: Unit) -> None:
        """Rebuild the tensors of layer or group scope that are due before this unit's backward."""
        due = [unit]
        for group in self._groups(unit):
            due = [
                self.chunk.layer_unit[i]
                for i, layer in enumerate(self.chunk.layers)
                if group.first <= layer <= group.last and i <= unit.place
            ]
        for member in due:
            if member.prefix != unit.prefix:
                self.arrive(member)
            self._rebuild_unit(member, last=member.prefix == unit.prefix)

    def _groups(self, unit: Unit) -> set[Group]:
        fates = (self.fates[site] for _, _, site in self.chunk.saved(unit))
        return {f.scope for f in fates if f.recompute_bytes and isinstance(f.scope, Group)}

    def window(self, consumer: Unit, op: str, direction: str) -> None:
        """Rebuild the tensors whose window is the collective that was just issued, `layer_offset`
        layers before their use."""
        if not self.windows:
            return
        maker = self.recomputer
        issued = len(maker.w.actions)
        at_work = maker.run, maker.piece
        for unit in self.chunk.units:
            maker.run, maker.piece = at_work if unit.prefix == consumer.prefix else (None, None)
            missing = {
                name
                for name, _, site in self.chunk.saved(unit)
                if (w := self.fates[site].window) is not None
                and (w.op, w.direction) == (op, direction)
                and unit.place == consumer.place - w.layer_offset
                and unit.table.part == consumer.table.part
                and maker.names(unit)[name] not in maker.on_device
            }
            if missing:
                self.arrive(unit)
                maker.rebuild_inside(unit, missing)
        maker.run, maker.piece = at_work
        self._note_stalls(issued)

    def _note_stalls(self, issued: int) -> None:
        """Note a stall for each kernel recomputed during a collective.  The two share SMs and HBM,
        so the longer of them takes more time, and the lost time comes after both."""
        actions = self.recomputer.w.actions
        comm = next((a.comm for a in reversed(actions[:issued]) if a.stream != COMPUTE), None)
        self.stalls += [
            replace(
                action,
                kind=Kind.STALL,
                comm=comm,
                reads=(),
                allocs=(),
                event="",
                begin="",
                overlaps="",
                scratch=0,
            )
            for action in actions[issued:]
            if comm is not None and action.kind is Kind.RECOMPUTE
        ]

    def settle(self) -> None:
        """Emit the noted stalls, because their collectives are done."""
        for stall in self.stalls:
            self.recomputer.w.add(stall)
        self.stalls = []

    def before_receive(self) -> None:
        """Rebuild the tensors whose window is before the pipeline's receive."""
        for unit in self.chunk.units:
            missing = {
                name
                for name, _, site in self.chunk.saved(unit)
                if (w := self.fates[site].window) is not None and w.direction == "before_recv"
            }
            if missing:
                self.arrive(unit)
                self.recomputer.rebuild(unit, missing)

    def _rebuild_unit(self, unit: Unit, *, last: bool) -> None:
        wanted = [
            (name, self.fates[site])
            for name, storage, site in self.chunk.saved(unit)
            if self.fates[site].recompute_bytes
            and self.fates[site].scope != "consumer"
            and storage not in self.recomputer.on_device
            # A tensor in pieces was rebuilt once with its group; then each piece rebuilds its part.
            and not (unit.prefix in self.visited and self.chunk.run_of(unit, name))
        ]
        missing = {name for name, _ in wanted if unit.table.producer(name) is not None}
        if not last and not self._kept(f"L{unit.place + 1}.layer_input"):
            missing.add("layer_output")
        self.visited.add(unit.prefix)
        if any(fate.whole for _, fate in wanted) and missing:
            self.recomputer.recompute(unit, unit.table.ops, missing)
        elif missing:
            self.recomputer.rebuild(unit, missing)

    def _kept(self, storage: str) -> bool:
        """Whether a storage is on the device or returns without recomputation."""
        if storage in self.recomputer.on_device:
            return True
        return any(
            storage == name and not self.fates[site].recompute_bytes
            for unit in self.chunk.units
            for _, name, site in self.chunk.saved(unit)
        )
