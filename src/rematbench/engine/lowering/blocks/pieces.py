"""Mini-sequences of many pieces: the emitters write only four pieces, and one of them is repeated.

The first pieces may rebuild whole tensors. Each later piece has the same actions as the piece
before, with the next number in the names of its storages, later events and the next rows. If the
second and the third of the written pieces are alike, the third stands for all pieces up to the last
but one, and the fourth becomes the last. Tests compare the result with a block in which all pieces
are written.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from rematbench.engine.lowering.blocks.mini_sequences import Piece
from rematbench.engine.lowering.blocks.repeated_pieces import Position, RepeatedPiece
from rematbench.engine.lowering.blocks.writer import BlockWriter
from rematbench.engine.program.action import Action
from rematbench.engine.program.storage import Storage
from rematbench.engine.program.template import PiecePeriods, PieceShift, waits_before

WRITTEN = 4
"""The number of pieces that are written if one of them is repeated."""

MIN_SPARED = 3
"""The fewest pieces that must be left out for a repetition to be worth its checks."""


def write_pieces(
    w: BlockWriter,
    pieces: Sequence[Piece],
    write: Callable[[Piece], None],
    tensor_sets: Sequence[set[Storage]] = (),
) -> None:
    """Write the actions of all pieces. `write` writes the actions of one piece, and adds its
    storages to the sets in `tensor_sets`."""
    larger = sum(piece.fraction == pieces[0].fraction for piece in pieces)
    for alike in (pieces[:larger], pieces[larger:]):  # The larger pieces have one row more.
        many = len(alike) >= WRITTEN + MIN_SPARED
        if many and _repeat(w, alike, write, tensor_sets):
            continue
        for piece in alike[WRITTEN:] if many else alike:
            write(piece)


def _repeat(
    w: BlockWriter,
    pieces: Sequence[Piece],
    write: Callable[[Piece], None],
    tensor_sets: Sequence[set[Storage]],
) -> bool:
    """Write the first four of some pieces of equal size. If the second and the third are alike, let
    the third stand for all pieces up to the last but one; return whether they are."""
    edges = [w.position]
    write(pieces[0])
    compact, w.compact = w.compact, False
    for piece in pieces[1 : WRITTEN - 1]:
        edges.append(w.position)
        write(piece)
    edges.append(w.position)
    before = [{*storages} for storages in tensor_sets]
    write(pieces[WRITTEN - 1])
    edges.append(w.position)
    w.compact = compact
    rows = _rows_of_piece(w.actions, edges, pieces)
    if rows is None:
        return False
    events, spared = edges[3].event - edges[2].event, len(pieces) - WRITTEN
    last = PieceShift(spared, spared * events, pieces[-1].offset, rows)
    w.rewrite(edges[3], last.of(w.actions[edges[3].action :]), spared * events)
    offsets = tuple(piece.offset for piece in pieces[WRITTEN - 2 : -1])
    again = RepeatedPiece(PiecePeriods(offsets, rows), *edges[1:4])
    for storages, old in zip(tensor_sets, before, strict=True):
        new = storages - old
        storages.update(shift.storage(each) for shift in again.periods.shifts for each in new)
    w.repeat(again)
    return True


def _rows_of_piece(
    actions: Sequence[Action], edges: Sequence[Position], pieces: Sequence[Piece]
) -> tuple[bool, ...] | None:
    """For each action of the third piece, whether it works on the piece's rows. None if the third
    piece differs from the second in more than names, events and rows, or if the second waits for an
    event from before the first piece."""
    second, third, fourth = (actions[a.action : b.action] for a, b in pairwise(edges[1:]))
    events = [b.event - a.event for a, b in pairwise(edges[1:])]
    if len({len(second), len(third), len(fourth)}) > 1 or len({*events}) > 1:
        return None
    own = (pieces[1].offset, pieces[2].offset)
    pairs = zip(second, third, strict=True)
    rows = tuple([(a.rows.offset, b.rows.offset) == own for a, b in pairs])
    again = PieceShift(1, events[0], pieces[2].offset, rows).of(second)
    return rows if again == third and not waits_before(second, edges[0].event) else None
