"""Plan -> actions: the only place that expands a plan.  Both readers see nothing else."""

from collections.abc import Callable

from rematbench.block_cache import BlockCache, SiteClass
from rematbench.chunk_ops import ChunkOps
from rematbench.emit_backward import BackwardEmitter
from rematbench.emit_forward import Fates, ForwardEmitter
from rematbench.emit_states import GradReducer, ParameterGatherer
from rematbench.fates import covered, resolve, unmatched
from rematbench.mini import unused
from rematbench.plan import Pass, Phase, Plan, PlanError
from rematbench.problem import Problem
from rematbench.program import Block, Program, RankProgram, Step
from rematbench.schedule import passes, phases
from rematbench.step_blocks import (
    Storages,
    d2h_block,
    h2d_block,
    recv_block,
    release_block,
    send_block,
    wait_block,
)
from rematbench.step_end import emit_step_end


def lower(plan: Plan, problem: Problem) -> Program:
    """Expand a plan into every rank's actions; PlanError names what cannot be lowered."""
    _check_plan(plan, problem)
    shared = BlockCache()
    lowerings = [_RankLowering(plan, problem, rank, shared) for rank in range(problem.layout.pp)]
    program = Program(ranks=tuple(lowering.run() for lowering in lowerings))
    matched = {index for lowering in lowerings for index in lowering.matched}
    idle = unmatched(plan, matched)
    if idle:
        raise PlanError(f"rule matches no saved tensor: {idle[0].select}")
    return program


def rank_orders(plan: Plan, problem: Problem) -> tuple[tuple[Pass, ...], ...]:
    """The passes of every rank."""
    lay = problem.layout
    if plan.orders:
        return plan.orders
    return tuple(
        passes(plan.schedule, rank, lay.pp, lay.vpp, lay.num_micro_batches)
        for rank in range(lay.pp)
    )


def _check_plan(plan: Plan, problem: Problem) -> None:
    lay = problem.layout
    shape = [len(chunks) for chunks in plan.partition]
    if shape != [lay.vpp] * lay.pp:
        raise PlanError(f"partition has chunks per rank {shape}, layout wants {[lay.vpp] * lay.pp}")
    virtual = [plan.partition[r][c] for c in range(lay.vpp) for r in range(lay.pp)]
    layers = [layer for chunk in virtual for layer in chunk]
    if layers != list(range(problem.workload.model.num_layers)):
        raise PlanError("partition must hold every layer once, in order, over the virtual stages")
    if any(not chunk for chunk in virtual):
        raise PlanError("partition has an empty chunk: every chunk needs a layer")
    if plan.state("optimizer").update == "backward" and lay.num_micro_batches > 1:
        raise PlanError(
            f"optimizer-in-backward needs one micro-batch per step, not {lay.num_micro_batches}"
        )
    idle = unused(plan.mini_sequences, [*problem.layer_kinds, problem.head])
    if idle:
        raise PlanError(f"mini-sequence of {idle.ops} names no operator of this model")


def _at_once(order: tuple[Pass, ...], chunk: int) -> bool:
    """Whether each forward of a chunk is followed by its own backward with nothing in between."""
    return all(
        item.chunk != chunk or not item.forward or after == Pass(False, item.micro_batch, chunk)
        for item, after in zip(order, [*order[1:], None], strict=True)
    )


class _RankLowering:
    """Builds one rank's blocks (shared by equal micro-batches) and its steps."""

    def __init__(self, plan: Plan, problem: Problem, rank: int, shared: BlockCache) -> None:
        self.plan, self.problem, self.rank, self.shared = plan, problem, rank, shared
        lay, system = problem.layout, problem.system
        self.order = rank_orders(plan, problem)[rank]
        self.phase = phases(self.order)
        self.chunks = [
            ChunkOps(problem, rank, c, plan.partition[rank][c], plan.mini_sequences, plan.held)
            for c in range(lay.vpp)
        ]
        for chunk in self.chunks:
            chunk.at_once = _at_once(self.order, chunk.chunk)
        self.blocks: list[Block] = []
        self.block_index: dict[tuple[object, ...], int] = {}
        self.steps: list[Step] = []
        self.matched: set[int] = set()
        self.windows = [w for rule in plan.rules if (w := rule.select.micro_batches) is not None]
        self.classes: dict[tuple[object, ...], SiteClass] = {}
        self.class_of: dict[tuple[int, int], SiteClass] = {}
        self.covered = [covered(plan.rules, chunk.sites) for chunk in self.chunks]
        self.releases: list[tuple[int, str, Pass]] = []
        self.fetches = 0
        self.copying: Pass | None = None
        self.last_micro_batch = lay.num_micro_batches - 1
        parameter, peers = plan.state("parameter"), lay.state_shards > 1
        self.update_in_backward = plan.state("optimizer").update == "backward"
        self.transient_gradients = plan.state("gradient").shards > 1 or self.update_in_backward
        self.overlap_reduce = system.reduce_overlap and peers
        self.overlap_gather = system.gather_overlap and parameter.gather == "step" and peers
        self.layerwise = parameter.gather == "layer" and peers

    # -- fates and blocks ---------------------------------------------------------------------

    def site_class(self, site: Pass) -> SiteClass:
        """The class of a (chunk, micro-batch): equal fates share blocks."""
        found = self.class_of.get(site[1:])
        if found is None:
            phase = self.phase[(site.micro_batch, site.chunk)]
            inside = tuple(w[0] <= site.micro_batch < w[1] for w in self.windows)
            key = (site.chunk, phase, inside)
            if key not in self.classes:
                self.classes[key] = self._new_class(site, phase, inside)
            found = self.class_of[site[1:]] = self.classes[key]
        return found

    def _new_class(self, site: Pass, phase: Phase, inside: tuple[bool, ...]) -> SiteClass:
        """Chunks of one shape that the same rules cover have the same fates."""
        chunk, classes = self.chunks[site.chunk], self.shared.classes
        key = (chunk.shape, self.covered[site.chunk], phase, inside)
        if key not in classes:
            fates, matched = resolve(self.plan, chunk.sites, phase, site.micro_batch)
            number = self.shared.number((chunk.shape, tuple(fates.values())))
            classes[key] = (SiteClass(number, fates, self._leaving(site.chunk, fates)), matched)
        found, matched = classes[key]
        self.matched |= matched
        return found

    def _leaving(self, chunk_index: int, fates: Fates) -> Storages:
        """Storages that go to the host when the whole chunk's forward is done."""
        if self.plan.transfers.granularity != "chunk":
            return []
        chunk = self.chunks[chunk_index]
        return [
            (part.name, part.nbytes)
            for unit in chunk.units
            for name, _, where in chunk.saved(unit)
            for part in chunk.parts(unit, name, fates[where])
            if part.offload
        ]

    def add(self, key: tuple[object, ...], build: Callable[[], Block], site: Pass) -> None:
        """Append a step, building its block at first use on any rank."""
        index = self.block_index.get(key)
        if index is None:
            if key not in self.shared.blocks:
                self.shared.blocks[key] = build()
            index = self.block_index[key] = len(self.blocks)
            self.blocks.append(self.shared.blocks[key])
        self.steps.append(Step(index, site.micro_batch, site.chunk))

    def _forward_block(self, chunk: ChunkOps, fates: Fates, gather: bool) -> Block:
        parameter = self.plan.state("parameter")
        gatherer = None
        if gather:
            release = parameter.release == "forward"
            ends = parameter.keeps_ends
            gatherer = ParameterGatherer(
                parameter, self.problem.system, release=release, keeps_ends=ends
            )
        return ForwardEmitter(chunk, fates, self.plan.transfers, gatherer).block()

    def _backward_block(self, chunk: ChunkOps, fates: Fates, reduce: bool) -> Block:
        gatherer, reducer = None, None
        if self.layerwise:
            parameter = self.plan.state("parameter")
            gatherer = ParameterGatherer(parameter, self.problem.system, release=True)
        if reduce:
            gradient, optimizer = self.plan.state("gradient"), self.plan.state("optimizer")
            shared = self.problem.layout.state_shards > 1
            reducer = GradReducer(gradient, optimizer, self.problem.system, shared=shared)
        return BackwardEmitter(chunk, fates, self.plan.transfers, gatherer, reducer).block()

    # -- steps --------------------------------------------------------------------------------

    def run(self) -> RankProgram:
        """All steps of one optimizer step."""
        fetch_at = self._fetch_positions()
        for position, item in enumerate(self.order):
            for target in fetch_at.get(position, ()):
                self._fetch(target)
            if item.forward:
                self._forward(item, position)
            else:
                self._backward(item, position)
            self._release_due(position)
        self._release_due(len(self.order) + self.plan.transfers.release_lag + 1)
        emit_step_end(self, self.plan, self.problem)
        return RankProgram(rank=self.rank, blocks=tuple(self.blocks), steps=tuple(self.steps))

    def _fetch_positions(self) -> dict[int, list[Pass]]:
        """Where each backward's H2D is issued: when the previous backward starts (the first one's:
        when the pass before it starts), but not before its own forward is done."""
        at: dict[int, list[Pass]] = {}
        forward_at: dict[tuple[int, int], int] = {}
        previous = -1
        for index, item in enumerate(self.order):
            site = (item.micro_batch, item.chunk)
            if item.forward:
                forward_at[site] = index
                continue
            if self.site_class(item).leaving:
                beside = previous if previous >= 0 else index - 1
                at.setdefault(max(beside, forward_at[site] + 1), []).append(item)
            previous = index
        return at

    def _forward(self, item: Pass, position: int) -> None:
        chunk = self.chunks[item.chunk]
        cls = self.site_class(item)
        if not chunk.first:
            self.add(("recv_f",), lambda: recv_block(chunk, forward=True), item)
        gather = self.layerwise or (self.overlap_gather and item.micro_batch == 0)
        key = ("F", cls.number, gather)
        self.add(key, lambda: self._forward_block(chunk, cls.fates, gather), item)
        if cls.leaving:
            self.add(("D2H", cls.number), lambda: d2h_block(cls.leaving), item)
            self.releases.append((position + self.plan.transfers.release_lag, "d2h", item))
        if not chunk.last:
            self._hold_send(item)
            self._send(item, position, forward=True)
        if cls.leaving:
            self.copying = item

    def _backward(self, item: Pass, position: int) -> None:
        chunk = self.chunks[item.chunk]
        cls = self.site_class(item)
        if not chunk.last:
            self.add(("recv_b", chunk.output_name), lambda: recv_block(chunk, forward=False), item)
        final = item.micro_batch == self.last_micro_batch
        reduce = self.transient_gradients or (self.overlap_reduce and final)
        key = ("B", cls.number, reduce)
        self.add(key, lambda: self._backward_block(chunk, cls.fates, reduce), item)
        if not chunk.first:
            self._send(item, position, forward=False)

    def _hold_send(self, item: Pass) -> None:
        """In the plan's phases, the copy that ran beside this pass ends before its send starts."""
        phase = self.phase[(item.micro_batch, item.chunk)]
        if self.copying is not None and phase in self.plan.transfers.before_send_phases:
            self.add(("hold",), lambda: wait_block("hold", "d2h", "pp_send"), self.copying)

    def _send(self, item: Pass, position: int, *, forward: bool) -> None:
        chunk = self.chunks[item.chunk]
        name = "send_f" if forward else "send_b"
        key = (name, chunk.output_name)
        self.add(key, lambda: send_block(chunk, forward=forward), item)
        overlap = self.problem.system.p2p_overlap
        beside = overlap == "always" or (overlap == "interleaved" and self.problem.layout.vpp > 1)
        self.releases.append((position + int(beside), name, item))

    def _fetch(self, item: Pass) -> None:
        """H2D of a (chunk, micro-batch); its device copy must be released first."""
        waiting = [r for r in self.releases if r[1] == "d2h" and r[2][1:] == item[1:]]
        for release in waiting:
            self.releases.remove(release)
            self._release("d2h", release[2])
        cls = self.site_class(item)
        slots = self.plan.transfers.reload_slots
        slot = f"slot/reload{self.fetches % slots}" if slots else ""
        self.fetches += 1
        key = ("H2D", cls.number, slot)
        self.add(key, lambda: h2d_block(cls.leaving, slot), item)

    def _release_due(self, position: int) -> None:
        if not self.releases:
            return
        due = [r for r in self.releases if r[0] <= position]
        self.releases = [r for r in self.releases if r[0] > position]
        for _, what, item in due:
            self._release(what, item)

    def _release(self, what: str, item: Pass) -> None:
        """Wait for a copy or a send and free its device storages."""
        chunk = self.chunks[item.chunk]
        if what == "d2h":
            cls = self.site_class(item)
            names = tuple(name for name, _ in cls.leaving)
            key: tuple[object, ...] = ("free_d2h", cls.number)
            self.add(key, lambda: release_block("d2h", names), item)
        elif what == "send_f":
            output = (chunk.output_name,)
            self.add(("free_f", chunk.output_name), lambda: release_block("sent_f", output), item)
        else:
            gradient = (f"d:{chunk.output_name}",)
            self.add(("free_b", chunk.output_name), lambda: release_block("sent_b", gradient), item)
