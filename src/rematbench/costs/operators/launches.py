"""The number of kernels that the operators of experts launch, by dispatcher.

Source: Megatron-core 0.16.1, core/transformer/moe, from traces of its layers on fake tensors.
"""

from typing import NamedTuple

from rematbench.costs.operators.builder import Builder
from rematbench.costs.operators.kernels import Elementwise
from rematbench.costs.operators.ops import OpTable
from rematbench.inputs.system import Kernels
from rematbench.workload import Workload

COUNTS = "expert_counts"


class Launches(NamedTuple):
    """The number of torch operators that launch a kernel, in an operator's forward and backward."""

    forward: int
    backward: int


ROUTER = {False: Launches(10, 8), True: Launches(3, 5)}
"""Launches of a router without its GEMMs, by the fact `fused_router`: casts of the gate, and top-k,
softmax and the scatters of probabilities and map (one kernel if fused)."""
ROUTER_LOSS = {False: Launches(15, 8), True: Launches(8, 5)}
"""Launches that a balancing loss adds: scores, sums, coefficients, and an entry in a tracker."""
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
"""Launches by dispatcher.  `alltoall` is traced (tests/baselines/test_launches.py), plus five
copies of counts to the host, which a trace on fake tensors omits (_maybe_dtoh_and_synchronize);
fused permutations launch as many kernels.  The other counts are read from the source
(token_dispatcher.py): allgather permutes the gathered rows and selects their probabilities; DeepEP
makes a map and its probabilities from indices in 13 operators (_indices_to_multihot) before a
permutation; HybridEP permutes inside its exchange."""
FUSED_INDICES = {"deepep": Launches(7, 3)}
"""Launches of `sort` if one kernel makes the map and its probabilities (`fused_indices`)."""


def launches_of(b: Builder, name: str) -> Launches:
    """The launches of an operator under the stack's dispatcher. If ranks exchange no tokens, every
    dispatcher has the launches of `alltoall`."""
    facts = b.system.experts
    alone = b.ep == 1 and (facts.dispatcher != "allgather" or b.expert_tp == 1)
    dispatcher = "alltoall" if alone else facts.dispatcher
    if name == "sort" and facts.fused_indices and dispatcher in FUSED_INDICES:
        return FUSED_INDICES[dispatcher]
    return LAUNCHES[dispatcher].get(name, Launches(1, 1))


def copies_of(
    b: Builder, name: str, nbytes: int, backward_bytes: int | None = None
) -> tuple[tuple[Elementwise], tuple[Elementwise]]:
    """The (forward, backward) kernels of an operator that copies rows. `nbytes`: bytes that the
    forward reads and writes; the backward moves as many unless `backward_bytes` is given."""
    forward, backward = launches_of(b, name)
    again = nbytes if backward_bytes is None else backward_bytes
    return (Elementwise(nbytes, forward),), (Elementwise(again, backward),)


BESIDE_ATTENTION = ("shared_fc1", "shared_act", "shared_fc2")
"""The operators of the shared expert. Megatron-core runs them together with attention if experts'
exchanges overlap another micro-batch (core/models/gpt/fine_grained_callables.py), and captures them
in the router's CUDA graph."""


def captures_experts(kernels: Kernels, work: Workload) -> bool:
    """Whether CUDA graphs capture grouped experts, whose kernels the host then does not issue."""
    scope = kernels.cuda_graphs
    whole = scope == "layer" and work.expert_padding != "none"
    return whole or kernels.captures_iteration or "moe" in scope.split(",")


def uncaptured(kernels: Kernels, work: Workload, table: OpTable) -> frozenset[str]:
    """The operators of a layer that no CUDA graph of the layer or of its parts captures. A graph of
    a whole layer ends after the count of experts' tokens, because the host reads sizes there,
    unless experts are padded. Source: Megatron-core 0.16.1, transformer_layer.py,
    _te_cuda_graph_capture and _get_submodules_under_cudagraphs."""
    names, scope = [op.name for op in table.ops], kernels.cuda_graphs
    routed = COUNTS in names
    if scope in ("none", "full_iteration"):
        return frozenset(names)
    if scope == "layer":
        sized = not routed or captures_experts(kernels, work)
        return frozenset(() if sized else names[names.index(COUNTS) + 1 :])
    ends = names.index("attn_add") + 1
    parts = {"attn": names[:ends], "moe" if routed else "mlp": names[ends:]}
    if routed:
        parts["moe_router"] = [*names[ends : names.index(COUNTS)], *BESIDE_ATTENTION]
        parts["moe_preprocess"] = [COUNTS, "permute"]
    return frozenset(names).difference(*(parts.get(part, ()) for part in scope.split(",")))
