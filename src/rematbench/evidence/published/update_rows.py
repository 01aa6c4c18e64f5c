"""Published and predicted seconds of optimizer updates with states in host memory
(results/published/offloaded_states.csv): DeepSpeed, TwinFlow's ratio, Deep Optimizer States."""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from rematbench.costs.states import shard, sub_groups
from rematbench.engine.lowering.states.host_states import rank_tensors
from rematbench.engine.lowering.states.state_pieces import piece_widths, update_block
from rematbench.engine.program.program import Program, RankProgram, Step
from rematbench.engine.simulate.op_level import simulate
from rematbench.engine.simulate.seconds import action_seconds
from rematbench.evidence.published.host_rows import NODES, node_count, row_problem
from rematbench.evidence.published.sheets import Cell, read_sheet, whole
from rematbench.inputs.paths import data_dir
from rematbench.plan import Pieces, Place, Plan
from rematbench.problem import Problem
from rematbench.solve.state_pieces import placed

SERIAL, INTERLEAVED = "one after another", "interleaved"
AT_ONCE = 1e21
"""A host rate at which an update takes no time."""


class HostKind(NamedTuple):
    """A node of the sheet and the number of its ranks.  Ranks that are not bound to cores share
    them, so each number of ranks has a rate."""

    cluster: str
    ranks: int


class Parts(NamedTuple):
    """Seconds of the parts of a published update: what the host's pieces take one after another,
    the copies up of visits, and the published seconds of the whole update."""

    serial_s: float
    visits_s: float
    published_s: float


def sheet_rows() -> list[Cell]:
    """The rows of named nodes with a published update."""
    sheet = read_sheet(data_dir("published") / "offloaded_states.csv")
    return [row for row in sheet if row["cluster"] in NODES and row["update_s"]]


def kind_of(row: Cell) -> HostKind:
    """The node of a row, and its ranks on a node."""
    return HostKind(row["cluster"], whole(row, "gpus") // node_count(row))


def is_fitted(row: Cell) -> bool:
    """Whether a host rate is fitted to a row: all states on the host, blocking copies of gradients,
    no visits."""
    return row["variant"] == "deepspeed_blocking" and row["host_ratio"] == "1"


def at_rate(row: Cell, rate: float) -> Problem:
    """The problem of a row on a node whose ranks, at this number, update `rate` parameters/s."""
    given = row_problem(row)
    ranks = kind_of(row).ranks
    whole_node = rate * given.cluster.gpus_per_node / ranks
    cluster = replace(given.cluster, host_update_parameters_per_s=whole_node)
    return type(given)(
        given.workload, cluster, given.system, given.layout, given.calibration, "unfused"
    )


def plan_of(row: Cell, given: Problem) -> tuple[Plan, int]:
    """The plan of a row and the parameters of a rank's share.  Ratio and interleave count
    sub-groups; a piece is as large as their mean."""
    shards = given.layout.state_shards
    parts = [shard(count, shards) for count in rank_tensors(given, given.base_plan, 0)]
    count, groups = sum(parts), len(sub_groups(parts, whole(row, "subgroup_parameters")))
    resident = int((1.0 - float(row["host_ratio"])) * groups)
    every = int(row["update_interleave"] or 0)
    hosted: list[Place] = [
        "visit" if every and at % every == every - 1 else "host" for at in range(groups - resident)
    ]
    places = (*["device"] * resident, *hosted)
    pieces = Pieces(size=-(-count // groups), places=places, slots=1 if every else 0)  # type: ignore[arg-type]
    return placed(given, given.base_plan, pieces, gradients=True), count


def update_s(row: Cell, rate: float) -> float:
    """Predicted seconds of a row's update at a rate of the node's ranks."""
    given = at_rate(row, rate)
    plan, count = plan_of(row, given)
    optimizer = plan.state("optimizer")
    block = update_block(optimizer.cut(count), optimizer.pieces, piece_widths(plan, given))
    program = Program(ranks=(RankProgram(rank=0, blocks=(block,), steps=(Step(0, 0, 0),)),))
    return simulate(program, action_seconds(given, program)).step_s


@cache
def fitted_rates() -> dict[HostKind, float]:
    """Parameters/s that the ranks of each kind of node update: the median over its fitted rows of
    what is left without casts, copies and resident pieces."""
    found: dict[HostKind, list[float]] = defaultdict(list)
    for row in filter(is_fitted, sheet_rows()):
        count = plan_of(row, row_problem(row))[1]
        seconds = float(row["update_s"]) - update_s(row, AT_ONCE)
        found[kind_of(row)].append(count * kind_of(row).ranks / seconds)
    return {kind: median(rates) for kind, rates in found.items()}


def fitted_shares(rows: Sequence[Cell] | None = None) -> tuple[float, float]:
    """(host_beside_share, visit_delay_share): the shares of serial seconds and of visits' copies
    that add up to the updates of Deep Optimizer States, by least squares of relative errors."""
    parts = [_parts(row) for row in rows or sheet_rows() if row["variant"] == "dos"]
    ratios = np.array([(p.serial_s / p.published_s, p.visits_s / p.published_s) for p in parts])
    found, *_ = np.linalg.lstsq(ratios, np.ones(len(parts)), rcond=None)
    return float(found[0]), float(found[1])


def _parts(row: Cell) -> Parts:
    given = at_rate(row, fitted_rates()[kind_of(row)])
    plan, count = plan_of(row, given)
    counts, cost = plan.state("optimizer").counts(count), given.cost
    serial_s = cost.host_update_s(counts["host"]) + cost.host_cast_s(counts["host"])
    serial_s += cost.copy_s(given.system.states.param_bytes * counts["host"], "h2d")
    visits_s = cost.copy_s(given.system.states.optimizer_bytes * counts["visit"], "h2d")
    return Parts(serial_s, visits_s, float(row["update_s"]))


@cache
def update_rows() -> tuple[dict[str, Any], ...]:
    """The rows of named nodes with `pred_update_s`, `table` (whether pieces follow one another or
    are interleaved with visits), `pred_rate` (parameters/s that the node's ranks update) and
    `update_fitted` (whether that rate was fitted to the row)."""
    rates = fitted_rates()
    return tuple(
        {
            **row,
            "table": INTERLEAVED if row["variant"] == "dos" else SERIAL,
            "pred_rate": rates[kind_of(row)],
            "pred_update_s": update_s(row, rates[kind_of(row)]),
            "update_fitted": is_fitted(row),
        }
        for row in sheet_rows()
    )
