"""Breakdown of a step's time: compute, recomputation, the pipeline's bubble, and the exposed
seconds of the host, of copies and of communication.

The *exposed* seconds of a cause are the seconds by which the step gets shorter when the cause takes
no time.  Causes are removed one after another, so the parts add up to the step: first the host,
then each kind of traffic in the order of TRAFFIC, together with its slowdown of overlapping
kernels.  What remains is the busiest rank's compute and its idle time, the bubble."""

from collections.abc import Hashable, Mapping
from math import fsum

from msgspec.structs import replace

from rematbench.engine.program.action import HOST_UPDATE, Action, Kind
from rematbench.engine.program.program import Program
from rematbench.engine.simulate.max_plus import simulate_chunks
from rematbench.engine.simulate.op_level import ORDERING, RankedSeconds, Seconds, Simulation, Timing
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.problem import Problem

TRAFFIC: dict[str, frozenset[str]] = {
    "copies": frozenset({"d2h", "h2d", HOST_UPDATE}),
    "pp": frozenset({"pp_send", "pp_recv"}),
    "dp": frozenset({"dp"}),
    "ep": frozenset({"ep"}),
    "cp": frozenset({"cp"}),
    "tp": frozenset({"tp"}),
}
"""Streams by kind of traffic, in the order of their removal.  Copies come first, because methods
add them.  Updates in host memory count as copies, because they run between copies."""

ROUNDING = 1e-12
"""The share of a step by which sums may differ if their terms are added in another order."""

# Why: docs/decisions/evaluate.md, How is a step taken apart?
PARTS = ("compute", "recompute", "bubble", *TRAFFIC, "host")

MIN_SHARE, MAX_PARTS = 0.01, 3
"""The smallest share of a step that `losses` names, and how many parts it names at most."""


def parts_of(problem: Problem, program: Program, step_s: float) -> dict[str, float]:
    """Return the seconds of the step by part (PARTS).  They add up to `step_s`, the program's
    chunk-level step."""
    seconds = action_seconds(problem, program)
    spared: frozenset[str] = frozenset()
    used = {
        stream
        for block, _ in program.block_runs
        for action, _ in block.counted()
        for stream in (action.stream, action.exchange.overlaps)
    }
    found = {"host": host_wait_s(seconds, program, step_s)}
    before, simulation = step_s - found["host"], None
    for name, streams in TRAFFIC.items():
        if used.isdisjoint(streams):
            found[name] = 0.0
            continue
        spared |= streams
        simulation = simulate_chunks(program, WithoutTraffic(seconds, spared))
        found[name] = before - simulation.step_s
        before = simulation.step_s
    left = WithoutTraffic(seconds, spared)
    alone = simulation or simulate_chunks(program, left)
    busy, rank = busiest(alone)
    again = _recompute_s(program, rank, left)
    # `before` and `busy` add the same seconds in different orders, so rounding is ignored.
    bubble = before - busy if before - busy > ROUNDING * step_s else 0.0
    return {"compute": busy - again, "recompute": again, "bubble": bubble, **found}


def losses(shares: Mapping[str, float]) -> str:
    """Return the largest parts of a step apart from compute, as text.  `shares`: fractions of the
    step by part."""
    found = [(share, part) for part, share in shares.items() if part != "compute"]
    named = sorted((pair for pair in found if pair[0] >= MIN_SHARE), reverse=True)
    return ", ".join(f"{part} {100 * share:.0f} %" for share, part in named[:MAX_PARTS])


def host_wait_s(seconds: RankedSeconds, program: Program, step_s: float) -> float:
    """Return the exposed seconds of the hosts: by how much the step is shorter if hosts take no
    time."""
    return step_s - simulate_chunks(program, WithoutTraffic(seconds, frozenset())).step_s


class WithoutTraffic:
    """The costs of a machine whose hosts take no time, and on which the traffic of `streams` takes
    no time and slows no kernel."""

    def __init__(self, seconds: RankedSeconds, streams: frozenset[str]) -> None:
        self.seconds, self.streams = seconds, streams

    def __call__(self, action: Action, rank: int) -> float:
        if action.stream in self.streams:
            return 0.0
        exchange = action.exchange
        comm = exchange.comm
        if action.kind is Kind.STALL and comm is not None and comm.stream in self.streams:
            return 0.0
        if exchange.overlaps in self.streams:
            action = replace(action, exchange=replace(exchange, overlaps=""))
        return self.seconds.timing(action, rank).seconds

    def timing(self, action: Action, rank: int) -> Timing:
        """Return the seconds on the stream; the host takes no time and waits for no action."""
        return Timing(0.0 if action.kind in ORDERING else self(action, rank), 0.0, held=False)

    def alike(self, rank: int) -> Hashable:
        """Return the key of the costs with all traffic.  Ranks with equal keys also have equal
        costs here."""
        return self.seconds.alike(rank)


def busiest(simulation: Simulation) -> tuple[float, int]:
    """Return (busy seconds, rank) of the rank whose compute stream works longest."""
    ranks = range(len(simulation.rank_end_s))
    return max((simulation.busy_s(rank, "compute"), rank) for rank in ranks)


def _recompute_s(program: Program, rank: int, seconds: Seconds) -> float:
    own = program.ranks[rank]
    return fsum(
        seconds(action, rank) * runs * count
        for block, runs in zip(own.blocks, own.runs, strict=True)
        for action, count in block.counted()
        if action.kind is Kind.RECOMPUTE
    )
