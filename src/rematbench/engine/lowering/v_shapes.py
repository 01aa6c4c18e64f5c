"""Orders of passes whose chunks turn back at the last rank: ZB-V, V-Half and V-Min."""

from functools import lru_cache

from rematbench.plan import Pass, Shape

CHUNK_PASSES = 6
"""The passes of a micro-batch on a rank: for each of two chunks a forward and two halves."""


def _slots(shape: Shape, rank: int, pp: int) -> tuple[int, int, int, int]:
    """The time slots of a micro-batch's forwards of chunks 0 and 1, and of its input gradients of
    chunks 1 and 0. The next micro-batch comes six slots later."""
    if shape == "v-min":
        gap = 2 if pp % 3 == 0 else 0
        return rank, 2 * pp - rank - 1, 2 * pp + gap + rank, 4 * pp + gap - rank - 1
    if shape == "v-half":
        gap = 3 if pp % 2 == 0 else 0
        there, back = 2 * rank, 3 * pp - rank - 2
        return there, back, 3 * pp + gap + there - 1, 6 * pp + gap - rank - 2
    there, back = 4 * rank, 6 * pp - 2 * rank - 3
    return there, back, 6 * pp + there - 2, 6 * pp + back - 2


@lru_cache(maxsize=64)
def v_shape(shape: Shape, pp: int, num_micro_batches: int) -> tuple[tuple[Pass, ...], ...]:
    """Return the passes of every rank in issue order (Qi et al. 2024, arXiv 2405.15362).

    A rank runs forwards and input gradients in the order of their slots, as early as it can, keeps
    no more than its shape allows, and runs a weight gradient whenever it would wait.  If all passes
    take equal seconds, a step of m micro-batches takes 6 m + pp - 1 passes under ZB-V, 6 m +
    3 (pp - 1) under V-Half (even pp) and 6 m + 4 pp - 5 under V-Min (6 m + 4 pp - 3 if pp is a
    multiple of 3); 1F1B takes 6 m + 6 (pp - 1).
    """
    kinds = (Pass(True, 0, 0), Pass(True, 0, 1), Pass("B", 0, 1), Pass("B", 0, 0))
    due = [
        sorted(
            (slot + CHUNK_PASSES * i, kind._replace(micro_batch=i))
            for slot, kind in zip(_slots(shape, rank, pp), kinds, strict=True)
            for i in range(num_micro_batches)
        )
        for rank in range(pp)
    ]
    orders: list[list[Pass]] = [[] for _ in due]
    weights: list[list[Pass]] = [[] for _ in due]
    next_of, live = [0] * pp, [0] * pp
    done: set[tuple[int, Pass] | None] = {None}
    # A rank keeps the activations of at most so many (micro-batch, chunk) pairs; two chunks are as
    # large as a stage of plain 1F1B.
    most = {"zb-v": 2 * pp, "v-half": pp + 2, "v-min": 2 * ((pp + 4) // 3)}[shape]
    while any(weights) or any(at < len(own) for at, own in zip(next_of, due, strict=True)):
        ended = []
        for rank, own in enumerate(due):
            item = own[next_of[rank]][1] if next_of[rank] < len(own) else None
            room = item and (item.backward or live[rank] < most)
            if item and room and _before(item, rank, pp) in done:
                next_of[rank] += 1
                live[rank] += item.forward
                weights[rank] += [item._replace(kind="W")] * item.backward
                ended.append((rank, item))
                orders[rank].append(item)
            elif weights[rank]:
                orders[rank].append(weights[rank].pop(0))
                live[rank] -= 1
        done.update(ended)
    return tuple(map(tuple, orders))


def _before(item: Pass, rank: int, pp: int) -> tuple[int, Pass] | None:
    """(rank, pass) for which a forward or an input gradient waits; None if there is none."""
    last = 2 * pp - 1
    stage = last - rank if item.chunk else rank
    if item.forward and not stage:
        return None
    if item.backward and stage == last:
        return rank, item._replace(kind=True)
    stage += -1 if item.forward else 1
    return min(stage, last - stage), item._replace(chunk=int(stage >= pp))
