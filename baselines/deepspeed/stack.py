"""The tensors that baselines/deepspeed/model.py keeps in addition to the operator table's.

Sizes come from shapes; per layer they equal the traced bytes (tests/baselines/test_stack.py).
"""

from collections.abc import Iterator
from functools import partial

from baselines.deepspeed import zero_peaks, zero_sizes
from baselines.deepspeed.plan import DeepSpeed
from baselines.deepspeed.zero_sizes import ZERO_2, ZERO_3
from rematbench.costs.operators.ops import Part
from rematbench.engine.program.program import RankProgram
from rematbench.inputs.shapes import shapes
from rematbench.problem import Problem
from rematbench.worlds.packages.stack import Extra, Stack

WIDE = 4
NORMS: tuple[tuple[str, Part], ...] = (
    ("attn_norm", "layer"),
    ("mlp_norm", "layer"),
    ("final_norm", "head"),
)


def stack(policy: DeepSpeed, problem: Problem) -> Stack:
    """The extra tensors: norm statistics, repeated KV heads, shared tables."""
    model = problem.workload.model
    s = shapes(problem.workload, problem.layout, problem.system)
    rows = problem.layout.micro_batch * problem.workload.seq_len // problem.layout.ulysses
    once = {"ids": 8 * rows}
    again = policy.checkpointing != "none"
    if model.position == "rope" or again:  # recomputed layers get them, used or not
        once["cosine and sine (fp32)"] = 2 * WIDE * rows * model.head_dim // 2
    apart = policy.offload_optimizer or policy.offload_param or policy.checkpointing.endswith("cpu")
    if problem.layout.global_batch > problem.layout.micro_batch and not apart:
        whole = problem.layout.global_batch * problem.workload.seq_len
        once["ids and labels of the step, which a micro-batch's views keep alive"] = 2 * 8 * whole
    if model.position == "learned":
        once["positions"] = 8 * problem.workload.seq_len // problem.layout.ulysses
    if problem.layout.zero_stage == ZERO_3:
        once |= _zero_3(policy, problem)
    elif policy.offload_optimizer:
        largest = max(one.elements for one in zero_sizes.parameters(model))
        once["a gradient on its way to the host"] = s.element_bytes * largest
    return Stack(extras=tuple(_extras(problem, again)), once=once, system=_states(problem))


def _extras(problem: Problem, again: bool) -> Iterator[Extra]:
    model = problem.workload.model
    s = shapes(problem.workload, problem.layout, problem.system)
    layernorm = model.norm == "layernorm"
    for op, part in NORMS:
        yield Extra(
            name=f"{op}_statistics",
            dtype="fp32",
            rows=s.shard_tokens,
            row_bytes=2 * s.element_bytes if layernorm else WIDE,
            producer=op,
            saved_by=op,
            part=part,
            why="mean and 1/deviation of each row" if layernorm else "1/rms of each row",
        )
    made = partial(Extra, dtype=problem.workload.precision)
    if s.q_width > s.kv_width:
        yield made(
            name="kv_repeated",
            rows=s.tokens,
            row_bytes=2 * (s.q_width - s.kv_width) * s.element_bytes,
            producer="attention",
            saved_by="attention",
            why="k and v are saved once per query head",
        )
    if again:
        yield made(
            name="rebuilt_output",
            rows=s.shard_tokens,
            row_bytes=model.hidden * s.element_bytes,
            producer=problem.layer(0).ops[-1].name,
            saved_by=problem.layer(0).ops[0].name,
            why="a recomputed layer's output: DeepSpeed keeps it until the layer's backward ends",
        )


WALKED = ("whole_buckets", "prefetch_elements", "live_elements")
"""Facts of the stack whose memory `zero_peaks` computes by weight, in place of the lowering."""
NOT_METERED = ("step_scratch_bytes", "flat_step", "late_state_bytes")
"""Facts of the optimizer step, during which bytes are not counted."""


def _states(problem: Problem) -> dict[str, int]:
    """Facts of the stack that differ in this package. Facts that `zero_peaks` computes or that are
    not measured are 0. fp32 states have other bytes per element: the optimizer has two moments and,
    under ZeRO, a separate copy of the weights."""
    found = dict.fromkeys((*WALKED, *NOT_METERED), 0)
    if problem.workload.precision != "fp32":
        return found
    copy = WIDE if problem.layout.zero_stage > 0 else 0
    return {**found, "param_bytes": WIDE, "grad_bytes": WIDE, "optimizer_bytes": 2 * WIDE + copy}


def activation_peak(policy: DeepSpeed, problem: Problem, rank: RankProgram) -> int | None:
    found: int = zero_peaks.activation_peak(problem.workload.model, _sizes(policy, problem), rank)
    return found - backward_gradient_bytes(policy, problem)


def backward_gradient_bytes(policy: DeepSpeed, problem: Problem) -> int:
    """Bytes of the gradients that are a state in the plan and that DeepSpeed makes in the
    backward."""
    lay = problem.layout
    if lay.zero_stage == ZERO_3 or policy.offload_optimizer:
        return 0
    ranks = lay.dp if lay.zero_stage == ZERO_2 else 1
    return problem.system.states.grad_bytes * -(-problem.workload.model.parameters // ranks)


def _sizes(policy: DeepSpeed, problem: Problem) -> zero_sizes.Sizes:
    work, lay = problem.workload, problem.layout
    element = shapes(work, lay, problem.system).element_bytes
    made = policy.configuration(work.model, lay, work.precision)["zero_optimization"]
    return zero_sizes.Sizes(
        element=element,
        reduced=WIDE if lay.ulysses > 1 else element,  # seq_parallel_communication_data_type: fp32
        ranks=lay.dp,
        bucket=made["reduce_bucket_size"],
        offloaded=policy.offload_optimizer,
        stage=lay.zero_stage,
        overlap=policy.overlap_comm,
        params_on_host=policy.offload_param,
        tiles_rebuilt=policy.checkpointing != "none" and policy.mlp_tiles > 1,
    )


def _zero_3(policy: DeepSpeed, problem: Problem) -> dict[str, int]:
    made = _sizes(policy, problem)
    away = problem.layout.dp > 1 or policy.offload_param  # gathers add to this rank's part
    gathered = zero_sizes.small_elements(problem.workload.model) if away else 0
    return {
        "reduce bucket of ZeRO 3": made.reduced * made.bucket,
        f"parameters of {zero_sizes.KEPT_WHOLE} elements at most": made.element * gathered,
    }
