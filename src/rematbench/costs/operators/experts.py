"""The operators of a mixture of experts, as Megatron-core's dispatchers run them.

All experts receive equally many tokens ("balanced"), or the experts of the worst rank receive
`imbalance` times the mean. A capacity limits the tokens that an expert takes from each rank. With
padding an expert takes exactly its capacity; sizes are then known in advance, so ranks gather no
counts and the host waits for none. Router probabilities scale the activation inside an expert, so
the second GEMM's output is not saved. Source: Megatron-core 0.16.1, core/transformer/moe:
router.py, token_dispatcher.py, moe_utils.py, experts.py; saved bytes and launches from traces of
its layers on fake tensors.
"""

from math import ceil

from rematbench.costs.operators.builder import FP32, Builder
from rematbench.costs.operators.kernels import Elementwise, Gemm
from rematbench.costs.operators.launches import (
    COUNTS,
    ROUTER,
    ROUTER_LOSS,
    Launches,
    copies_of,
    launches_of,
)
from rematbench.costs.operators.ops import Comm, Group, memory_kernel
from rematbench.inputs.layout import Layout
from rematbench.inputs.shapes import reached_share
from rematbench.workload import Experts

INDEX = 8
Copied = tuple[tuple[Elementwise], tuple[Elementwise]]
"""Kernels of copies, forward and backward."""
ONCE = ("deepep", "hybridep")
"""Dispatchers that send a token once to each rank with some of its experts; the rank sums their
outputs."""
HELD = ("permuted", "dispatched")
"""The sent and the received tokens, which variables of a layer's forward hold until its end
(moe_layer.py, hidden_states and dispatched_input)."""
ROUTED = frozenset(
    (
        *("router", COUNTS, "permute", "dispatch", "sort", "expert_fc1", "expert_act"),
        *("expert_fc2", "unsort", "combine", "unpermute"),
    )
)
"""The operators whose launches take `expert_pace` (config/calibration.yaml) times as long."""


def add_experts(b: Builder, layout: Layout, experts: Experts, x: str, out: str) -> None:
    """Add the mixture of experts from the tensor `x` to `out` (sequence-parallel region)."""
    routed = out if not experts.shared_ffn else "routed_out"
    _route(b, experts, x)
    _count(b, layout, experts)
    if b.system.experts.dispatcher == "allgather" and layout.ep * layout.expert_tp > 1:
        ranks = layout.ep * layout.expert_tp
        _grouped(b, layout, experts, _gather(b, layout, experts, x))
        # Add the outputs of this rank's experts to the rows of their tokens, and sum the rows over
        # the ranks that share experts.
        b.shard(routed)
        whole = ranks * b.nbytes(routed)
        group: Group = "ep" if layout.ep > 1 else "etp"
        copied = copies_of(b, "unsort", b.nbytes("expert_out") + whole)
        _give(b, routed, ("permutation",), copied, group, whole)
    else:
        once = b.system.experts.dispatcher in ONCE and layout.ep > 1
        names = (_dispatch_once if once else _dispatch)(b, layout, experts, x)
        _grouped(b, layout, experts, _sort(b, layout, experts, names, once))
        _combine(b, layout, experts, routed, once)
    if experts.shared_ffn:
        _shared(b, experts, x)
        _sum(b, experts, (routed, "shared_out"), out)


def router_bytes(experts: Experts, width: int = FP32) -> int:
    """Bytes that a router saves per token: an index (INDEX bytes) and a probability (`width` bytes)
    for each active expert. A sigmoid router also saves the probabilities of all experts and their
    sum; an auxiliary loss the probabilities that it computes, with a sigmoid also their sum; groups
    of experts their masks and choices."""
    count, active = experts.count, experts.active
    sums = width * (experts.router == "sigmoid")
    nbytes = (INDEX + width) * active + sums
    if experts.router == "sigmoid":
        nbytes += width * count
    if experts.aux_loss:
        nbytes += width * count + sums
    if experts.groups > 1:
        nbytes += count + 20 * experts.groups
    return nbytes


def _route(b: Builder, experts: Experts, x: str) -> None:
    """Add the router: a linear on a rank's tokens, which each tensor-parallel rank has whole."""
    rows, h, count = b.s.shard_tokens, b.model.hidden, experts.count
    scores = b.add("router_scores", rows, router_bytes(experts, b.wide_bytes))
    wide = FP32 * rows * count
    fused = b.system.experts.fused_router
    launched, loss = ROUTER[fused], ROUTER_LOSS[fused]
    if experts.aux_loss:
        launched = Launches(launched.forward + loss.forward, launched.backward + loss.backward)
    b.op(
        name="router",
        inputs=(x,),
        outputs=(scores,),
        saves=(x, scores),
        forward=(Gemm(rows, count, h), Elementwise(6 * wide, launched.forward)),
        backward_input=(Elementwise(6 * wide, launched.backward), Gemm(rows, h, count)),
        backward_weight=(Gemm(h, count, rows),),
        parameters=count * (h + experts.router_bias),
        replicated=True,
    )


def _count(b: Builder, layout: Layout, experts: Experts) -> None:
    """Add the count of each expert's tokens, and the gather of the counts of all ranks that
    exchange tokens. The host waits for the counts, because they are the sizes of the exchange and
    of the grouped GEMMs; for padded experts these are known without counts."""
    ranks = layout.ep * layout.expert_tp
    counts = b.add("expert_counts", ranks, INDEX * experts.count, False)
    gathered = Comm("all_gather", "ep" if layout.ep > 1 else "etp", b.nbytes(counts))
    alone = b.padded or b.system.experts.dispatcher == "allgather"
    b.op(
        name=COUNTS,
        inputs=("router_scores",),
        outputs=(counts,),
        forward=(Elementwise(b.s.shard_tokens * experts.count, launches_of(b, COUNTS).forward),),
        reduce=gathered if ranks > 1 and not alone else None,
        row_local=False,
    )


def _permute(b: Builder, experts: Experts, x: str) -> None:
    """Add the copy of each token for each of its experts, in the order of experts. It saves the map
    of tokens to experts, the probabilities by expert, and the order."""
    sent = _sent(b, experts)
    saved = _order(b, experts)
    tokens = b.add("permuted", sent, b.model.hidden * b.e)
    probs = b.add("permuted_probs", sent, b.wide_bytes)
    copied, back = copies_of(b, "permute", 2 * b.nbytes(tokens) + b.nbytes(saved))
    b.op(
        name="permute",
        inputs=(x, "router_scores", "expert_counts"),
        outputs=(tokens, probs, saved),
        row_local=False,
        saves=(saved,),
        forward=copied,
        backward_input=back,
    )


def _dispatch(b: Builder, layout: Layout, experts: Experts, x: str) -> tuple[str, ...]:
    """Add the copies and the exchange that sends them to their experts; return the names of the
    received tensors."""
    _permute(b, experts, x)
    names = ("permuted", "permuted_probs")
    if layout.ep == 1:
        return names
    rows = _received(b, layout, experts)
    b.add("dispatched", rows, b.model.hidden * b.e)
    b.add("dispatched_probs", rows, b.wide_bytes)
    return _exchange(b, "dispatch", names, ("dispatched", "dispatched_probs"))


def _dispatch_once(b: Builder, layout: Layout, experts: Experts, x: str) -> tuple[str, ...]:
    """Add the exchange that sends each token once to each rank with some of its experts; return the
    names of the tensors that `_sort` reads. Source: DeepEP (deepseek-ai/DeepEP, README:
    is_token_in_rank)."""
    rows = ceil(_received(b, layout, experts) * reached_share(layout.ep, experts.active))
    tokens = b.add("dispatched", rows, b.model.hidden * b.e)
    _order(b, experts)
    _exchange(b, "dispatch", (x,), (tokens,))
    return tokens, "router_scores", COUNTS


def _order(b: Builder, experts: Experts) -> str:
    """Add the tensor by which the backward undoes the copying of tokens: for each token the map to
    experts, the probabilities by expert, and the order."""
    tokens = b.s.shard_tokens
    nbytes = (1 + b.wide_bytes) * experts.count + INDEX * experts.active
    if b.padded:  # two orders are saved, of tokens and of probabilities, but no map
        nbytes = 2 * INDEX * ceil(_sent(b, experts) / tokens)
    return b.add("permutation", tokens, nbytes, False)


def _most(b: Builder, experts: Experts) -> int:
    """The most copies of a rank's tokens that all experts together take. Source: Megatron-core
    0.16.1, core/transformer/moe/moe_utils.py, get_capacity."""
    rows = b.s.shard_tokens * experts.active
    return experts.count * ceil(rows / experts.count * b.capacity_factor)


def _sent(b: Builder, experts: Experts) -> int:
    """The number of copies that a rank sends: one for each of a token's experts, at most the
    experts' capacity, and exactly this capacity if they are padded."""
    rows = b.s.shard_tokens * experts.active
    if b.padded:
        return _most(b, experts)
    return min(rows, _most(b, experts)) if b.capacity_factor else rows


def _received(b: Builder, layout: Layout, experts: Experts) -> int:
    """The number of copies that a rank's experts receive; the worst rank's if they are not
    balanced."""
    sent = _sent(b, experts)
    if layout.ep == 1 or b.padded:
        return sent
    rows = ceil(b.s.shard_tokens * experts.active * b.imbalance)
    return min(rows, _most(b, experts)) if b.capacity_factor else rows


def _sort(b: Builder, layout: Layout, experts: Experts, names: tuple[str, ...], once: bool) -> int:
    """Add the sorting of received tokens by expert; a token that came `once` is copied for each of
    its experts. Return the number of rows."""
    saved = ("permutation",) if once else ()
    rows = _received(b, layout, experts) * layout.expert_tp
    tokens = b.add("expert_in", rows, b.model.hidden * b.e)
    probs = b.add("expert_probs", rows, b.wide_bytes)
    gathered = b.nbytes(tokens, probs)
    copied = copies_of(b, "sort", gathered + (b.nbytes(names[0]) if once else gathered))
    _take(b, names, saved, copied, "etp", gathered if layout.expert_tp > 1 else 0)
    return rows


def _take(
    b: Builder,
    inputs: tuple[str, ...],
    saved: tuple[str, ...],
    copied: Copied,
    group: Group,
    nbytes: int,
) -> None:
    """Add the copy of rows into the order of experts, after a gather of `nbytes` (0: none)."""
    b.op(
        name="sort",
        inputs=inputs,
        outputs=("expert_in", "expert_probs", *saved),
        saves=saved,
        row_local=False,
        forward=copied[0],
        backward_input=copied[1],
        gather=Comm("all_gather", group, nbytes) if nbytes else None,
        grad_reduce=Comm("reduce_scatter", group, nbytes) if nbytes else None,
        gathered_bytes=nbytes,
    )


def _give(
    b: Builder, out: str, saved: tuple[str, ...], copied: Copied, group: Group, nbytes: int
) -> None:
    """Add the copy of rows out of the order of experts, before a reduction of `nbytes` (0:
    none)."""
    b.op(
        name="unsort",
        inputs=("expert_out",),
        outputs=(out,),
        saves=saved,
        row_local=False,
        forward=copied[0],
        backward_input=copied[1],
        reduce=Comm("reduce_scatter", group, nbytes) if nbytes else None,
        grad_gather=Comm("all_gather", group, nbytes) if nbytes else None,
        unreduced_bytes=nbytes,
    )


def _gather(b: Builder, layout: Layout, experts: Experts, x: str) -> int:
    """Add the gather of the tokens of all ranks that share experts, and the copy of those for this
    rank's experts, in the order of experts; return the number of rows."""
    rows = _received(b, layout, experts) * layout.expert_tp
    saved = _order(b, experts)
    tokens = b.add("expert_in", rows, b.model.hidden * b.e)
    probs = b.add("expert_probs", rows, b.wide_bytes)
    whole = layout.ep * layout.expert_tp * b.nbytes(x)
    group: Group = "ep" if layout.ep > 1 else "etp"
    taken = b.nbytes(tokens, probs)
    copied = copies_of(b, "sort", 2 * taken, taken + whole)
    _take(b, (x, "router_scores", COUNTS), (saved,), copied, group, whole)
    return rows


def _exchange(
    b: Builder, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]
) -> tuple[str, ...]:
    """Add an all-to-all over the expert-parallel ranks; the backward moves the same bytes."""
    comm = Comm("all_to_all", "ep", max(b.nbytes(*inputs), b.nbytes(*outputs)))
    b.op(
        name=name,
        inputs=inputs,
        outputs=outputs,
        reduce=comm,
        grad_gather=comm,
        row_local=False,
    )
    return outputs


def _grouped(b: Builder, layout: Layout, experts: Experts, rows: int) -> None:
    """Add a rank's experts: two grouped GEMMs with the weighted activation between them. A gated
    activation and its weighting are one kernel; another activation saves its output for the
    gradient of the probabilities (experts.py, bias_act_func: fused for SwiGLU and quick GEGLU)."""
    model, h, e = b.model, b.model.hidden, b.e
    count, width = experts.count // layout.ep, experts.ffn // layout.expert_tp
    columns = width * (2 if model.gated else 1)
    each = ceil(rows / count)
    b.add("expert_fc1_out", rows, columns * e)
    b.op(
        name="expert_fc1",
        inputs=("expert_in",),
        outputs=("expert_fc1_out",),
        saves=("expert_in",),
        forward=(Gemm(each, columns, h, count),),
        backward_input=(Gemm(each, h, columns, count),),
        backward_weight=(Gemm(h, columns, each, count),),
        parameters=count * columns * (h + model.mlp_bias),
        of_experts=True,
    )
    b.add("expert_fc2_in", rows, width * e)
    unweighted = () if model.gated else (b.add("expert_act_out", rows, width * e),)
    clamped = (b.add("expert_clamped", rows, columns * e),) if model.glu_clamp else ()
    moved = b.nbytes("expert_fc1_out", "expert_probs", "expert_fc2_in")
    clamp, unclamp = _clamping(b.nbytes(*clamped))
    b.op(
        name="expert_act",
        inputs=("expert_fc1_out", "expert_probs"),
        outputs=("expert_fc2_in", *unweighted, *clamped),
        saves=("expert_fc1_out", "expert_probs", *unweighted, *clamped),
        forward=(*clamp, *memory_kernel(moved, 2 * b.nbytes(*unweighted))),
        backward_input=(
            *memory_kernel(
                moved, b.nbytes("expert_fc1_out", "expert_probs"), 2 * b.nbytes(*unweighted)
            ),
            *unclamp,
        ),
    )
    b.add("expert_out", rows, h * e)
    biased, unbiased = _biases(b, rows * h, count)
    b.op(
        name="expert_fc2",
        inputs=("expert_fc2_in",),
        outputs=("expert_out",),
        saves=("expert_fc2_in",),
        forward=(Gemm(each, h, width, count), *biased),
        backward_input=(*unbiased, Gemm(each, width, h, count)),
        backward_weight=(Gemm(width, h, each, count),),
        parameters=count * h * (width + model.mlp_bias),
        of_experts=True,
    )


def _clamping(nbytes: int) -> tuple[tuple[Elementwise, ...], tuple[Elementwise, ...]]:
    """The (forward, backward) kernels that clamp both halves of a gated activation's input of
    `nbytes` bytes: the halves are read, written and joined; the backward also reads their
    gradients. Source: Megatron-core 0.16.1, core/fusions/fused_bias_geglu.py,
    weighted_bias_quick_geglu_impl."""
    return ((Elementwise(4 * nbytes, 3),), (Elementwise(5 * nbytes, 3),)) if nbytes else ((), ())


def _biases(
    b: Builder, elements: int, count: int
) -> tuple[tuple[Elementwise, ...], tuple[Elementwise, ...]]:
    """The (forward, backward) kernels that add the last bias of `count` experts to outputs of
    `elements` elements. The forward adds bias times probability, in fp32, to the rows of each
    expert, joins the rows and casts them; the backward casts, multiplies by both factors and sums.
    Source: Megatron-core 0.16.1, core/transformer/moe/experts.py, TEGroupedMLP._apply_bias."""
    if not b.model.mlp_bias:
        return (), ()
    e, wide = b.e, b.wide_bytes
    forward = elements * (wide + (e + 2 * wide) + 2 * wide + (wide + e))
    backward = elements * (2 * (e + wide) + 2 * (2 * wide + wide) + 2 * e)
    return (Elementwise(forward, 2, count),), (Elementwise(backward, 5, count),)


def _combine(b: Builder, layout: Layout, experts: Experts, out: str, once: bool) -> None:
    """Add the way back: outputs are put into the order of the dispatch, sent to their tokens'
    ranks, and summed for each token. If a token came `once`, each rank sums its outputs before it
    sends them, and the exchange sums over ranks."""
    sent, hidden = _sent(b, experts), b.model.hidden * b.e
    whole = b.nbytes("expert_out")
    copies = b.activations["expert_in"].rows // layout.expert_tp
    back = b.add("unsorted", b.activations["dispatched"].rows if once else copies, hidden)
    order, moved = ("permutation",), whole + (b.nbytes(back) if once else whole)
    copied = copies_of(b, "unsort", moved)
    _give(b, back, order if once else (), copied, "etp", whole if layout.expert_tp > 1 else 0)
    if layout.ep > 1:
        combined = b.add("combined", b.s.shard_tokens if once else sent, hidden)
        (back,) = _exchange(b, "combine", (back,), (combined,))
    b.shard(out)
    launched = launches_of(b, "unpermute")
    summing = [() if once else (Elementwise(b.nbytes(back, out), n),) for n in launched]
    b.op(
        name="unpermute",
        inputs=(back, "permutation"),
        outputs=(out,),
        saves=() if once else order,
        row_local=False,
        forward=summing[0],
        backward_input=summing[1],
        alias_inputs=(back,) if once else (),
        holds=tuple(name for name in HELD if name in b.activations),
    )


def _shared(b: Builder, experts: Experts, x: str) -> None:
    model, width = b.model, experts.shared_ffn // b.s.tp
    names = ("shared_gate_out", "shared_up_out") if model.gated else ("shared_up_out",)
    b.column("shared_fc1", x, dict.fromkeys(names, width), bias=model.mlp_bias)
    b.add("shared_fc2_in", b.s.tokens, width * b.e)
    moved = b.nbytes(*names, "shared_fc2_in")
    b.op(
        name="shared_act",
        inputs=names,
        outputs=("shared_fc2_in",),
        saves=names,
        forward=memory_kernel(moved),
        backward_input=memory_kernel(moved, b.nbytes(*names)),
    )
    b.row("shared_fc2", "shared_fc2_in", "shared_out", width, bias=model.mlp_bias)


def _sum(b: Builder, experts: Experts, inputs: tuple[str, str], out: str) -> None:
    b.shard(out)
    gate = b.model.hidden if experts.shared_gate else 0
    b.op(
        name="shared_add",
        inputs=inputs,
        outputs=(out,),
        saves=("shared_out",) if gate else (),
        forward=memory_kernel(3 * b.nbytes(out)),
        backward_input=memory_kernel(3 * b.nbytes(out)) if gate else (),
        alias_inputs=() if gate else inputs,
        parameters=gate,
        replicated=gate > 0,
    )
