"""What this baseline's plain torch model keeps beside the operator table, on a CPU.

Sizes are from shapes; per layer they are the traced bytes exactly (tests/baselines/test_stack.py).
"""

from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from rematbench.baselines.stack import Extra, Stack
from rematbench.operators.ops import Part
from rematbench.problem import Problem
from rematbench.shapes import shapes
from rematbench.workload import Model

if TYPE_CHECKING:
    from baselines.deepspeed.plan import DeepSpeed

WIDE = 4
ZERO_3 = 3
MAX_LIVE, KEPT_WHOLE = 1_000_000_000, 100_000
"""stage3_max_live_parameters and stage3_param_persistence_threshold, as DeepSpeed has them."""
NORMS: tuple[tuple[str, Part], ...] = (
    ("attn_norm", "layer"),
    ("mlp_norm", "layer"),
    ("final_norm", "head"),
)


def stack(policy: "DeepSpeed", problem: Problem) -> Stack:
    """What stays alive: norms taken apart, keys and values per query head, shared tables."""
    model = problem.workload.model
    s = shapes(problem.workload, problem.layout, problem.system)
    rows = problem.layout.micro_batch * problem.workload.seq_len // problem.layout.ulysses
    once = {"ids": 8 * rows}
    if model.position == "rope":
        once["cosine and sine (fp32)"] = 2 * WIDE * rows * model.head_dim // 2
    if model.position == "learned":
        once["positions"] = 8 * problem.workload.seq_len // problem.layout.ulysses
    if problem.layout.zero_stage == ZERO_3:
        once |= _zero_3(policy, problem)
    norms = tuple(extra for op, part in NORMS for extra in _norm(problem, op, part))
    repeated = Extra(
        name="kv_repeated",
        dtype=problem.workload.precision,
        rows=s.tokens,
        row_bytes=2 * (s.q_width - s.kv_width) * s.element_bytes,
        made_by="attention",
        saved_by="attention",
        why="k and v are saved once per query head",
    )
    return Stack(extras=(*norms, *((repeated,) if repeated.row_bytes else ())), once=once)


def _zero_3(policy: "DeepSpeed", problem: Problem) -> dict[str, int]:
    """Bytes of ZeRO 3 at the loss, where the plan has gathered the head and the last layer."""
    work, lay, model = problem.workload, problem.layout, problem.workload.model
    element = shapes(work, lay, problem.system).element_bytes
    made = policy.configuration(model, lay, work.precision)["zero_optimization"]
    reduced = WIDE if lay.ulysses > 1 else element  # seq_parallel_communication_data_type is fp32
    layer = _layer_weights(model)
    ends = [model.vocab * model.hidden] * (1 if model.tied_embeddings else 2)
    tables = [model.max_positions * model.hidden] if model.position == "learned" else []
    order = [ends[0], *(layer * model.num_layers), *tables, *ends[1:]]  # as the backward goes
    live = next((n for n in accumulate(order) if n >= MAX_LIVE), sum(order))
    gathered = model.layer_matrix_parameters + model.layer_vector_parameters + sum(ends[1:])
    small = model.parameters - sum(order)
    return {
        "reduce bucket of ZeRO 3": reduced * made["reduce_bucket_size"],
        "parameters kept or fetched ahead until 1e9 are whole": element * (live - gathered),
        f"parameters of {KEPT_WHOLE} elements at most": element * (small - small // lay.dp),
    }


def _layer_weights(model: Model) -> list[int]:
    """Elements of a layer's weights in the order of its backward."""
    q, kv = model.q_width, model.kv_width
    widths = [model.ffn] * (3 if model.gated else 2) + [q, kv, kv, q]
    return [model.hidden * width for width in widths]


def _norm(problem: Problem, op: str, part: Part) -> tuple[Extra, ...]:
    s = shapes(problem.workload, problem.layout, problem.system)
    made = partial(Extra, rows=s.shard_tokens, made_by=op, saved_by=op, part=part)
    hidden = problem.workload.model.hidden
    if problem.workload.model.norm == "layernorm":
        why = "mean and 1/deviation of each row"
        row = 2 * s.element_bytes
        kept = made(name=f"{op}_statistics", dtype="fp32", row_bytes=row, why=why)
        return (kept,)
    statistics = made(
        name=f"{op}_statistics", dtype="fp32", row_bytes=WIDE, why="1/rms of each row"
    )
    normalized = made(
        name=f"{op}_normalized",
        dtype="fp32",
        row_bytes=WIDE * hidden,
        why="on a CPU torch takes RMSNorm apart: input x 1/rms, before the weight",
    )
    wide = made(
        name=f"{op}_input_beyond_{s.element_bytes}_bytes",
        dtype="fp32",
        row_bytes=(WIDE - s.element_bytes) * hidden,
        why="an fp32 copy of the input is kept in its place",
    )
    return (statistics, normalized, *((wide,) if wide.row_bytes else ()))
