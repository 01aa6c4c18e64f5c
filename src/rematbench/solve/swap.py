"""The largest share of a layer's tokens that can be offloaded to the host, by two closed forms."""

from collections.abc import Sequence

from msgspec import Struct

from rematbench.costs.operators.ops import OpTable
from rematbench.engine.lowering.states.host_states import host_states
from rematbench.plan import Plan
from rematbench.problem import Problem
from rematbench.solve.layer_costs import forward_s, layers_in_flight

PROBE_BYTES = 1 << 30


class SwapShare(Struct, frozen=True, kw_only=True):
    """A share of tokens (`alpha`), the shares that the two constraints allow (above 1: the
    constraint does not bind), and the name of the binding constraint."""

    alpha: float
    alpha_bandwidth: float
    alpha_host: float
    bound: str


def swap_share(
    problem: Problem,
    base: Plan,
    *,
    whole: Sequence[str],
    other: Sequence[str],
    layers: Sequence[int],
    host_bytes: int | None,
    given: float | None = None,
) -> SwapShare:
    """The largest alpha, in whole rows, for which a layer's copies hide and fit the host.

    The copies of S_whole + alpha S_other of a layer must hide behind the layer's forward, and the
    offloaded tensors of all layers in flight must fit a GPU's share of host memory.  `given`: the
    alpha to use instead.
    """
    tables = problem.layer_kinds
    bandwidth = min(_hidden_share(problem, table, whole, other) for table in tables)
    in_flight = max(
        layers_in_flight(problem, base, rank, layers) for rank in range(problem.layout.pp)
    )
    each = _host_share(problem, base, host_bytes) / in_flight
    host = min(_fitting_share(each, table, whole, other) for table in tables)
    if given is not None:
        return SwapShare(alpha=given, alpha_bandwidth=bandwidth, alpha_host=host, bound="given")
    alpha = min(1.0, max(0.0, min(bandwidth, host)))
    found = [table.activations[n].rows for table in tables for n in other if n in table.activations]
    rows = min(found, default=1)
    return SwapShare(
        alpha=int(alpha * rows + 1e-9) / rows,
        alpha_bandwidth=bandwidth,
        alpha_host=host,
        bound=_bound(bandwidth, host),
    )


def _bound(bandwidth: float, host: float) -> str:
    if min(bandwidth, host) >= 1.0:
        return "nothing"
    name = "host memory" if host <= bandwidth else "PCIe bandwidth"
    short = " (exceeded even with alpha 0)" if min(bandwidth, host) < 0 else ""
    return name + short


def _bytes(table: OpTable, names: Sequence[str]) -> int:
    return sum(table.activations[name].nbytes for name in names if name in table.activations)


def _fitting_share(
    room: float, table: OpTable, whole: Sequence[str], other: Sequence[str]
) -> float:
    """The alpha at which a layer's offloaded tensors take `room` bytes of host memory."""
    left, free = room - _bytes(table, whole), _bytes(table, other)
    return left / free if free else float(left >= 0)


def _hidden_share(
    problem: Problem, table: OpTable, whole: Sequence[str], other: Sequence[str]
) -> float:
    """The alpha at which a layer's copies take as long as its forward."""
    copies = len(whole) + len(other)
    latency = problem.cost.copy_s(0, "d2h")
    bytes_per_s = PROBE_BYTES / (problem.cost.copy_s(PROBE_BYTES, "d2h") - latency)
    hidden = (forward_s(problem, table) - copies * latency) * bytes_per_s
    free = _bytes(table, other)
    return (hidden - _bytes(table, whole)) / free if free else 1.0


def _host_share(problem: Problem, base: Plan, host_bytes: int | None) -> float:
    cluster, layout = problem.cluster, problem.layout
    share = (host_bytes or problem.cost.host_room_bytes) / min(cluster.gpus_per_node, layout.gpus)
    if host_bytes is not None:
        return share
    return share - max(host_states(problem, base, rank).held for rank in range(layout.pp))
