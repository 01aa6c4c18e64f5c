"""karma: swap the layers whose copies are hidden by compute, and recompute the other layers.

Claim: recomputation between swaps keeps a GPU busy while layers are copied back, so training beyond
the device's memory runs 1.52x faster on average than with earlier methods (convolutional networks).
Source: Wahib et al., KARMA, SC 2020 (arXiv 2008.11421), its abstract. Blocks of layers stay on the
device, are copied to the host, or are recomputed during copies; a model of stalls chooses.
Deviations: the equations could not be read, so the formulation is ours. A block is one layer. The
last layers of each chunk stay, as many as fit. The other layers are decided from the last to the
first. A layer is swapped if its copy out is hidden by forwards, and its copy back by backwards and
rebuilds, of later layers that hide no other copy; if not, it is recomputed. If all layers are
equal, the swapped share is min(1, t_forward / t_copy), like memo's share of tokens, and a layer
takes t_forward (t_copy - t_forward) / t_copy longer; with stalls it would take t_copy - t_forward
longer. Weights, gradients and the update stay on the device (the paper's distributed part moves
them, too), and the choice ignores the size of host memory.
"""

from itertools import pairwise
from math import fsum
from typing import ClassVar, Literal

from msgspec import Struct
from msgspec.structs import replace

from rematbench.method import (
    Fate,
    NonNegativeInt,
    Offload,
    Plan,
    Problem,
    Recompute,
    Transfers,
    Unsupported,
)
from rematbench.solve.kept import (
    holding_inputs,
    kept_activations,
    no_offload,
    refused_in_pieces,
    rule_of,
    smallest_fitting,
    with_live_rules,
)
from rematbench.solve.layer_costs import backward_s, forward_s
from rematbench.solve.recompute_modules import chunks_of

Word = Literal["stay", "swap", "redo"]


class Karma(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`resident`: the number of last layers of each chunk that stay (None: as many as fit)."""

    name: ClassVar[str] = "karma"
    planner: ClassVar[bool] = True
    resident: NonNegativeInt | None = None

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        nothing = "" if kept_activations(problem, base) else "the base keeps no activation to swap"
        if reason := no_offload(problem) or nothing:
            return Unsupported(reason)
        longest = max(map(len, chunks_of(base)))
        if reason := refused_in_pieces(problem, self.at(problem, base, longest)):
            return Unsupported(reason)
        if self.resident is not None:
            return self.at(problem, base, longest - self.resident).noting(bound="given")
        leaving = smallest_fitting(problem, lambda n: self.at(problem, base, n), longest)
        bound = "no choice fits the device memory" if leaving is None else "device ledger"
        return self.at(problem, base, longest if leaving is None else leaving).noting(bound=bound)

    def at(self, problem: Problem, base: Plan, leaving: int) -> Plan:
        """The plan in which the last layers of every chunk stay on the device, except at most
        `leaving` layers of the longest chunk."""
        longest = max(map(len, chunks_of(base)))
        swapped: list[int] = []
        rebuilt: list[int] = []
        ahead = 1
        for chunk in chunks_of(base):
            fates = _fates(problem, base, chunk, max(0, len(chunk) - longest + leaving))
            places = [at for at, fate in enumerate(fates) if fate == "swap"]
            ahead = max([ahead, *(b - a for a, b in pairwise(places))])
            swapped += [chunk[at] for at in places]
            rebuilt += [chunk[at] for at, fate in enumerate(fates) if fate == "redo"]
        return _moved(problem, base, tuple(swapped), tuple(rebuilt), ahead)


def _fates(problem: Problem, base: Plan, chunk: tuple[int, ...], leaving: int) -> list[Word]:
    """What happens to a chunk's layers. Of the first `leaving`, those whose two copies are hidden
    are swapped, and the others are recomputed; the last layers stay."""
    kept = kept_activations(problem, base)
    fates: list[Word] = []
    out_s = back_s = 0.0  # the layers above can hide further copies for this time
    for position in range(len(chunk) - 1, -1, -1):
        table = problem.layer(chunk[position])
        sizes = [table.activations[name].nbytes for name in kept if name in table.activations]
        copy_out = fsum(problem.cost.copy_s(size, "d2h") for size in sizes)
        copy_back = fsum(problem.cost.copy_s(size, "h2d") for size in sizes)
        again_s = 0.0
        if position >= leaving:
            fates.append("stay")
        elif copy_out <= out_s and copy_back <= back_s:
            fates.append("swap")
            out_s, back_s = out_s - copy_out, back_s - copy_back
        else:
            fates.append("redo")
            again_s = forward_s(problem, table)
        out_s += forward_s(problem, table)
        back_s += backward_s(problem, table) + again_s
    return fates[::-1]


def _moved(
    problem: Problem, base: Plan, swapped: tuple[int, ...], rebuilt: tuple[int, ...], ahead: int
) -> Plan:
    """The base with the `swapped` layers copied back `ahead` layers early, and the `rebuilt` layers
    recomputed from their inputs."""
    inner = tuple(sorted(kept_activations(problem, base) - {"layer_input"}))
    if rebuilt:
        base = holding_inputs(problem, base, inner, whole=True)
    every = tuple(sorted(kept_activations(problem, base) | set(base.held)))
    fates: tuple[tuple[tuple[int, ...], tuple[str, ...], Fate], ...] = (
        (swapped, every, Offload()),
        (rebuilt, inner, Recompute(scope="layer", whole=True)),
    )
    rules = [rule_of(names, fate, layers) for layers, names, fate in fates if layers and names]
    made = with_live_rules(problem, base, *rules)
    if not swapped:
        return made
    return replace(made, transfers=Transfers(granularity="layer", prefetch_layers=ahead))
