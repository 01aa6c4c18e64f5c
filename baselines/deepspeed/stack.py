"""What this baseline's plain torch model keeps beside the operator table.

Sizes are from shapes; per layer they are the traced bytes exactly (tests/baselines/test_stack.py).
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rematbench.baselines.stack import Extra, Stack
from rematbench.discover import load_module
from rematbench.operators.ops import Part
from rematbench.problem import Problem
from rematbench.program import RankProgram
from rematbench.shapes import shapes

if TYPE_CHECKING:
    from baselines.deepspeed import zero_peaks
    from baselines.deepspeed.plan import DeepSpeed
else:  # this file is loaded by its path
    zero_peaks = load_module(Path(__file__).with_name("zero_peaks.py"))

WIDE = 4
ZERO_2, ZERO_3 = 2, 3
NORMS: tuple[tuple[str, Part], ...] = (
    ("attn_norm", "layer"),
    ("mlp_norm", "layer"),
    ("final_norm", "head"),
)


def stack(policy: "DeepSpeed", problem: Problem) -> Stack:
    """What stays alive: statistics of norms, keys and values per query head, shared tables."""
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
    elif policy.offload_optimizer:
        largest = max(model.vocab, model.ffn) * model.hidden
        once["a gradient on its way to the host"] = s.element_bytes * largest
    again = policy.checkpointing != "none"
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
    output = Extra(
        name="rebuilt_output",
        dtype=problem.workload.precision,
        rows=s.shard_tokens,
        row_bytes=model.hidden * s.element_bytes,
        made_by=problem.layer(0).ops[-1].name,
        saved_by=problem.layer(0).ops[0].name,
        why="of a layer that is computed again: DeepSpeed keeps it until its backward ends",
    )
    more = (*((repeated,) if repeated.row_bytes else ()), *((output,) if again else ()))
    return Stack(extras=(*norms, *more), once=once)


def activation_peak(policy: "DeepSpeed", problem: Problem, rank: RankProgram) -> int | None:
    """The peak of what ZeRO 2 or 3 holds beside the activations, and them, under a plan (None:
    another stage, where the ledger's peak is meant)."""
    if problem.layout.zero_stage not in (ZERO_2, ZERO_3):
        return None
    sizes = _sizes(policy, problem)
    found: int = zero_peaks.activation_peak(problem.workload.model, sizes, rank)
    return found - sizes.part  # a state of the plan's, here made on the way


def _sizes(policy: "DeepSpeed", problem: Problem) -> "zero_peaks.Sizes":
    work, lay = problem.workload, problem.layout
    element = shapes(work, lay, problem.system).element_bytes
    made = policy.configuration(work.model, lay, work.precision)["zero_optimization"]
    share = -(-work.model.parameters // lay.dp)
    part = 0 if policy.offload_optimizer else problem.system.grad_bytes * share
    return zero_peaks.Sizes(
        element=element,
        reduced=WIDE if lay.ulysses > 1 else element,  # seq_parallel_communication_data_type: fp32
        ranks=lay.dp,
        bucket=made["reduce_bucket_size"],
        checkpointed=policy.checkpointing != "none",
        offloaded=policy.offload_optimizer,
        **({} if lay.zero_stage == ZERO_3 else {"part": part, "max_live": 0}),
    )


def _zero_3(policy: "DeepSpeed", problem: Problem) -> dict[str, int]:
    """Bytes that ZeRO 3 never frees."""
    sizes = _sizes(policy, problem)
    small = zero_peaks.small_elements(problem.workload.model)
    return {
        "reduce bucket of ZeRO 3": sizes.reduced * sizes.bucket,
        f"parameters of {zero_peaks.KEPT_WHOLE} elements at most": sizes.element
        * (small - small // problem.layout.dp),
    }


def _norm(problem: Problem, op: str, part: Part) -> tuple[Extra, ...]:
    s = shapes(problem.workload, problem.layout, problem.system)
    made = partial(Extra, rows=s.shard_tokens, made_by=op, saved_by=op, part=part)
    if problem.workload.model.norm == "layernorm":
        why = "mean and 1/deviation of each row"
        row = 2 * s.element_bytes
        kept = made(name=f"{op}_statistics", dtype="fp32", row_bytes=row, why=why)
        return (kept,)
    kept = made(name=f"{op}_statistics", dtype="fp32", row_bytes=WIDE, why="1/rms of each row")
    return (kept,)
