"""Small blocks: receives, sends, copies and releases between passes, and the step's end."""

from collections.abc import Sequence

from msgspec.structs import replace

from rematbench.costs.operators.ops import Activation, Comm
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.lowering.passes.emit_op import Storages, emit_copies
from rematbench.engine.program.action import COMPUTE, WEIGHTS_DOWN, Action, Alloc, Kind
from rematbench.engine.program.program import Block
from rematbench.engine.program.storage import (
    COPIED_IN,
    COPIED_OUT,
    ENDED,
    NO_PART,
    RECEIVED,
    REDUCED,
    SENT,
    Event,
    Slot,
    Storage,
)


def tied_send_block(nbytes: int) -> Block:
    w = BlockWriter()
    w.wait("pp_send", w.mark(COMPUTE))
    w.add(Action(kind=Kind.SEND, stream="pp_send", op="tied", nbytes=nbytes, event=SENT["e"]))
    return Block("tied_send", tuple(w.actions))


def tied_recv_block(nbytes: int) -> Block:
    w = BlockWriter()
    w.wait(COMPUTE, RECEIVED["e"])
    w.wait(COMPUTE, SENT["e"])
    recv = Action(kind=Kind.RECV, stream="pp_recv", op="tied", nbytes=nbytes, event=RECEIVED["e"])
    return Block("tied_recv", (recv, *w.actions))


def recv_block(tensor: Activation, storage: Storage, direction: str) -> Block:
    """Receive a boundary activation (or its gradient, in a backward) into new memory. Its event is
    the arrival."""
    forward = direction[0] != "b"
    action = Action(
        kind=Kind.RECV,
        stream="pp_recv",
        op=direction,
        allocs=(Alloc(storage if forward else storage.gradient, tensor.nbytes),),
        nbytes=tensor.nbytes,
        event=RECEIVED[direction],
    )
    return Block(RECEIVED[direction].text, (action,))


def send_block(tensor: Activation, storage: Storage, direction: str) -> Block:
    """Send a boundary activation (or its gradient) to the neighbour after its pass."""
    w, kind = BlockWriter(), direction[0]
    w.wait("pp_send", ENDED[kind])
    w.add(
        Action(
            kind=Kind.SEND,
            stream="pp_send",
            op=direction,
            reads=(storage if kind == "f" else storage.gradient,),
            nbytes=tensor.nbytes,
            event=SENT[kind],
        )
    )
    return Block(f"send_{direction}", tuple(w.actions))


def d2h_block(storages: Storages) -> Block:
    w = BlockWriter()
    w.wait("d2h", ENDED["f"])
    emit_copies(w, Kind.D2H, storages, COPIED_OUT)
    return Block("D2H", tuple(w.actions))


def h2d_block(storages: Storages, slot: Slot | None) -> Block:
    w = BlockWriter()
    # The copies may need memory that compute frees after the D2H copies, for which it has waited.
    w.wait("h2d", w.mark(COMPUTE))
    emit_copies(w, Kind.H2D, storages, COPIED_IN, slot)
    return Block("H2D", tuple(w.actions))


def release_block(event: Event, storages: tuple[Storage, ...]) -> Block:
    """Make compute wait for a copy or a send, then free the device storages."""
    w = BlockWriter()
    w.wait(COMPUTE, event)
    if storages:
        w.free(*storages)
    return Block(f"free_{event}", tuple(w.actions))


def free_block(storages: tuple[Storage, ...], label: str = "release") -> Block:
    """Free storages, such as a chunk's gathered parameters, gradient shards, or output."""
    return Block(label, (Action(kind=Kind.FREE, stream=COMPUTE, frees=storages),))


def wait_block(label: str, event: Event, stream: str = COMPUTE) -> Block:
    w = BlockWriter()
    w.wait(stream, event)
    return Block(label, tuple(w.actions))


def reduce_block(comms: Sequence[Comm], scratch: int = 0) -> Block:
    """Reduce a chunk's gradients after its last backward, without overlap. `scratch`: the bytes of
    buckets and of the copy of a bucket that is reduced."""
    w = BlockWriter()
    for comm in comms:
        w.collective(comm, NO_PART, "gradients", [], [])
        w.actions[-1] = replace(w.actions[-1], scratch=scratch)
    w.add(Action(kind=Kind.EVENT, stream="dp", event=REDUCED))
    return Block("reduce", tuple(w.actions))


def gather_block(comm: Comm) -> Block:
    """Gather a chunk's parameters after the optimizer step, without overlap."""
    w = BlockWriter()
    w.wait(COMPUTE, w.collective(comm, NO_PART, "parameters", [], []))
    return Block("gather", tuple(w.actions))


def sum_block(comm: Comm, label: str = "norms", op: str = "norm_gradients") -> Block:
    w = BlockWriter()
    w.wait(COMPUTE, w.collective(comm, NO_PART, op, [], []))
    return Block(label, tuple(w.actions))


def optimizer_block(nbytes: int, scratch: int, down: int) -> Block:
    """Update the rank's share of the parameters on the device.  `nbytes`: bytes of the parameters
    in compute precision; `scratch`: extra bytes during the update; `down`: bytes of updated weights
    to copy to host memory."""
    w = BlockWriter()
    w.add(
        Action(kind=Kind.OPTIMIZER, stream=COMPUTE, op="optimizer", nbytes=nbytes, scratch=scratch)
    )
    if down:
        w.wait(COMPUTE, w.state_copy(Kind.D2H, NO_PART, WEIGHTS_DOWN, down, after=w.mark(COMPUTE)))
    return Block("OPT", tuple(w.actions))
