"""Writes the parameter gathers of ZeRO 3 operator by operator, as DeepSpeed fetches modules.

Source: deepspeed 0.19.8, runtime/zero/partitioned_param_coordinator.py, fetch_sub_module: before a
module runs, its parameters are gathered unless they are gathered already. Then the next parameters
in the order of use are fetched, until stage3_prefetch_bucket_size elements are requested or
stage3_max_live_parameters are gathered. Norms are whole on every rank: they have at most
stage3_param_persistence_threshold, 1e5 elements. Deviations: an operator's matrices (q, k and v;
gate and up) are gathered at once; a layer's matrices are released together after its pass; only
stage3_max_live_parameters bounds what the end of a forward leaves gathered for its backward
(stage3_max_reuse_distance has the same default).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rematbench.costs.operators.ops import Op
from rematbench.engine.lowering.blocks.chunk_ops import ChunkOps, Unit
from rematbench.engine.lowering.blocks.fates import Resolved, Site
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.states.emit_states import Gathered, ParameterGatherer, weights_of
from rematbench.engine.program.action import COMPUTE, Action, Kind
from rematbench.engine.program.storage import ModelPart, Storage, event_of, part_of
from rematbench.inputs.layout import Layout
from rematbench.inputs.system import System
from rematbench.plan import StateFate
from rematbench.problem import tied_on_one_rank

FETCHED = event_of("fetched")
"""The event at which the matrices that a forward leaves gathered for its backward have arrived."""


class Matrices(NamedTuple):
    """The sharded parameters of an operator, which are gathered at once. `part`, `op`: the
    operator; `buffer`: the storage of the gathered parameters (a tied head's is the
    embedding's)."""

    part: ModelPart
    op: str
    buffer: Storage
    parameters: int


def forward_order(chunk: ChunkOps) -> list[Matrices]:
    return [one for unit in chunk.units for one in _matrices(chunk, unit)]


def backward_order(chunk: ChunkOps, fates: Mapping[Site, Resolved]) -> list[Matrices]:
    """The matrices of a chunk in the order in which its backward first uses them. The backward of a
    layer that is recomputed whole begins with a forward."""
    found: list[Matrices] = []
    for unit in reversed(chunk.units):
        again = any(fates[site].whole for _, _, site in chunk.saved(unit))
        own = _matrices(chunk, unit)
        found += own if again else own[::-1]
    return found


def kept_matrices(chunk: ChunkOps, order: Sequence[Matrices], system: System) -> list[Matrices]:
    """The first matrices of a backward that are still gathered at the end of the forward, because
    they were fetched ahead or were not released. Empty if another pass comes between the two, or if
    nothing is fetched ahead."""
    found: dict[Storage, Matrices] = {}
    for one in order if chunk.backward_next and system.zero.gather_overlap else ():
        if sum(each.parameters for each in found.values()) >= system.zero.live_elements:
            break
        found.setdefault(one.buffer, one)
    return list(found.values())


def layers_ahead(chunk: ChunkOps, system: System) -> int:
    """The most layers by which the gathers of a pass can run ahead."""
    layers = chunk.layer_unit.values()
    sizes = [sum(one.parameters for one in _matrices(chunk, unit)) for unit in layers]
    least = min((size for size in sizes if size), default=system.zero.live_elements)
    return min(len(sizes), -(-system.zero.live_elements // max(1, least)) + 1)


def _matrices(chunk: ChunkOps, unit: Unit) -> list[Matrices]:
    found, tied = [], unit.table.part == "head" and tied_on_one_rank(chunk.problem)
    for op in unit.table.ops:
        if op.is_matrix or (op.parameters and unit.table.part == "embedding"):
            owner = (chunk.units[0].prefix, "embedding") if tied else (unit.prefix, op.name)
            found.append(Matrices(unit.prefix, op.name, weights_of(*owner), op.parameters))
    return found


class MatrixGatherer(ParameterGatherer):
    """Gathers matrices on the dp stream before the kernels that read them, at most a fixed number
    of elements ahead. `order`: the matrices in the order of the pass. `kept`: the matrices that a
    forward leaves gathered for its backward."""

    def __init__(
        self,
        fate: StateFate,
        system: System,
        order: Sequence[Matrices],
        kept: Sequence[Matrices],
        *,
        forward: bool,
        layout: Layout,
    ) -> None:
        super().__init__(fate, system, layout, system.states.gather_bytes, release=True)
        self.order = [*order, *kept] if forward else order
        self.at = {(one.part, one.op): place for place, one in enumerate(order)}
        self.kept, self.forward = {one.buffer: one for one in kept}, forward
        self.whole: dict[Storage, Matrices] = {}  # gathered and not released
        self.waited: set[Storage] = set()

    def arrive(self, w: BlockWriter, units: list[Unit]) -> set[Storage]:
        self.whole = dict(self.kept)
        self.pending = {**dict.fromkeys(self.kept, FETCHED)}
        return {*self.kept}

    def before(self, w: BlockWriter, units: list[Unit], position: int) -> None:
        """Gather nothing yet: `read` gathers the matrices of each kernel."""
        w.weights = self.read

    def ready(self, w: BlockWriter, unit: Unit) -> None:
        w.weights = self.read

    def read(self, w: BlockWriter, part: ModelPart, op: Op) -> tuple[Storage, ...]:
        """Gather the matrices that a kernel reads, wait for them, and fetch the next ones; return
        the storages that the kernel reads."""
        place = self.at.get((part, op.name))
        if place is None:
            return ()
        one = self.order[place]
        if one.buffer not in self.waited:
            self._fetch(w, one)
            w.wait(COMPUTE, self.pending[one.buffer])
            self.waited.add(one.buffer)
            self._ahead(w, place)
        return (one.buffer,)

    def _fetch(self, w: BlockWriter, one: Matrices) -> None:
        if one.buffer not in self.whole:
            self.whole[one.buffer] = one
            owner = part_of(one.buffer.part.letter, one.buffer.part.number, one.buffer.tensor)
            self.pending[one.buffer] = self._issue(
                w, owner, Gathered(one.buffer, one.parameters, "dp")
            )

    def _ahead(self, w: BlockWriter, place: int) -> None:
        """Fetch the next matrices after `place` that are not gathered, up to the limits."""
        asked, live = 0, sum(one.parameters for one in self.whole.values())
        zero = self.system.zero
        limit = min(zero.prefetch_elements, zero.live_elements - live) * self.beside
        for one in self.order[place + 1 :]:
            if asked >= limit:
                return
            if one.buffer not in self.whole:
                self._fetch(w, one)
                asked += one.parameters

    def after(self, w: BlockWriter, unit: Unit) -> None:
        stay = self.kept if self.forward else {}
        read = {one.buffer for one in self.order if one.part == unit.prefix}
        if gone := [buffer for buffer in self.whole if buffer in read and buffer not in stay]:
            self.released = w.mark(COMPUTE)
            for buffer in gone:
                del self.whole[buffer], self.pending[buffer]
            self.waited.difference_update(gone)
            w.free(*gone)
        if stay and unit.table.part == "head":
            for one in stay.values():
                self._fetch(w, one)
            w.add(Action(kind=Kind.EVENT, stream="dp", event=FETCHED))
            self.survivors.update(stay)
