"""The order of forward and backward passes on each pipeline rank: GPipe, 1F1B, interleaved 1F1B,
and zero-bubble schedules."""

from functools import lru_cache

from rematbench.engine.lowering.v_shapes import v_shape
from rematbench.plan import SHAPES, VOCABULARY, ZERO_BUBBLE, Pass, Phase, Schedule


@lru_cache(maxsize=512)
def passes(
    schedule: Schedule, rank: int, pp: int, vpp: int, num_micro_batches: int
) -> tuple[Pass, ...]:
    """Return all passes of a rank in issue order.

    Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473): micro-batches go through the chunks
    in groups of pp; rank r runs (vpp - 1) pp + 2 (pp - r - 1) forwards before its first backward.
    Plain 1F1B runs pp - r - 1 forwards first; GPipe runs all forwards first. With a single group
    (num_micro_batches = pp) interleaved 1F1B also runs all forwards first, as older Megatron did;
    megatron-core 0.16.1 does not (see `interleaved`).
    """
    total = num_micro_batches * vpp
    if schedule in SHAPES:
        return v_shape(schedule, pp, num_micro_batches)[rank]
    if schedule in ZERO_BUBBLE:
        return _zero_bubble(ZERO_BUBBLE[schedule], rank, pp, total)
    if schedule in VOCABULARY:
        barriers = VOCABULARY[schedule]
        if not barriers:
            return _interlaced(rank, pp, total)
        return _shared_vocabulary(barriers, rank, pp, total)
    if schedule == "interleaved_1f1b" and num_micro_batches != pp:
        return interleaved(rank, pp, vpp, num_micro_batches)
    warmup = min(pp - rank - 1, total) if schedule == "1f1b" else total
    return _ordered(warmup, total, pp, vpp)


def interleaved(rank: int, pp: int, vpp: int, num_micro_batches: int) -> tuple[Pass, ...]:
    """Return interleaved 1F1B; a single group of micro-batches is no special case (as in
    `get_pp_rank_microbatches` of megatron-core 0.16.1)."""
    total = num_micro_batches * vpp
    return _ordered(min((vpp - 1) * pp + 2 * (pp - rank - 1), total), total, pp, vpp)


def _zero_bubble(step: int, rank: int, pp: int, total: int) -> tuple[Pass, ...]:
    """Return the order of ZB-H1 (`step` 1) or ZB-H2 (2) of Qi et al. 2024 (arXiv 2401.10241),
    figures 2 and 3, with one chunk on each rank.

    Rank r runs step (pp - r - 1) forwards before 1F1B begins. It computes the weight gradients of a
    micro-batch after the input gradients of the micro-batch that comes step r later. So every rank
    keeps step (pp - 1) + 1 micro-batches. With seconds F >= W, rank 0 is idle for (pp - 1) (F + B -
    step W) seconds.
    """
    warmup, lag = min(step * (pp - rank - 1), total), step * rank
    order = [Pass(True, i, 0) for i in range(warmup)]
    for i in range(total):
        if warmup + i < total:
            order.append(Pass(True, warmup + i, 0))
        order.append(Pass("B", i, 0))
        if i >= lag:
            order.append(Pass("W", i - lag, 0))
    return (*order, *(Pass("W", i, 0) for i in range(max(0, total - lag), total)))


@lru_cache(maxsize=512)
def sliced_passes(
    schedule: Schedule, rank: int, pp: int, num_micro_batches: int, slices: int, vpp: int = 1
) -> tuple[Pass, ...]:
    """Return the passes of slices in issue order; their numbers run through all micro-batches.
    Either all forwards come first (gpipe; TeraPipe, Li et al. 2021), or 1F1B over slices has pp - r
    - 2 + slices warm-up forwards (Seq1F1B, Sun et al. 2024, arXiv 2406.03488). Several chunks are
    interleaved in groups of whole sequences with at least pp slices. The backwards of a micro-batch
    come in reverse order of its slices."""
    fewest = -(-pp // slices)
    sequences = next((n for n in range(fewest, num_micro_batches) if num_micro_batches % n == 0), 0)
    group, total = slices * (sequences or num_micro_batches), num_micro_batches * slices * vpp
    behind = (pp - rank - 1) * min(vpp, 2)
    warmup = total if schedule == "gpipe" else min((vpp - 1) * group + behind + slices - 1, total)

    def turned(item: Pass) -> Pass:
        sequence, place = divmod(item.micro_batch, slices)
        return item._replace(micro_batch=sequence * slices + slices - 1 - place)

    order = _ordered(warmup, total, group, vpp)
    return tuple([item if item.forward else turned(item) for item in order])


def _shared_vocabulary(barriers: int, rank: int, pp: int, total: int) -> tuple[Pass, ...]:
    """Return 1F1B with a vocabulary that all stages share (see shared_vocabulary.py). Each barrier
    puts one period between a micro-batch's logits and its backward, so rank r keeps pp - r +
    barriers micro-batches. All stages compute the logits of a micro-batch at the same time. Rank
    r's backward comes pp - 1 - r backwards after the last rank's; one takes two thirds of a
    period."""
    behind = pp - 1 - rank
    after = behind % 3 > 0  # The logits are due while a backward runs, so they follow it.
    lag = (2 * behind + 2 * after) // 3
    order = [Pass(True, i, 0) for i in range(min(pp - rank, total))]

    def share(i: int) -> list[Pass]:
        before = [Pass("T", i - 1, 0)] if 0 < i <= total else []
        return [*before, Pass("S", i, 0)] if i < total else before

    for i in range(barriers + lag):
        order += share(i)
        if i < barriers - 1 and pp - rank + i < total:
            order.append(Pass(True, pp - rank + i, 0))
    for i in range(total):
        forward = pp - rank + barriers - 1 + i
        order += [Pass(True, forward, 0)] * (forward < total)
        shared, backward = share(i + barriers + lag), [Pass(False, i, 0)]
        order += [*backward, *shared] if after else [*shared, *backward]
    return tuple(order)


def _interlaced(rank: int, pp: int, total: int) -> tuple[Pass, ...]:
    """Return the interlaced pipeline (nnScaler, Lin et al. 2024). All stages compute a
    micro-batch's logits and their gradients at the same time; between two such passes each stage
    runs a forward and a backward (odd ranks the backward first). In that time a micro-batch's
    forwards advance by two stages and its backwards by one, so rank 0 keeps 1.5 pp
    micro-batches."""
    last = (pp - 1) // 2
    down, up = rank // 2, last + pp - rank
    order: list[Pass] = []
    for turn in range(total + last + pp + 1):
        i = turn - 1 - last
        order += [Pass("S", i, 0), Pass("T", i, 0)] * (0 <= i < total)
        forward = [Pass(True, turn - down, 0)] * (0 <= turn - down < total)
        backward = [Pass(False, turn - up, 0)] * (0 <= turn - up < total)
        order += [*backward, *forward] if rank % 2 else [*forward, *backward]
    return tuple(order)


def grouped(rank: int, pp: int, vpp: int, group: int, num_micro_batches: int) -> tuple[Pass, ...]:
    """Return generalised interleaving (Wan et al. 2025, arXiv 2503.01328): micro-batches go through
    the chunks in groups of `group` (at least half of pp; num_micro_batches is a multiple of it).
    Input gradients are sent before the weight gradients are computed.

    Rank r keeps group (vpp - 1) + pp - r chunks. The bubble is 2 (pp - 1) + (pp - group) (vpp - 1)
    passes, if all passes take equal seconds and a backward counts as two.
    """
    total = num_micro_batches * vpp
    warmup = min(group * (vpp - 1) + pp - rank - 1, total)
    order: list[Pass] = []
    for item in _ordered(warmup, total, group, vpp):
        halves = (item._replace(kind="B"), item._replace(kind="W"))
        order += [item] if item.forward else halves
    return tuple(order)


def _ordered(warmup: int, total: int, group: int, vpp: int) -> tuple[Pass, ...]:
    """The warm-up forwards, then forwards and backwards in turn, then the remaining backwards."""
    forwards = [_place(i, group, vpp, True) for i in range(total)]
    backwards = [_place(i, group, vpp, False) for i in range(total)]
    order = list(forwards[:warmup])
    for i in range(total - warmup):
        order += [forwards[warmup + i], backwards[i]]
    return (*order, *backwards[total - warmup :])


def _place(i: int, size: int, vpp: int, forward: bool) -> Pass:
    """The micro-batch and chunk of a rank's i-th forward or backward, in groups of `size`
    micro-batches."""
    if vpp == 1:
        return Pass(forward, i, 0)
    group, within = divmod(i, size * vpp)
    chunk = within // size
    return Pass(forward, group * size + within % size, chunk if forward else vpp - 1 - chunk)


@lru_cache(maxsize=256)
def phases(order: tuple[Pass, ...]) -> dict[tuple[int, int], Phase]:
    """Return the phase of each (micro-batch, chunk). Warmup: its forward comes before the rank's
    first backward, but not directly before. Cooldown: its backward comes after the backward that
    follows the last forward. All others are steady."""
    first_backward = next((i for i, p in enumerate(order) if p.backward), len(order))
    last_forward = max((i for i, p in enumerate(order) if p.forward), default=-1)
    phase: dict[tuple[int, int], Phase] = {}
    for i, step in enumerate(order):
        where = (step.micro_batch, step.chunk)
        if step.forward:
            phase[where] = "warmup" if i < first_backward - 1 else "steady"
        elif step.backward and i > last_forward + 1 and phase[where] == "steady":
            phase[where] = "cooldown"
    return phase
