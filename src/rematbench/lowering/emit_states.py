"""Write parameter gathers and gradient reductions inside a chunk's blocks (ZeRO, FSDP, overlap)."""

from rematbench.action import COMM_KIND, Action, Alloc, Kind, gradient_buffer
from rematbench.lowering.chunk_ops import Unit
from rematbench.lowering.writer import COMPUTE, BlockWriter
from rematbench.operators.ops import Comm, CommKind
from rematbench.plan import StateFate
from rematbench.system import System


class ParameterGatherer:
    """Gathers each unit's parameters on the dp stream ahead of its use.

    Layer gathers (ZeRO-3, FSDP) allocate the full parameters and run `prefetch_layers` ahead; a
    step gather (ZeRO-1 with overlap) fills resident buffers, all units at once.  `release`: whether
    a unit's copy is freed after its use (`keeps_ends`: but not the embedding's and the head's).
    """

    def __init__(
        self, fate: StateFate, system: System, *, release: bool, keeps_ends: bool = False
    ) -> None:
        self.layerwise = fate.gather == "layer"
        self.keeps_ends = keeps_ends
        self.fate, self.system, self.release = fate, system, release
        self.survivors: set[str] = set()
        self.pending: dict[str, str] = {}
        self.released = ""

    def buffer(self, unit: Unit) -> str:
        """Storage name of a unit's gathered parameters."""
        return f"{unit.prefix}.parameters"

    def before(self, w: BlockWriter, units: list[Unit], position: int) -> None:
        """Issue the gathers due by now and wait for this unit's."""
        ahead = self.fate.prefetch_layers if self.layerwise else len(units)
        for unit in units[: position + ahead + 1]:
            if unit.prefix not in self.pending and unit.parameters:
                self._gather(w, unit)
        if units[position].parameters:
            self.ready(w, units[position])

    def ready(self, w: BlockWriter, unit: Unit) -> None:
        """Wait for a unit's parameters."""
        if unit.prefix not in self.pending:
            self._gather(w, unit)
        w.wait(COMPUTE, self.pending[unit.prefix])

    def _gather(self, w: BlockWriter, unit: Unit) -> None:
        if self.released and self.layerwise:
            w.wait("dp", self.released)  # the buffer of a released unit is reused
        allocs: tuple[Alloc, ...] = ()
        if self.layerwise:
            allocs = (Alloc(self.buffer(unit), self.system.gather_bytes * unit.parameters),)
            w.parameters[unit.prefix] = self.buffer(unit)
        event = w.new_event()
        payload = self.system.gather_bytes * unit.parameters
        w.add(
            Action(
                kind=Kind.ALL_GATHER,
                stream="dp",
                part=unit.prefix,
                op="parameters",
                allocs=allocs,
                event=event,
                comm=Comm("all_gather", "dp", payload),
            )
        )
        w.stall(Comm("all_gather", "dp", payload))
        self.pending[unit.prefix] = event

    def after(self, w: BlockWriter, unit: Unit) -> None:
        """Free the gathered copy after the unit, or leave it for the backward."""
        if not self.layerwise or not unit.parameters:
            return
        self.released = w.mark(COMPUTE)
        if self.release and not (self.keeps_ends and unit.table.part != "layer"):
            del w.parameters[unit.prefix]
            w.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=(self.buffer(unit),)))
        else:
            self.survivors.add(self.buffer(unit))


class GradReducer:
    """Reduces (and, with optimizer-in-backward, applies) each unit's gradients when its backward is
    done, on the dp stream.

    Sharded gradients (ZeRO-2/3) live in a full buffer until reduced; resident ones are reduced in
    place, in buckets of `bucket_bytes`.  `shared`: there are data-parallel peers to reduce with.
    """

    def __init__(
        self, gradient: StateFate, optimizer: StateFate, system: System, *, shared: bool
    ) -> None:
        self.update = optimizer.update == "backward"
        self.transient = gradient.shards > 1 or self.update
        self.system, self.optimizer, self.shared = system, optimizer, shared
        scatter = optimizer.shards > 1 or gradient.shards > 1
        self.kind: CommKind = "reduce_scatter" if scatter else "all_reduce"
        self.bucket: list[Unit] = []
        self.in_flight: list[tuple[str, str]] = []

    def buffer(self, unit: Unit) -> str:
        """Storage name of a unit's full gradients."""
        return gradient_buffer(unit.prefix)

    def before(self, w: BlockWriter, unit: Unit) -> None:
        """Make room for the unit's gradients."""
        if self.transient and unit.parameters:
            width = self.system.grad_bytes if self.update else self.system.gather_bytes
            buffer = Alloc(self.buffer(unit), width * unit.parameters)
            w.add(
                Action(
                    kind=Kind.ALLOC,
                    stream=COMPUTE,
                    part=unit.prefix,
                    op="gradients",
                    allocs=(buffer,),
                )
            )

    def after(self, w: BlockWriter, unit: Unit, *, last: bool) -> None:
        """Issue the reduction of a full bucket; free what an earlier reduction held."""
        if self.update and unit.parameters:
            self._apply(w, unit)
            return
        if unit.parameters:
            self.bucket.append(unit)
        size = sum(self.system.reduce_bytes * u.parameters for u in self.bucket)
        due = self.transient or last or size >= self.system.bucket_bytes
        if self.bucket and due:
            self._reduce(w, size)
        if self.transient:
            self._drain(w, 0 if last else 1)
        if last:
            w.wait("dp", w.mark(COMPUTE))
            w.add(Action(kind=Kind.EVENT, stream="dp", event="reduced"))

    def _apply(self, w: BlockWriter, unit: Unit) -> None:
        """Reduce at once if there are peers, update the unit's parameters, free its gradients."""
        if self.shared:
            comm = Comm(self.kind, "dp", self.system.reduce_bytes * unit.parameters)
            reads = [self.buffer(unit)]
            w.wait(COMPUTE, w.collective(comm, unit.prefix, "gradients", reads, []))
        count = -(-unit.parameters // self.optimizer.shards)
        w.add(
            Action(
                kind=Kind.OPTIMIZER,
                stream=COMPUTE,
                part=unit.prefix,
                op="optimizer",
                reads=(self.buffer(unit),),
                nbytes=self.system.param_bytes * count,
            )
        )
        w.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=(self.buffer(unit),)))

    def _reduce(self, w: BlockWriter, size: int) -> None:
        w.wait("dp", w.mark(COMPUTE))
        event = w.new_event()
        names = tuple(self.buffer(u) for u in self.bucket) if self.transient else ()
        w.add(
            Action(
                kind=COMM_KIND[self.kind],
                stream="dp",
                part=self.bucket[-1].prefix,
                op="gradients",
                reads=names,
                event=event,
                comm=Comm(self.kind, "dp", size),
            )
        )
        w.stall(Comm(self.kind, "dp", size))
        self.in_flight += [(event, name) for name in names]
        self.bucket = []

    def _drain(self, w: BlockWriter, leave: int) -> None:
        while len(self.in_flight) > leave:
            event, name = self.in_flight.pop(0)
            w.wait(COMPUTE, event)
            w.add(Action(kind=Kind.FREE, stream=COMPUTE, frees=(name,)))
