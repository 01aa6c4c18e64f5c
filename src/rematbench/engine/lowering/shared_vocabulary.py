"""Writes the passes of a vocabulary that all stages share (Yeung et al. 2024, arXiv 2411.05288).

Every stage has 1 / pp of the rows of the input table and of the output projection. Pass S computes
a stage's logits of a micro-batch from the last stage's output, and the softmax over them; pass T
computes the gradient of the stage's rows. With one barrier (Algorithm 2), S also computes the
stage's part of the output's gradient; one all-reduce sums the parts and corrects them by the maxima
and sums of all stages. With two barriers (Algorithm 1), maxima and sums are all-reduced before T, T
computes the part, and a second all-reduce sums the parts. S includes the lookup in the input table
and its sum, T the gradient of the lookup. Source: sail-sg/VocabularyParallelism 6191c3bf,
megatron/core/tensor_parallel/vocab_output.py.
"""

from rematbench.costs.operators.ops import Comm
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.step_blocks import recv_block
from rematbench.engine.program.action import COMPUTE, Action, Alloc, Kind
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import (
    ENDED,
    HEAD,
    NO_PART,
    RECEIVED,
    SENT,
    SHARE,
    SHARED_OUT,
    Storage,
    event_of,
    received,
    storage_of,
)
from rematbench.plan import VOCABULARY, Schedule
from rematbench.problem import Problem

SUMMED = event_of("stats")
"""The end of the all-reduce of the maxima and sums."""


class SharedVocabulary:
    def __init__(self, problem: Problem, rank: int, schedule: Schedule) -> None:
        self.problem, self.rank = problem, rank
        self.two = VOCABULARY[schedule] == 2
        self.table, pp = problem.shared.share, problem.layout.pp
        self.others = [other for other in range(pp) if other != rank]
        self.last = rank == pp - 1
        self.output = storage_of(HEAD if self.last else SHARE, "final_norm_out")
        self.tensor = problem.head.activations["final_norm_out"]
        self.saved = storage_of(SHARE, "loss_saved")
        tokens = problem.workload.seq_len * problem.layout.micro_batch
        self.vectors = 3 * 4 * tokens
        self.looked_up = problem.embedding.activations["layer_input"].nbytes

    def block(self, what: str) -> Block:
        """The block of a step: sending the last stage's output (send_x), receiving it (recv_x),
        pass S or T, or the all-reduce before T (sum_s) or before the backward (sum_g)."""
        match what:
            case "send_x":
                return self._send_output()
            case "recv_x":
                return recv_block(self.tensor, self.output, "x")
            case "S":
                return self._s()
            case "T":
                return self._t()
            case "sum_s":
                nbytes = self.vectors + self.looked_up
                return self._sum("s", nbytes, gradient=not self.two)
        return self._sum("g", 0, gradient=True)

    def _send_output(self) -> Block:
        w = BlockWriter()
        w.wait("pp_send", ENDED["f"])
        for other in self.others:
            send = Action(
                kind=Kind.SEND,
                stream="pp_send",
                op=f"x{other}",
                reads=(self.output,),
                nbytes=self.tensor.nbytes,
                event=SENT["x"] if other == self.others[-1] else None,
            )
            w.add(send)
        return Block("send_x", tuple(w.actions))

    def _kernel(self, w: BlockWriter, kind: Kind, op: str, reads: list[Storage], made: str) -> None:
        activation = self.table.activations.get(made)
        allocs = [Alloc(storage_of(SHARE, made), activation.nbytes)] if activation else []
        if made == "d:output":
            allocs = [Alloc(self.output.gradient, self.tensor.nbytes)]
        w.compute(kind, SHARE, 0, self.table.op(op), reads, allocs)

    def _s(self) -> Block:
        w, arrivals = BlockWriter(), {self.output}
        if not self.last:
            w.wait(COMPUTE, RECEIVED["x"])
        logits = storage_of(SHARE, "logits")
        self._kernel(w, Kind.FORWARD, "lookup", [], "")
        self._kernel(w, Kind.FORWARD, "lm_head", [self.output], "logits")
        self._kernel(w, Kind.FORWARD, "loss", [logits], "loss_saved")
        survivors = {self.output, self.saved}
        if not self.two:
            survivors.add(self.output.gradient)
            self._kernel(w, Kind.BACKWARD_INPUT, "lm_head", [self.saved], "d:output")
        self._arrive(w, "s")
        return w.finish("S", survivors, arrivals)

    def _t(self) -> Block:
        w, arrivals = BlockWriter(), {self.output, self.saved}
        w.wait(COMPUTE, SUMMED if self.two else SHARED_OUT)
        gradient = storage_of(SHARE, "logits").gradient
        made = Alloc(gradient, self.table.activations["logits"].nbytes)
        w.compute(Kind.BACKWARD_INPUT, SHARE, 0, self.table.op("loss"), [self.saved], [made])
        survivors = {self.output} if self.last else set[Storage]()
        if self.two:
            survivors.add(self.output.gradient)
            self._kernel(w, Kind.BACKWARD_INPUT, "lm_head", [gradient], "d:output")
        self._kernel(w, Kind.BACKWARD_WEIGHT, "lm_head", [gradient, self.output], "")
        self._kernel(w, Kind.BACKWARD_WEIGHT, "lookup", [], "")
        if self.two:
            self._arrive(w, "g")
        return w.finish("T", survivors, arrivals)

    def _arrive(self, w: BlockWriter, barrier: str) -> None:
        """Send every other stage the message that this stage's part is computed."""
        w.wait("dp", w.mark(COMPUTE))
        for other in self.others:
            w.add(Action(kind=Kind.SEND, stream="dp", op=f"{barrier}{other}"))

    def _sum(self, barrier: str, nbytes: int, *, gradient: bool) -> Block:
        """All-reduce `nbytes` (and the output's gradient) after every stage has its part."""
        w = BlockWriter()
        for other in self.others:
            event = received(f"{barrier}{other}")
            w.add(Action(kind=Kind.RECV, stream="pp_recv", op=barrier, event=event))
            w.wait("dp", event)
        reads = (self.output.gradient,) if gradient else ()
        comm = Comm("all_reduce", "pp", nbytes + self.tensor.nbytes * gradient)
        done = SHARED_OUT if gradient else SUMMED
        w.issue(comm, NO_PART, "vocabulary", reads, event=done)
        w.stall(comm)
        if gradient and not self.last:
            w.wait(COMPUTE, done)
            w.free(self.output.gradient)
        return Block(f"sum_{barrier}", tuple(w.actions))
