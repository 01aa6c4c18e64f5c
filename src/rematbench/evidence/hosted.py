"""Published steps with optimizer states in host memory (results/published/offloaded_states.csv:
DeepSpeed, TwinFlow's ratio, Deep Optimizer States): their phases, updates and host bytes.  The
constants of config/ are fitted to them again by tests (tests/evidence/published/test_hosted.py)."""

from collections import defaultdict
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from msgspec.structs import replace

from rematbench.costs.states import shard, sub_groups, zero3_host_states
from rematbench.engine.lowering.lower import lower
from rematbench.engine.lowering.states.host_states import rank_tensors
from rematbench.engine.lowering.states.state_pieces import piece_widths, update_block
from rematbench.engine.program.program import Program, RankProgram, Step
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evidence.published.row_cases import PublishedCase, read_case
from rematbench.evidence.published.sheets import Cell, Row, whole
from rematbench.evidence.published.words import committed, said
from rematbench.host.table import GIB
from rematbench.inputs.load import load_cluster
from rematbench.plan import Pieces, Place, Plan
from rematbench.plugins.discover import discover
from rematbench.problem import Problem
from rematbench.solve.state_pieces import placed

HOSTED = "offloaded_states.csv"
SERIAL, INTERLEAVED = "one after another", "interleaved"
"""The sheet's tables: the host updates pieces one after another, or the device updates some pieces
in between (Deep Optimizer States)."""
AT_ONCE = 1e21
"""A host rate (parameters/s) so high that an update takes no time."""


class HostKind(NamedTuple):
    """A kind of node of the sheet, and the number of its ranks. Ranks share the cores of a node
    unless they are bound to cores, so each number of ranks has a host rate of its own."""

    cluster: str
    ranks: int


class Phases(NamedTuple):
    """The seconds that a step spends in all of its forwards and in all of its backwards, and the
    seconds of the step."""

    forward_s: float
    backward_s: float
    step_s: float

    @property
    def update_s(self) -> float:
        """Seconds of the step after its last backward."""
        return self.step_s - self.forward_s - self.backward_s


@cache
def hosted_cases() -> tuple[tuple[Cell, PublishedCase], ...]:
    """The rows of HOSTED whose node has a cluster file, each with its case."""
    registry = discover()
    return tuple((row, read_case(row, registry)) for row in committed(HOSTED) if row["cluster"])


def kind_of(case: PublishedCase) -> HostKind:
    assert case.hosted is not None
    return HostKind(case.hosted.node, case.hosted.ranks)


def is_update_fitted(row: Row) -> bool:
    """Whether a host rate is fitted to a row: all states on the host, blocking copies of gradients,
    and no pieces that the device updates."""
    return row["variant"] == "deepspeed_blocking" and float(row["host_ratio"]) == 1


def is_host_fitted(row: Row) -> bool:
    """Whether a node's `host_other_bytes` is fitted to this row: its model is the smallest of the
    node's rows."""
    return whole(row, "parameters") == _smallest()[node_file(row)]


def node_file(row: Row) -> str:
    return str(said(row).job.get("cluster", row["cluster"]))


def rate_of(row: Row) -> HostKind:
    """The kind of node whose host rate predicts a row's update."""
    return kind_of(read_case(row, discover()))


@cache
def _smallest() -> dict[str, int]:
    found: dict[str, int] = {}
    for row, case in hosted_cases():
        if row["table"] == SERIAL:
            name, count = str(case.cluster), whole(row, "parameters")
            found[name] = min(count, found.get(name, count))
    return found


def states_bytes(case: PublishedCase) -> int:
    """Host bytes of the states of all ranks of a node, between two steps."""
    assert case.hosted is not None
    problem = case.problem()
    layout, tensors = problem.layout, rank_tensors(problem, problem.base_plan, 0)
    states = zero3_host_states(tensors, layout.dp, problem.system, share=case.hosted.share)
    return states.held * layout.gpus // case.hosted.nodes


def at_rate(case: PublishedCase, rate: float) -> PublishedCase:
    """The case on a node whose ranks, at this number, update `rate` parameters/s."""
    cluster = load_cluster(str(case.cluster))
    whole_node = rate * cluster.gpus_per_node / kind_of(case).ranks
    return case.changed(cluster=replace(cluster, host_update_parameters_per_s=whole_node))


def timed(case: PublishedCase) -> PublishedCase:
    """The case on a node with the fitted rate of its kind; unchanged if no rate is fitted."""
    rate = fitted_rates().get(kind_of(case))
    return at_rate(case, rate) if rate else case


def placed_states(case: PublishedCase, problem: Problem) -> tuple[Plan, int]:
    """The base plan with the states of a case in host memory, and the parameters of a rank's share.
    Ratio and interleave count sub-groups; a piece is as large as their mean."""
    assert case.hosted is not None
    shards = problem.layout.state_shards
    parts = [shard(count, shards) for count in rank_tensors(problem, problem.base_plan, 0)]
    count, groups = sum(parts), len(sub_groups(parts, problem.system.zero.sub_group_parameters))
    resident, every = int((1.0 - case.hosted.share) * groups), case.hosted.interleave
    hosted: list[Place] = [
        "visit" if every and at % every == every - 1 else "host" for at in range(groups - resident)
    ]
    places = (*["device"] * resident, *hosted)
    pieces = Pieces(size=-(-count // groups), places=places, slots=1 if every else 0)  # type: ignore[arg-type]
    return placed(problem, problem.base_plan, pieces, gradients=True), count


def update_s(case: PublishedCase) -> float:
    problem = case.problem()
    plan, count = placed_states(case, problem)
    optimizer = plan.state("optimizer")
    block = update_block(optimizer.cut(count), optimizer.pieces, piece_widths(plan, problem))
    program = Program(ranks=(RankProgram(rank=0, blocks=(block,), steps=(Step(0, 0, 0),)),))
    return simulate(program, action_seconds(problem, program)).step_s


@cache
def fitted_rates() -> dict[HostKind, float]:
    """Parameters/s that the ranks of each kind of node update: the median over its fitted rows.
    The seconds of casts, copies and resident pieces are subtracted from a published update
    first."""
    found: dict[HostKind, list[float]] = defaultdict(list)
    for row, case in hosted_cases():
        if is_update_fitted(row):
            count = placed_states(case, case.problem())[1]
            seconds = float(row["update_s"]) - update_s(at_rate(case, AT_ONCE))
            found[kind_of(case)].append(count * kind_of(case).ranks / seconds)
    return {kind: median(rates) for kind, rates in found.items()}


def phases(problem: Problem, plan: Plan) -> Phases:
    """The simulated phases of a plan without a pipeline.  A phase ends when its last action on the
    compute stream ends, so its waits count as parts of it."""
    program = lower(plan, problem)
    simulation = simulate(program, action_seconds(problem, program), record=True)
    ends: dict[tuple[str, int], float] = {}
    for one in simulation.intervals:
        if one.stream == "compute":
            pass_ = (one.block, one.micro_batch)
            ends[pass_] = max(ends.get(pass_, 0.0), one.end_s)
    seconds, before = {"F": 0.0, "B": 0.0}, 0.0
    for (block, _), end in ends.items():
        if block in seconds:
            seconds[block] += end - before
        before = end
    return Phases(seconds["F"], seconds["B"], simulation.step_s)


def printed(case: PublishedCase, problem: Problem, plan: Plan) -> dict[str, Any]:
    """The pred_* columns of PRINTED for a case with states in host memory."""
    found: dict[str, Any] = {}
    if "update_s" in case.prints:
        seconds = phases(problem, plan)
        found = {f"pred_{name}": getattr(seconds, name) for name in ("forward_s", "backward_s")}
        found["pred_update_s"] = update_s(case)
    if "host_used_gib" in case.prints:
        other = problem.cluster.host_other_bytes or 0
        found["pred_host_used_gib"] = (states_bytes(case) + other) / GIB
    return found
