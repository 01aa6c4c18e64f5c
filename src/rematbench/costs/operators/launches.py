"""The kernels that the operators of experts launch, by dispatcher.

Source: Megatron-core 0.16.1, core/transformer/moe, from traces of its layers on fake tensors.
"""

from typing import NamedTuple

from rematbench.costs.operators.builder import Builder

COUNTS = "expert_counts"


class Launches(NamedTuple):
    """Torch operators that launch a kernel in the forward and the backward of an operator."""

    forward: int
    backward: int


ROUTER = {False: Launches(10, 8), True: Launches(3, 5)}
"""Launches of a router beside its GEMMs, by the fact `fused_router`: casts of the gate; top-k,
softmax and the scatters of probabilities and map, or one kernel for these."""
ROUTER_LOSS = {False: Launches(15, 8), True: Launches(8, 5)}
"""What a balancing loss adds: its scores, sums, coefficients and its entry in a tracker."""
LAUNCHES: dict[str, dict[str, Launches]] = {
    "alltoall": {
        COUNTS: Launches(11, 0),
        "permute": Launches(6, 5),
        "sort": Launches(2, 2),
        "unsort": Launches(1, 1),
        "unpermute": Launches(2, 1),
    },
    "allgather": {COUNTS: Launches(2, 0), "sort": Launches(12, 6), "unsort": Launches(2, 1)},
    "deepep": {COUNTS: Launches(3, 0), "sort": Launches(19, 8), "unsort": Launches(2, 1)},
    "hybridep": {COUNTS: Launches(2, 0), "sort": Launches(1, 1), "unsort": Launches(1, 1)},
}
"""Launches by dispatcher.  `alltoall`: traced (tests/baselines/test_launches.py), and five copies
of counts to the host, which a trace on fake tensors leaves out (_maybe_dtoh_and_synchronize); fused
permutations launch as many kernels.  The others by their source (token_dispatcher.py): allgather
permutes the gathered rows and selects their probabilities; DeepEP's indices become a map and its
probabilities through 13 operators (_indices_to_multihot) before a permutation; HybridEP permutes
inside its exchange."""
FUSED_INDICES = {"deepep": Launches(7, 3)}
"""Launches of `sort` where one kernel makes the map and its probabilities (`fused_indices`)."""


def launches_of(b: Builder, name: str) -> Launches:
    """The launches of an operator under the stack's dispatcher; on ranks that exchange nothing
    every dispatcher permutes as `alltoall`."""
    facts = b.system.experts
    alone = b.ep == 1 and (facts.dispatcher != "allgather" or b.expert_tp == 1)
    dispatcher = "alltoall" if alone else facts.dispatcher
    if name == "sort" and facts.fused_indices and dispatcher in FUSED_INDICES:
        return FUSED_INDICES[dispatcher]
    return LAUNCHES[dispatcher].get(name, Launches(1, 1))
