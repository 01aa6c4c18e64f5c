"""Whether a record measured again says what the committed one says: our executor's and baselines'.

What depends on shapes, plans and versions only (status, plan, kernels, every count and every byte
of every rank) must be equal.  Losses and gradients come out of a CPU's arithmetic: another CPU adds
in another order, so they must agree as far as rounding allows, and so must the verdict *lossless*.
Dates, hosts and seconds are no part of a comparison, nor are the peaks of a package's ranks that
exchange over gloo: its threads may hold a collective's buffer for a moment.
"""

from collections.abc import Iterator, Sequence

import msgspec

from rematbench.runs.measured import BOUNDS, Measured
from rematbench.runs.record import Observed, Record

CURVE_BOUND = 1e-4
"""Of a training run's losses, relative: rounding grows over hundreds of steps (mst's to 8e-6)."""
OF_AN_ALLOCATOR = ("allocated_bytes", "reserved_bytes")
"""Depend on what else ran on the GPU."""
STATES = ("traced_ranks", "state_bytes", "host_state_bytes", "warmup_steps")


def differences(again: Record, committed: Record) -> list[str]:
    """What differs, one line each: the field, the value now, the committed one."""
    found = list(_scalars(again, committed, ("status", "reason", "plan_hash")))
    found += _of_observed(again, committed)
    new, old = again.measured, committed.measured
    if new is None or old is None:
        return found if new == old else [*found, "only one of the two has measured numbers"]
    bound = BOUNDS[again.spec.precision]
    found += [*_of_ranks(new, old), *_of_steps(new, old, ("losses", "gradient_norms"), bound)]
    return [*found, *_of_verdict(new, old)]


def _of_observed(again: Record, committed: Record) -> Iterator[str]:
    """What a foreign package showed."""
    new, old = again.observed, committed.observed
    if new is None or old is None:
        if new != old:
            yield "only one of the two has observed numbers"
        return
    yield from _scalars(new, old, ("label", "shim", "kernels", "backend", *STATES))
    if not (again.world == "executed" and again.spec.layout.gpus > 1):
        yield from _scalars(new, old, ("activation_peak_bytes", "host_peak_bytes"))
    bound = BOUNDS[again.spec.precision]
    yield from _of_steps(new, old, ("losses", "gradient_norm"), bound)


def curve_differences(again: tuple[Record, Record], committed: tuple[Record, Record]) -> list[str]:
    """What differs between two training runs, each given with keep_all's: status, plan, steps;
    whether the curve is keep_all's bit by bit; how far it is from keep_all's; and, if both read the
    same text, the losses."""
    (new, new_base), (old, old_base) = again, committed
    found = list(_scalars(new, old, ("status", "reason", "plan_hash")))
    measured = [record.measured for record in (new, new_base, old, old_base)]
    if any(one is None for one in measured):
        return [*found, "without a curve"]
    a, a_base, b, b_base = (one.losses for one in measured if one is not None)
    if not len(a) == len(a_base) == len(b) == len(b_base):
        return [*found, f"{len(a)} steps, committed {len(b)}"]
    if (a == a_base) != (b == b_base):
        found.append(f"bitwise keep_all's: {a == a_base}, committed {b == b_base}")
    same = new.provenance.text == old.provenance.text
    for name, other in {"keep_all's": a_base, "the committed one's": b if same else a}.items():
        gap = max(abs(x - y) / abs(y) for x, y in zip(a, other, strict=True))
        if not gap <= CURVE_BOUND:
            found.append(f"losses are {gap:.1e} from {name} (bound {CURVE_BOUND:g})")
    return found


def _scalars(a: object, b: object, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        now, then = getattr(a, name), getattr(b, name)
        if now != then:
            yield f"{name} {now}, committed {then}"


def _of_ranks(new: Measured, old: Measured) -> Iterator[str]:
    yield from _scalars(new, old, ("steps",))
    if len(new.ranks) != len(old.ranks):
        yield f"{len(new.ranks)} ranks, committed {len(old.ranks)}"
        return
    for number, (a, b) in enumerate(zip(new.ranks, old.ranks, strict=True)):
        names = [n for n in msgspec.structs.asdict(a) if n not in OF_AN_ALLOCATOR]
        yield from (f"rank {number}: {line}" for line in _scalars(a, b, names))


def _of_steps(
    new: Measured | Observed, old: Measured | Observed, names: Sequence[str], bound: float
) -> Iterator[str]:
    """Losses and norms of gradients, step by step."""
    for name in names:
        now, then = getattr(new, name), getattr(old, name)
        if len(now) != len(then):
            yield f"{name} of {len(now)} steps, committed {len(then)}"
        elif any(abs(a - b) > bound * abs(b) for a, b in zip(now, then, strict=True)):
            yield f"{name} {now}, committed {then} (bound {bound:g})"


def _of_verdict(new: Measured, old: Measured) -> Iterator[str]:
    """Against another method: lossless or not."""
    a, b = new.comparison, old.comparison
    if a is None or b is None:
        if a != b:
            yield "only one of the two is compared with another method"
        return
    yield from _scalars(a, b, ("against", "bound", "first_only", "lossless"))
