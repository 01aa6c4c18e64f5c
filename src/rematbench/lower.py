"""Plan -> actions: the only place that expands a plan.  Both readers see nothing else."""

from collections.abc import Callable

from rematbench.action import Action, Alloc, Kind
from rematbench.chunk_ops import ChunkOps, stored_parts
from rematbench.emit_backward import BackwardEmitter, emit_copies_in
from rematbench.emit_forward import Fates, ForwardEmitter, emit_copies_out
from rematbench.emit_states import GradReducer, ParameterGatherer
from rematbench.fates import resolve, unmatched
from rematbench.ops import Comm
from rematbench.plan import Pass, Phase, Plan, PlanError
from rematbench.problem import Problem
from rematbench.program import Block, Program, RankProgram, Step
from rematbench.schedule import passes, phases
from rematbench.writer import COMPUTE, BlockWriter


def lower(plan: Plan, problem: Problem) -> Program:
    """Expand a plan into every rank's actions; PlanError names what cannot be lowered."""
    _check_plan(plan, problem)
    lowerings = [_RankLowering(plan, problem, rank) for rank in range(problem.layout.pp)]
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
    if plan.mini_sequences:
        raise PlanError("mini-sequences are not lowered yet")


class _RankLowering:
    """Builds one rank's blocks (shared by equal micro-batches) and its steps."""

    def __init__(self, plan: Plan, problem: Problem, rank: int) -> None:
        self.plan, self.problem, self.rank = plan, problem, rank
        self.order = rank_orders(plan, problem)[rank]
        self.phase = phases(self.order)
        self.chunks = [
            ChunkOps(problem, rank, c, plan.partition[rank][c]) for c in range(problem.layout.vpp)
        ]
        self.blocks: list[Block] = []
        self.block_index: dict[tuple[object, ...], int] = {}
        self.steps: list[Step] = []
        self.matched: set[int] = set()
        self.fate_cache: dict[tuple[int, Phase, tuple[bool, ...]], tuple[Fates, int]] = {}
        self.releases: list[tuple[int, str, Pass]] = []
        last = problem.layout.num_micro_batches - 1
        self.last_micro_batch, self.seen_forward = last, {p for p in self.order if p.forward}
        self.overlap_reduce = problem.system.reduce_overlap and problem.layout.state_shards > 1
        parameter = plan.state("parameter")
        self.overlap_gather = problem.system.gather_overlap and parameter.gather == "step"
        self.layerwise = parameter.gather == "layer" and problem.layout.state_shards > 1

    # -- fates and blocks ---------------------------------------------------------------------

    def fates(self, site: Pass) -> tuple[Fates, int]:
        """Resolved fates of a (chunk, micro-batch) and the index of their class."""
        phase = self.phase[(site.micro_batch, site.chunk)]
        windows = [rule.select.micro_batches for rule in self.plan.rules]
        inside = tuple(w is not None and w[0] <= site.micro_batch < w[1] for w in windows)
        key = (site.chunk, phase, inside)
        if key not in self.fate_cache:
            where = self.chunks[site.chunk].sites
            table, matched = resolve(self.plan, where, phase, site.micro_batch)
            self.matched |= matched
            same = [i for t, i in self.fate_cache.values() if t == table]
            self.fate_cache[key] = (table, same[0] if same else len(self.fate_cache))
        return self.fate_cache[key]

    def add(self, key: tuple[object, ...], build: Callable[[], Block], site: Pass) -> None:
        """Append a step, building its block at first use."""
        if key not in self.block_index:
            self.block_index[key] = len(self.blocks)
            self.blocks.append(build())
        self.steps.append(Step(self.block_index[key], site.micro_batch, site.chunk))

    def forward_block(self, site: Pass, fates: Fates, gather: bool) -> Block:
        parameter = self.plan.state("parameter")
        gatherer = None
        if gather:
            release = parameter.release == "forward"
            gatherer = ParameterGatherer(parameter, self.problem.system, release=release)
        chunk = self.chunks[site.chunk]
        return ForwardEmitter(chunk, fates, self.plan.transfers, gatherer).block()

    def backward_block(self, site: Pass, fates: Fates, reduce: bool) -> Block:
        gatherer, reducer = None, None
        if self.layerwise:
            parameter = self.plan.state("parameter")
            gatherer = ParameterGatherer(parameter, self.problem.system, release=True)
        if reduce:
            gradient = self.plan.state("gradient")
            sharded = self.plan.state("optimizer").shards > 1
            reducer = GradReducer(gradient, self.problem.system, sharded_optimizer=sharded)
        chunk = self.chunks[site.chunk]
        return BackwardEmitter(chunk, fates, self.plan.transfers, gatherer, reducer).block()

    # -- steps --------------------------------------------------------------------------------

    def run(self) -> RankProgram:
        """All steps of one optimizer step."""
        fetch_at = self._fetch_positions()
        for position, item in enumerate(self.order):
            for target in fetch_at.get(position, []):
                self._fetch(target, position)
            if item.forward:
                self._forward(item, position)
            else:
                self._backward(item, position)
            self._release_due(position)
        self._release_due(len(self.order) + self.plan.transfers.release_lag + 1)
        StepEnd(self).emit()
        return RankProgram(rank=self.rank, blocks=tuple(self.blocks), steps=tuple(self.steps))

    def offloaded(self, site: Pass) -> list[tuple[str, int]]:
        """Storages of a (chunk, micro-batch) that go to the host as a whole chunk."""
        if self.plan.transfers.granularity != "chunk":
            return []
        fates, _ = self.fates(site)
        chunk = self.chunks[site.chunk]
        return [
            (part.name, part.nbytes)
            for unit in chunk.units
            for _, storage, where in chunk.saved(unit)
            for part in stored_parts(storage, fates[where])
            if part.offload
        ]

    def _fetch_positions(self) -> dict[int, list[Pass]]:
        """Where each backward's H2D is issued: when the previous backward starts, but not before
        its own forward is done."""
        at: dict[int, list[Pass]] = {}
        position = {item: index for index, item in enumerate(self.order)}
        previous = -1
        for index, item in enumerate(self.order):
            if item.forward:
                continue
            forward_at = position[Pass(True, item.micro_batch, item.chunk)]
            if self.offloaded(item):
                at.setdefault(max(previous, forward_at + 1, 0), []).append(item)
            previous = index
        return at

    def _forward(self, item: Pass, position: int) -> None:
        chunk = self.chunks[item.chunk]
        fates, cls = self.fates(item)
        if not chunk.first:
            self.add(("recv_f", item.chunk), lambda: _recv_block(chunk, forward=True), item)
        gather = self.layerwise or (self.overlap_gather and item.micro_batch == 0)
        key = ("F", item.chunk, cls, gather)
        self.add(key, lambda: self.forward_block(item, fates, gather), item)
        leaving = self.offloaded(item)
        if leaving:
            self.add(("D2H", item.chunk, cls), lambda: _d2h_block(leaving), item)
            self.releases.append((position + self.plan.transfers.release_lag, "d2h", item))
        if not chunk.last:
            wait_copy = bool(leaving) and (
                self.phase[(item.micro_batch, item.chunk)] in self.plan.transfers.before_send_phases
            )
            self._send(item, position, forward=True, wait_copy=wait_copy)

    def _backward(self, item: Pass, position: int) -> None:
        chunk = self.chunks[item.chunk]
        fates, cls = self.fates(item)
        if not chunk.last:
            self.add(("recv_b", item.chunk), lambda: _recv_block(chunk, forward=False), item)
        final = item.micro_batch == self.last_micro_batch
        transient = self.plan.state("gradient").shards > 1
        reduce = transient or (self.overlap_reduce and final)
        key = ("B", item.chunk, cls, reduce)
        self.add(key, lambda: self.backward_block(item, fates, reduce), item)
        if not chunk.first:
            self._send(item, position, forward=False, wait_copy=False)

    def _send(self, item: Pass, position: int, *, forward: bool, wait_copy: bool) -> None:
        chunk = self.chunks[item.chunk]
        name = "send_f" if forward else "send_b"
        key = (name, item.chunk, wait_copy)
        self.add(key, lambda: _send_block(chunk, forward=forward, wait_copy=wait_copy), item)
        lag = 1 if self.problem.system.p2p_overlap else 0
        self.releases.append((position + lag, name, item))

    def _fetch(self, item: Pass, position: int) -> None:
        """H2D of a (chunk, micro-batch); its device copy must be released first."""
        waiting = [r for r in self.releases if r[1] == "d2h" and r[2][1:] == item[1:]]
        for release in waiting:
            self.releases.remove(release)
            self._release(release[1], release[2])
        coming = self.offloaded(item)
        _, cls = self.fates(item)
        self.add(("H2D", item.chunk, cls), lambda: _h2d_block(coming), item)

    def _release_due(self, position: int) -> None:
        due = [r for r in self.releases if r[0] <= position]
        self.releases = [r for r in self.releases if r[0] > position]
        for _, what, item in due:
            self._release(what, item)

    def _release(self, what: str, item: Pass) -> None:
        """Wait for a copy or a send and free its device storages."""
        chunk = self.chunks[item.chunk]
        if what == "d2h":
            _, cls = self.fates(item)
            names = tuple(name for name, _ in self.offloaded(item))
            self.add(("free_d2h", item.chunk, cls), lambda: _release_block("d2h", names), item)
        elif what == "send_f":
            kept = self._output_kept(chunk)
            names = () if kept else (chunk.output_name,)
            self.add(("free_f", item.chunk), lambda: _release_block("sent_f", names), item)
        else:
            names = (f"d:{chunk.output_name}",)
            self.add(("free_b", item.chunk), lambda: _release_block("sent_b", names), item)

    @staticmethod
    def _output_kept(chunk: ChunkOps) -> bool:
        """Whether the chunk's output is also a saved tensor of this chunk (it never is: the next
        stage saves its own received copy)."""
        return chunk.last


class StepEnd:
    """Gradient reduction, tied-embedding exchange, optimizer step and parameter gather."""

    def __init__(self, lowering: _RankLowering) -> None:
        self.low = lowering
        self.problem, self.plan = lowering.problem, lowering.plan
        self.shards = self.problem.layout.state_shards

    def emit(self) -> None:
        """Append the end-of-step work of the rank."""
        low, system = self.low, self.problem.system
        transient = self.plan.state("gradient").shards > 1
        final = [Pass(False, low.last_micro_batch, c.chunk) for c in low.chunks]
        sites = {s.chunk: s for s in final}
        if self.shards > 1:
            for chunk in reversed(low.chunks):
                site = sites[chunk.chunk]
                if not (transient or low.overlap_reduce):
                    low.add(("reduce", chunk.chunk), lambda c=chunk: self._reduce(c), site)
                low.add(("reduced",), lambda: _wait_block("reduced", "reduced"), site)
        if self.problem.workload.model.tied_embeddings and self.problem.layout.pp > 1:
            self._tied()
        low.add(("OPT",), lambda: self._optimizer(), Pass(False, 0, 0))
        parameter = self.plan.state("parameter")
        if parameter.gather == "step" and self.shards > 1 and not system.gather_overlap:
            for chunk in low.chunks:
                low.add(("gather", chunk.chunk), lambda c=chunk: self._gather(c), sites[chunk.chunk])

    def _parameters(self, chunk: ChunkOps) -> int:
        return sum(unit.parameters for unit in chunk.units)

    def _reduce(self, chunk: ChunkOps) -> Block:
        sharded = self.plan.state("optimizer").shards > 1
        comm_kind = "reduce_scatter" if sharded else "all_reduce"
        nbytes = self.problem.system.reduce_bytes * self._parameters(chunk)
        w = BlockWriter()
        w.collective(Comm(comm_kind, "dp", nbytes), "", "gradients", [], [])
        w.add(Action(kind=Kind.EVENT, stream="dp", event="reduced"))
        return Block("reduce", tuple(w.actions))

    def _gather(self, chunk: ChunkOps) -> Block:
        nbytes = self.problem.system.gather_bytes * self._parameters(chunk)
        w = BlockWriter()
        done = w.collective(Comm("all_gather", "dp", nbytes), "", "parameters", [], [])
        w.wait(COMPUTE, done)
        return Block("gather", tuple(w.actions))

    def _optimizer(self) -> Block:
        action = Action(kind=Kind.OPTIMIZER, stream=COMPUTE, op="optimizer")
        return Block("OPT", (action,))

    def _tied(self) -> None:
        """First and last rank exchange the gradient of the shared embedding (Megatron)."""
        low, lay = self.low, self.problem.layout
        if low.rank not in (0, lay.pp - 1):
            return
        nbytes = self.problem.system.grad_bytes * self.problem.head.ops[1].parameters
        low.add(("tied_send",), lambda: _tied_send_block(nbytes), Pass(False, 0, 0))
        low.add(("tied_recv",), lambda: _tied_recv_block(nbytes), Pass(False, 0, 0))


def _tied_send_block(nbytes: int) -> Block:
    w = BlockWriter()
    w.wait("pp_send", w.mark(COMPUTE))
    w.add(Action(kind=Kind.SEND, stream="pp_send", op="tied", nbytes=nbytes, event="sent_e"))
    return Block("tied_send", tuple(w.actions))


def _tied_recv_block(nbytes: int) -> Block:
    w = BlockWriter()
    w.wait(COMPUTE, "recv_e")
    w.wait(COMPUTE, "sent_e")
    recv = Action(kind=Kind.RECV, stream="pp_recv", op="tied", nbytes=nbytes, event="recv_e")
    return Block("tied_recv", (recv, *w.actions))


def _recv_block(chunk: ChunkOps, *, forward: bool) -> Block:
    name = chunk.input_name if forward else f"d:{chunk.output_name}"
    tensor = chunk.boundary
    action = Action(
        kind=Kind.RECV,
        stream="pp_recv",
        op="f" if forward else "b",
        allocs=(Alloc(name, tensor.nbytes),),
        nbytes=tensor.nbytes,
        event="recv_f" if forward else "recv_b",
    )
    return Block(action.event, (action,))


def _send_block(chunk: ChunkOps, *, forward: bool, wait_copy: bool) -> Block:
    """After the block's compute (and its D2H, where copies must not share the link)."""
    name = chunk.output_name if forward else f"d:{chunk.output_name}"
    w = BlockWriter()
    w.wait("pp_send", "f_end" if forward else "b_end")
    if wait_copy:
        w.wait("pp_send", "d2h")
    w.add(
        Action(
            kind=Kind.SEND,
            stream="pp_send",
            op="f" if forward else "b",
            reads=(name,),
            nbytes=chunk.boundary.nbytes,
            event="sent_f" if forward else "sent_b",
        )
    )
    return Block("send_f" if forward else "send_b", tuple(w.actions))


def _d2h_block(leaving: list[tuple[str, int]]) -> Block:
    w = BlockWriter()
    w.wait("d2h", "f_end")
    emit_copies_out(w, "", leaving, "d2h")
    return Block("D2H", tuple(w.actions))


def _h2d_block(coming: list[tuple[str, int]]) -> Block:
    w = BlockWriter()
    w.wait("h2d", "d2h")
    emit_copies_in(w, "", coming, "h2d")
    return Block("H2D", tuple(w.actions))


def _release_block(event: str, names: tuple[str, ...]) -> Block:
    wait = Action(kind=Kind.WAIT, stream=COMPUTE, wait=event)
    frees = (Action(kind=Kind.FREE, stream=COMPUTE, frees=names),) if names else ()
    return Block(f"free_{event}", (wait, *frees))


def _wait_block(label: str, event: str) -> Block:
    return Block(label, (Action(kind=Kind.WAIT, stream=COMPUTE, wait=event),))

