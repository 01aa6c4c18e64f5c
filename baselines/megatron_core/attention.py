"""Extra tensors of core attention that Megatron-core holds and the operator table lacks.

The attention is Megatron-core's own with materialised scores or, under context parallelism, this
baseline's (layer_spec.GatheredAttention).
"""

from functools import partial

from baselines.megatron_core.plan import MegatronCore
from rematbench.inputs.shapes import shapes
from rematbench.problem import Problem
from rematbench.worlds.packages.stack import Extra

LSE_BYTES = 4
"""Bytes of an fp32 statistic per row and head."""


def inside(policy: MegatronCore, problem: Problem) -> tuple[Extra, ...]:
    """Tensors inside the attention's forward and backward, and tensors saved with the scores."""
    if problem.layout.cp > 1:
        return _gathered(problem)
    return () if problem.attention == "flash" else _scores(policy, problem)


def _gathered(problem: Problem) -> tuple[Extra, ...]:
    """Tensors inside GatheredAttention, counted on the first rank, whose last slice sees the most
    keys.

    They are the keys and values of all ranks (2 cp kv), and results for blocks of half a rank's
    query rows and some key rows. A plan already has the gathered keys and values, the output and
    lse; in the backward also the gradients of gathered keys and values, and of q.
    """
    s = shapes(problem.workload, problem.layout, problem.system)
    q, kv, e = s.q_width * s.element_bytes, s.kv_width * s.element_bytes, s.element_bytes
    lse, whole = s.heads * LSE_BYTES, 2 * s.cp * kv
    # In `merging` these are alive: the output of one slice, the outputs of the other slice's two
    # blocks, both outputs scaled in fp32, and their sum.
    merging = q // 2 + q + 3 * (q // 2) * max(4, e) // e + 3 * lse
    joined = 3 * q + 4 * lse  # the outputs, the merged output, and all slices are alive
    gathering = whole // 2 + kv  # gathered v is copied into order; v's rows were copied before
    first = max(merging, joined, gathering) - q - lse
    copied = q if s.heads * s.micro_batch > 1 else 0  # the output's gradient is reordered
    second = copied + q + whole  # two blocks have gradients of q, k and v
    made = partial(Extra, dtype=problem.workload.precision, rows=s.tokens, producer="attention")
    return (
        made(
            name="gathered_outputs",
            row_bytes=first,
            forward=True,
            why="outputs for blocks of query and key rows, merged by their lse and then joined",
        ),
        made(
            name="gathered_gradients",
            row_bytes=second,
            why="two blocks' gradients besides the sums, and the output's gradient reordered",
        ),
    )


def _scores(policy: MegatronCore, problem: Problem) -> tuple[Extra, ...]:
    s = shapes(problem.workload, problem.layout, problem.system)
    layer = problem.layer(0)
    probabilities = layer.activations["attn_probs"].nbytes
    saved = sum(a.nbytes for a in layer.activations.values() if a.name.startswith("attn_probs"))
    made = partial(Extra, dtype=problem.workload.precision, rows=s.tokens, producer="attention")
    return (
        made(
            name="scores",
            row_bytes=probabilities // s.tokens + s.q_width * s.element_bytes,
            forward=True,
            why="kept by a variable until the function returns; and the output, not yet transposed",
        ),
        made(
            name="score_gradients",
            row_bytes=max(0, 4 * probabilities - saved) // s.tokens - _absent(policy, problem),
            why="gradients by softmax, mask and scale, and a copy: four tensors as large as the "
            "scores, after the saved ones are freed and before q and k have gradients",
        ),
        made(
            name="causal_mask",
            dtype="bool",
            rows=s.seq_len,
            row_bytes=s.seq_len,
            saved_by="attention",
            why="each call makes a new one, and the masked scores save it",
        ),
    )


def _absent(policy: MegatronCore, problem: Problem) -> int:
    """Bytes per row that a plan has, besides the four gradients of scores, and Megatron-core does
    not: the gradients of q and k (the gradient of v exists already, once per query head) and,
    unless a checkpointed function holds them, v's storage and the output's gradient."""
    s = shapes(problem.workload, problem.layout, problem.system)
    grouped = s.kv_width < s.q_width
    later = 2 * s.kv_width  # q + kv for the gradients of q and k, less q - kv because v's is larger
    if policy.recompute == "selective" and "core_attn" in policy.modules:
        return (later - s.q_width * (2 if grouped else 1)) * s.element_bytes
    alone = grouped or problem.workload.model.position == "rope"
    storage = (s.q_width if grouped else 3 * s.q_width) if alone else 0
    return (later + s.q_width + storage) * s.element_bytes
