"""The first rank of a pipeline without its neighbours, as one GPU can run it."""

from msgspec.structs import replace

from rematbench.engine.program.action import Action, Kind
from rematbench.engine.program.program import Block, Program

RECEIVED = "recv_"
"""How the events of received messages begin."""


def without_neighbours(program: Program) -> Program:
    """The program of the first rank alone, for its seconds: what it sends and receives is there at
    once.  It has no bytes of messages, so bytes are those of the whole program's first rank."""
    first = program.ranks[0]
    return replace(program, ranks=(replace(first, blocks=tuple(map(_quiet, first.blocks))),))


def _quiet(block: Block) -> Block:
    written = tuple([_there(action) for action in block.written])
    return block if written == block.written else replace(block, written=written)


def _there(action: Action) -> Action:
    """An event in place of a message, on the message's stream, under a name that no receive has."""
    wait = action.wait.replace(RECEIVED, "there_")
    if action.kind in (Kind.SEND, Kind.RECV):
        event = action.event.replace(RECEIVED, "there_")
        return Action(kind=Kind.EVENT, stream=action.stream, event=event)
    return action if wait == action.wait else replace(action, wait=wait)
