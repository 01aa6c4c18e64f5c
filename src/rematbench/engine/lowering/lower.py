"""Expands plans into actions. No other module does so: simulator and runtime read only actions."""

from collections.abc import Callable, Collection
from functools import lru_cache, partial
from typing import NamedTuple

from msgspec.structs import replace

from rematbench.engine.lowering.blocks.chunk_ops import ChunkFacts, ChunkOps, Unit, trailing_unit
from rematbench.engine.lowering.blocks.fates import Fates, covered, phased
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.passes.emit_backward import BackwardEmitter, WeightEmitter
from rematbench.engine.lowering.passes.emit_forward import ForwardEmitter
from rematbench.engine.lowering.passes.emit_op import Storages
from rematbench.engine.lowering.plan_checks import check_plan, check_ready_order, check_rules
from rematbench.engine.lowering.rank_steps import (
    Key,
    PassFacts,
    PassKind,
    Slice,
    StepFacts,
    Window,
    last_backwards,
    pass_kinds,
    rank_steps,
)
from rematbench.engine.lowering.repeated_layers import block_of
from rematbench.engine.lowering.samples import with_samples
from rematbench.engine.lowering.schedule import passes, sliced_passes
from rematbench.engine.lowering.shared_vocabulary import SharedVocabulary
from rematbench.engine.lowering.slices import of_slice, slice_problems, sliced
from rematbench.engine.lowering.states.emit_buckets import BucketReducer, buckets_of
from rematbench.engine.lowering.states.emit_fetches import (
    MatrixGatherer,
    backward_order,
    forward_order,
    kept_matrices,
    layers_ahead,
)
from rematbench.engine.lowering.states.emit_states import GradReducer, ParameterGatherer
from rematbench.engine.lowering.states.held_states import (
    GradientSums,
    HeldParameters,
    holds_parameters,
    sums_gradients,
)
from rematbench.engine.lowering.states.late_tensors import late_tensors
from rematbench.engine.lowering.states.ready_pieces import ReadyWriter, ready_pieces
from rematbench.engine.lowering.states.state_pieces import gradients_that_leave, piece_widths
from rematbench.engine.lowering.states.state_shards import has_whole_gradients
from rematbench.engine.lowering.step_blocks import (
    d2h_block,
    free_block,
    h2d_block,
    recv_block,
    release_block,
    send_block,
    wait_block,
)
from rematbench.engine.lowering.step_end import emit_step_end
from rematbench.engine.program.program import Block, Program, RankProgram, Step
from rematbench.engine.program.storage import COPIED_OUT, SENT, Slot, Storage
from rematbench.plan import VOCABULARY, Pass, Plan, gathers_by_layer
from rematbench.problem import Problem, gathered_bytes, tied_on_one_rank


class PassClass(NamedTuple):
    """A class of (chunk, micro-batch) pairs with equal blocks: its number, its fates, and the
    storages whose copies to the host end after the forward."""

    number: int
    fates: Fates
    offloaded: Storages


class BlockCache:
    """A cache that all ranks of a lowering share. The key of a block has the chunk's shape, its
    fates and flags; the key of a pass class has the rules that reach the chunk."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[object, ...], Block] = {}
        self.classes: dict[tuple[object, ...], tuple[PassClass, frozenset[int]]] = {}
        self.by_slice: dict[int, BlockCache] = {}
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, content: tuple[object, ...]) -> int:
        """Return a number for `content`.  Equal contents have equal numbers."""
        return self._numbers.setdefault(content, len(self._numbers))


# Why: docs/decisions/engine.md, Do the readers of a plan interpret it themselves?
def lower(
    plan: Plan, problem: Problem, only: Collection[int] | None = None, *, partly: bool = False
) -> Program:
    """Expand a plan into the actions of every rank. Raise PlanError if the plan cannot be lowered.
    `only`: the ranks to lower, without the steps after their last pass; other ranks stay empty.
    `partly`: a rule may match no tensor of these ranks."""
    check_plan(plan, problem)
    shared = BlockCache()
    every = range(problem.layout.pp)
    wanted = every if only is None else only
    lowering = _SlicedLowering if len(plan.slices) > 1 else _RankLowering
    lowerings = {rank: lowering(plan, problem, rank, shared) for rank in wanted}
    empty = RankProgram(rank=0, blocks=(), steps=())
    program = Program(
        ranks=tuple(
            lowerings[rank].run(whole=only is None)
            if rank in lowerings
            else replace(empty, rank=rank)
            for rank in every
        ),
        planned=plan.addresses == "planned",
        embedding=problem.embedding_ranks or (0, 0),
        slices=plan.slices,
        expandable=problem.system.states.expandable_segments,
    )
    matched = {index for lowering in lowerings.values() for index in lowering.matched}
    check_rules(plan, problem, None if partly else matched)
    if problem.workload.sample_len and only is None:
        return replace(program, ranks=(with_samples(program.ranks[0], plan, problem, lower),))
    return program


def rank_orders(plan: Plan, problem: Problem) -> tuple[tuple[Pass, ...], ...]:
    lay = problem.layout
    if plan.orders:
        return plan.orders
    if (slices := len(plan.slices)) > 1:
        of_job = lay.pp, lay.num_micro_batches, slices, lay.vpp
        return tuple(sliced_passes(plan.schedule, rank, *of_job) for rank in range(lay.pp))
    return tuple(
        passes(plan.schedule, rank, lay.pp, lay.vpp, lay.num_micro_batches)
        for rank in range(lay.pp)
    )


@lru_cache(maxsize=256)
def _apart(order: tuple[Pass, ...]) -> frozenset[int]:
    """The chunks of which some forward is not directly followed by its own backward."""
    return frozenset(
        item.chunk
        for item, after in zip(order, [*order[1:], None], strict=True)
        if item.forward
        and (after is None or after.forward or after[1:] != item[1:] or after.kind == "W")
    )


class _RankLowering:
    """Builds one rank's blocks (shared by equal micro-batches) and its steps."""

    def __init__(self, plan: Plan, problem: Problem, rank: int, shared: BlockCache) -> None:
        # Half backwards would occupy a slot until the gradients of weights are computed.
        if plan.halves and plan.transfers.reload_slots:
            plan = replace(plan, transfers=replace(plan.transfers, reload_slots=0))
        self.plan, self.problem, self.rank, self.shared = plan, problem, rank, shared
        self.slices = max(1, len(plan.slices))
        lay, system = problem.layout, problem.system
        self.order = rank_orders(plan, problem)[rank]
        facts = ChunkFacts.of(plan)
        apart = _apart(self.order)
        self.chunks = [
            ChunkOps.of(problem, rank, c, layers, facts._replace(backward_next=c not in apart))
            for c, layers in enumerate(plan.partition[rank])
        ]
        self.blocks: list[Block] = []
        self.block_index: dict[Key, int] = {}
        self.steps: list[Step] = []
        self.matched: set[int] = set()
        self.phased = phased(plan.rules)
        self.reached = [covered(plan.rules, chunk.where) for chunk in self.chunks]
        self.holders: dict[int, tuple[ChunkOps, PassClass]] = {}
        parameter, peers = plan.state("parameter"), lay.has_peers
        self.update_in_backward = plan.state("optimizer").update == "backward"
        gradient = plan.state("gradient")
        self.sums, self.holds = sums_gradients(plan), holds_parameters(plan, problem)
        self.buckets = buckets_of(plan, problem, self.chunks)
        self.leaving_gradients = gradient.home == "host" or has_whole_gradients(gradient, lay)
        self.leaving = gradients_that_leave(self.chunks, plan)
        self.ready = ready_pieces(self.chunks, plan)
        if self.ready is not None:
            check_ready_order(last_backwards(self.order), self.order)
        self.overlap_reduce = system.zero.reduce_overlap and peers and not self.sums
        self.overlap_gather = system.zero.gather_overlap and parameter.gather == "step" and peers
        self.layerwise, self.width = gathers_by_layer(parameter, lay), gathered_bytes(problem)
        one_pass = parameter.release == "forward" and not parameter.keeps_ends
        self.by_matrix = self.layerwise and one_pass and system.zero.prefetch_elements > 0

    def run(self, *, whole: bool) -> RankProgram:
        """The rank's program for an optimizer step.  If not `whole`, only the step's passes."""
        found = rank_steps(self._facts())
        for key in found.keys:
            self._place(key, partial(self._block, key))
        self.steps += found.steps
        if whole:
            emit_step_end(self, self.plan, self.problem)
        return RankProgram(
            rank=self.rank,
            blocks=tuple(self.blocks),
            steps=tuple(self.steps),
            late=late_tensors(self.chunks, self.plan, self.problem),
            waiting_frees=self.problem.system.zero.waiting_frees,
        )

    def add(self, key: Key, build: Callable[[], Block], item: Pass) -> None:
        """Append a step after the last pass. The first rank that needs its block builds it."""
        if key not in self.block_index:
            self._place(key, build)
        self.steps.append(Step(self.block_index[key], item.micro_batch, item.chunk))

    def _place(self, key: Key, build: Callable[[], Block]) -> None:
        # Ranks share no block of a vocabulary, because its events name the other ranks.
        own = (*key, self.rank) if key[0] == "vocabulary" else key
        if own not in self.shared.blocks:
            self.shared.blocks[own] = build()
        self.block_index[key] = len(self.blocks)
        self.blocks.append(self.shared.blocks[own])

    def _facts(self) -> StepFacts:
        rules, transfers = self.plan.rules, self.plan.transfers
        windows = tuple(w for rule in rules if (w := rule.select.micro_batches) is not None)
        return StepFacts(
            order=self.order,
            windows=windows,
            chunks=tuple(chunk.ends for chunk in self.chunks),
            classes=self._classes(windows),
            release_lag=transfers.release_lag,
            reload_slots=transfers.reload_slots,
            hold_phases=transfers.before_send_phases,
            overlapped_sends=self.problem.system.sends_beside(self.problem.layout.vpp),
            holds_outputs=self.problem.system.parallel.holds_outputs,
            gather=self.layerwise and not self.holds,
            gather_first=self.overlap_gather or self.holds,
            reduce=self.update_in_backward or (self.leaving_gradients and not self.sums),
            reduce_last=self.overlap_reduce,
            pairs=self.problem.ep_overlaps,
            sum_first=self.sums,
            update_last=self.ready is not None,
            barriers=VOCABULARY.get(self.plan.schedule),
            slices=self.slices,
        )

    def _classes(self, windows: tuple[Window, ...]) -> tuple[tuple[PassKind, PassFacts], ...]:
        """The class of every kind of pass, whose passes share blocks."""
        whole = self.plan.transfers.granularity == "chunk"
        kinds = pass_kinds(self.order, windows, self.slices).items()
        classes = [(kind, self._pass_class(kind, item)) for kind, item in kinds]
        return tuple(
            (kind, PassFacts(cls.number, bool(cls.offloaded), whole=whole)) for kind, cls in classes
        )

    def _pass_class(self, kind: PassKind, item: Pass) -> PassClass:
        """The class of a kind of pass. Equal chunks with the same rules share a class."""
        chunk, classes = self.chunks[kind.chunk], self.shared.classes
        own: tuple[object, ...] = tuple(self.leaving[chunk.chunk].values()) if self.leaving else ()
        if self.ready:
            own = (*own, *self.ready[chunk.chunk].items())
        reached, phase = self.reached[kind.chunk], kind.phase if self.phased else ""
        key = (chunk.shape, reached, phase, kind.inside, own)
        if key not in classes:
            fates, matched = chunk.fates(self.plan, kind.phase, item.micro_batch)
            number = self.shared.number((chunk.shape, tuple(fates.values()), own))
            classes[key] = (PassClass(number, fates, self._leaving(chunk, fates)), matched)
        found, matched = classes[key]
        self.matched |= matched
        self.holders.setdefault(found.number, (chunk, found))
        return found

    def _leaving(self, chunk: ChunkOps, fates: Fates) -> Storages:
        """The storages whose copies to the host end after the chunk's forward: all offloaded
        storages, or with layer granularity those of the last unit that offloads."""
        units = chunk.units
        if self.plan.transfers.granularity == "layer":
            last = trailing_unit(chunk, fates, self.plan.transfers)
            units = [last] if last else []
        stored = chunk.stored(fates)
        return [
            (part.storage, part.nbytes)
            for unit in units
            for _, _, where in chunk.saved(unit)
            for part in stored[where]
            if part.offload
        ]

    def _block(self, key: Key) -> Block:
        match key:
            case ("F", int(number), bool(gather), bool(beside)):
                chunk, cls = self.holders[number]
                return self._forward_block(chunk, cls.fates, gather, beside=beside)
            case ("B", int(number), bool(reduce), bool(beside), *last):
                chunk, cls = self.holders[number]
                return self._backward_block(
                    chunk, cls.fates, reduce, beside=beside, updates=bool(last)
                )
            case ("vocabulary", str(what)):
                return SharedVocabulary(self.problem, self.rank, self.plan.schedule).block(what)
            case ("B apart", int(number)):
                chunk, cls = self.holders[number]
                return self._half_block(chunk, cls.fates, None)
            case ("W", int(number), bool(reduce)):
                chunk, cls = self.holders[number]
                return self._half_block(chunk, cls.fates, reduce)
        return self._copy_block(key) or self._message_block(key)

    def _copy_block(self, key: Key) -> Block | None:
        match key:
            case ("D2H", int(number)):
                return d2h_block(self.holders[number][1].offloaded)
            case ("H2D", int(number), (Slot() | None) as slot):
                return h2d_block(self.holders[number][1].offloaded, slot)
            case ("free_d2h", int(number)):
                storages = tuple(storage for storage, _ in self.holders[number][1].offloaded)
                return release_block(COPIED_OUT, storages)
            case ("hold",):
                return wait_block("hold", COPIED_OUT, "pp_send")
            case ("sent_f", _):  # The output stays alive for the chunk's backward.
                return wait_block("sent", SENT["f"])
        return None

    def _message_block(self, key: Key) -> Block:
        one = self.chunks[0]
        boundary = one.wide if key[-1] == "wide" else one.boundary
        match key:
            case ("recv", str(word), Storage() as storage, *_):
                return recv_block(boundary, storage, word)
            case ("send", str(word), Storage() as output, *_):
                return send_block(boundary, output, word)
            case ("free_held", Storage() as output):
                return free_block((output,), "free_held")
            case ("free_f", Storage() as output):
                return release_block(SENT["f"], (output,))
            case ("free_b", Storage() as output):
                return release_block(SENT["b"], (output.gradient,))
        raise AssertionError(f"no block of {key}")

    def _forward_block(self, chunk: ChunkOps, fates: Fates, gather: bool, *, beside: bool) -> Block:
        transfers = self.plan.transfers

        def emitter(chunk: ChunkOps, fates: Fates) -> ForwardEmitter:
            gatherer = self._gatherer(chunk, fates, gather, forward=True)
            return ForwardEmitter(chunk, fates, transfers, gatherer, beside=beside)

        ahead = self._layers_ahead(chunk) if self.layerwise else len(chunk.units)
        return block_of(chunk, fates, transfers, ahead if gather else 0, emitter, forward=True)

    def _gatherer(
        self, chunk: ChunkOps, fates: Fates, gather: bool, *, forward: bool
    ) -> ParameterGatherer | None:
        """The writer of a pass's parameter gathers, or one that only names the copies that an
        earlier pass gathered; None if the pass needs neither."""
        parameter, system, lay = (
            self.plan.state("parameter"),
            self.problem.system,
            self.problem.layout,
        )
        if gather and self.by_matrix:
            back = backward_order(chunk, fates)
            kept = kept_matrices(chunk, back, system)
            order = forward_order(chunk) if forward else back
            return MatrixGatherer(parameter, system, order, kept, forward=forward, layout=lay)
        held = self.holds and not (forward and gather)
        if not (gather or held):
            return None
        return (HeldParameters if held else ParameterGatherer)(
            *(parameter, system, lay, self.width, self._tied(chunk)),
            release=not forward or parameter.release == "forward",
            keeps_ends=forward and parameter.keeps_ends,
        )

    def _reducer(self, chunk: ChunkOps, reduce: bool, *, norms: bool = False) -> GradReducer | None:
        """The writer of a backward's gradient reductions; None if there are none. `norms`:
        gradients of norms are summed before each reduction."""
        plan, problem, tied = self.plan, self.problem, self._tied(chunk)
        states = plan.state("gradient"), plan.state("optimizer")
        leaving = self.leaving[chunk.chunk] if self.leaving else None
        reducer: GradReducer | None = None
        if self.sums:
            reducer = GradientSums(plan, problem, first=reduce)
        elif reduce and self.buckets is not None:
            reducer = BucketReducer(*states, problem, tied, self.buckets, leaving)
        elif reduce or norms:
            system, lay = problem.system, problem.layout
            reducer = GradReducer(*states, system, lay, self.width, tied, leaving)
        if reducer:
            reducer.sums_in_last = norms
        return reducer

    def _layers_ahead(self, chunk: ChunkOps) -> int:
        if self.by_matrix:
            return layers_ahead(chunk, self.problem.system)
        return self.plan.state("parameter").prefetch_layers

    def _backward_block(
        self, chunk: ChunkOps, fates: Fates, reduce: bool, *, beside: bool, updates: bool
    ) -> Block:
        transfers = self.plan.transfers

        def emitter(chunk: ChunkOps, fates: Fates) -> BackwardEmitter:
            gatherer = self._gatherer(chunk, fates, self.layerwise, forward=False)
            norms = updates and self.problem.layout.sequence_parallel
            reducer = self._reducer(chunk, reduce, norms=norms)
            updater = self._updater(chunk) if updates else None
            return BackwardEmitter(
                chunk, fates, transfers, gatherer, reducer, updater, beside=beside
            )

        by_unit = self.leaving_gradients or self.update_in_backward
        leaving = bool(self.leaving and self.leaving[chunk.chunk])
        if updates or (reduce and (self.buckets is not None or not by_unit or leaving)):
            # Buckets and pieces span layers, so one layer's actions cannot stand for others.
            return emitter(chunk, fates).block()
        ahead = self._layers_ahead(chunk) if self.layerwise else 0
        return block_of(chunk, fates, transfers, ahead, emitter, forward=False)

    def _half_block(self, chunk: ChunkOps, fates: Fates, reduce: bool | None) -> Block:
        """The half of a backward that computes the gradients of inputs (`reduce` None) or of
        weights. The latter also reduces gradients if `reduce` is true."""
        transfers = self.plan.transfers

        def emitter(chunk: ChunkOps, fates: Fates) -> BackwardEmitter | WeightEmitter:
            first = BackwardEmitter(chunk, fates, transfers, None, None, apart=True)
            return first if reduce is None else WeightEmitter(first, self._reducer(chunk, reduce))

        if reduce and self.buckets is not None:
            return emitter(chunk, fates).block()
        return block_of(chunk, fates, transfers, 0, emitter, forward=False)

    def _updater(self, chunk: ChunkOps) -> Callable[[BlockWriter], ReadyWriter]:
        cut = self.plan.state("optimizer").pieces
        assert self.ready is not None
        assert cut is not None
        due, widths = self.ready[chunk.chunk], piece_widths(self.plan, self.problem)
        return lambda w: ReadyWriter(w, due, cut, widths)

    def _tied(self, chunk: ChunkOps) -> Unit | None:
        """The embedding's unit if the head of the same rank uses its weight; otherwise None."""
        return chunk.units[0] if tied_on_one_rank(self.problem) else None


class _SlicedLowering(_RankLowering):
    """Builds the steps of a rank whose passes run slices of sequences.  `parts`: for each slice,
    the lowering that makes its blocks, and the indices of its rules in the plan."""

    def __init__(self, plan: Plan, problem: Problem, rank: int, shared: BlockCache) -> None:
        super().__init__(plan, problem, rank, shared)
        self.parts: list[tuple[_RankLowering, list[int]]] = []
        # In this order no backward directly follows its own forward.
        chunks = range(problem.layout.vpp)
        apart = tuple(Pass(f, m, c) for c in chunks for f in (True, False) for m in (0, 1))
        for number, part in enumerate(slice_problems(problem, plan.slices)):
            alone, places = of_slice(plan, number)
            alone = replace(alone, orders=(apart,) * problem.layout.pp)
            own = shared.by_slice.setdefault(number, BlockCache())
            self.parts.append((_RankLowering(alone, part, rank, own), places))

    def _pass_class(self, kind: PassKind, item: Pass) -> PassClass:
        part, places = self.parts[kind.slice]
        first = item._replace(micro_batch=item.micro_batch // self.slices)
        found = part._pass_class(kind, first)
        self.matched |= {places[index] for index in part.matched if index < len(places)}
        return found

    def add(self, key: Key, build: Callable[[], Block], item: Pass) -> None:
        super().add(key, build, item._replace(micro_batch=item.micro_batch // self.slices))

    def _block(self, key: Key) -> Block:
        *plain, last = key
        if not isinstance(last, Slice):
            return super()._block(key)
        block = self.parts[last.number][0]._block(tuple(plain))
        kinds = len(self.problem.layer_kinds)
        return sliced(block, self.plan.slices, last.number, kinds)
