"""What depends on the compute precision: a stack's bytes, a GPU's peak, the attention kernels.

Files of stacks and clusters describe 16 bits; fp16 has the bytes and rates of bf16.
"""

from rematbench.inputs.cluster import Cluster
from rematbench.inputs.constants import Calibration
from rematbench.inputs.system import OptimizerKind, System, with_facts
from rematbench.model import BYTES_PER_ELEMENT
from rematbench.workload import Model, Precision, Trained

WIDE: tuple[Precision, ...] = ("fp32", "fp64")
"""The precisions with more than 16 bits."""
FP32, MASTER = 4, 4
"""Bytes of an fp32 element, and of a parameter's fp32 master weight in the optimizer states."""
OF_TRAINED = (
    *("grad_bytes", "optimizer_bytes", "reduce_bytes", "step_scratch_bytes", "late_state_bytes"),
)
"""The facts of a stack that size the states of trained weights."""
ADAM = 12
"""Bytes per parameter of Adam's states with an fp32 master weight."""


def in_precision(system: System, precision: Precision, zero_stage: int) -> System:
    """The stack with the bytes of training in a precision; for 16 bits the stack itself.

    Parameters, gradients and messages have the width of the precision.  Parameters in fp32 need no
    master weights (stacks with `fp32_copy` make them all the same).  Adam's moments stay fp32;
    they get the width of the parameters, as in torch.optim, if they have it in 16 bits too, and in
    fp64.
    """
    if precision not in WIDE:
        return system
    width = BYTES_PER_ELEMENT[precision]
    states, scratch, late = _states(system, width)
    copies = system.states.fp32_copy == "always" or (
        system.states.fp32_copy == "zero" and zero_stage > 0
    )
    copy = width if copies and system.states.param_bytes < width else 0
    return with_facts(
        system,
        param_bytes=width,
        grad_bytes=width,
        optimizer_bytes=states + copy,
        reduce_bytes=max(width, system.states.reduce_bytes),
        gather_bytes=max(width, system.states.gather_bytes),
        host_grad_bytes=max(width, system.host.host_grad_bytes),
        step_scratch_bytes=scratch,
        late_state_bytes=min(late, states + copy),
        held_logit_bytes=system.loss.held_logit_bytes and max(width, system.loss.held_logit_bytes),
    )


def of_trained(system: System, work: Trained, zero_stage: int) -> System:
    """The stack with the bytes of frozen weights, and of gradients and optimizer states of trained
    weights, in the formats of the work.

    torch.optim keeps moments in the parameters' precision, and trained fp32 parameters need no
    master weights.  Linears with fewer than 16 bits, and weights that train in fp32, are converted
    to a number of this stack's parameters (`Op.parameters`).
    """
    changed: dict[str, int] = {}
    if work.trained_dtype != "stack" and system.states.param_bytes < FP32:
        wide = in_precision(system, "fp32", zero_stage).states
        changed = {name: getattr(wide, name) for name in OF_TRAINED}
    if work.base_dtype in BYTES_PER_ELEMENT:
        width = BYTES_PER_ELEMENT[work.base_dtype]
        changed |= {"param_bytes": width, "gather_bytes": width}
    return with_facts(system, **changed) if changed else system


def with_optimizer(system: System, kind: OptimizerKind | None) -> System:
    """The stack with another optimizer in place of Adam; master weights stay.

    Adam and Lion in 8 bits have one byte per state (bitsandbytes, optim/optimizer.py; the scales of
    blocks of 256, 1.6 %, and the 8-byte states of tensors below 4,096 elements are not counted).
    Adam in 4 bits is that of torchao, optim/subclass_4bit.py.  Adafactor keeps sums of rows and
    columns (Shazeer & Stern 2018), which count as 0 bytes per parameter.  Lion, SGD with momentum
    and Muon have one state as wide as Adam's moments (Muon updates embedding and head with Adam,
    whose second moment is not counted).
    """
    if kind is None:
        return system
    states = system.states
    moment = FP32 if states.optimizer_bytes >= 2 * FP32 else states.optimizer_bytes // 2
    own = {"adam8bit": 2, "adam4bit": 1, "adam_bf16": 4, "lion8bit": 1, "adafactor": 0, "sgd": 0}
    nbytes = own.get(kind, moment)
    late, master = states.late_state_bytes, states.optimizer_bytes - 2 * moment
    return with_facts(
        system,
        optimizer_bytes=master + nbytes,
        late_state_bytes=nbytes if late else 0,
        step_scratch_bytes=states.step_scratch_bytes if states.flat_step else 0,
    )


def _states(system: System, width: int) -> tuple[int, int, int]:
    """Bytes per parameter of optimizer states, of the update's scratch, and of late states, all
    without master weights."""
    states, scratch, late = (
        system.states.optimizer_bytes,
        system.states.step_scratch_bytes,
        system.states.late_state_bytes,
    )
    own = system.states.param_bytes
    if states == 2 * own:  # the moments have the parameters' dtype
        return 2 * width, scratch * width // own, late * width // own
    if own < FP32 and states >= ADAM:
        states -= MASTER
    if own > FP32:  # the states are fp64 already
        return states, scratch, late
    return states * width // FP32, scratch * width // FP32, late * width // FP32


def peak_flop_per_s(
    cluster: Cluster, calibration: Calibration, work: Precision, tf32: bool
) -> float:
    """The dense peak of matrix products in a precision (`tf32`: fp32 products run in TF32); 0 if
    neither the cluster file nor the GPU generation declares it."""
    if work not in WIDE:
        return cluster.peak_flop_per_s
    key = "tf32" if work == "fp32" and tf32 else work
    own: float | None = getattr(cluster, f"{key}_flop_per_s")
    if own is not None:
        return own
    gpu = calibration.gpus.get(cluster.generation)
    share: float = getattr(gpu, f"{key}_peak_share") if gpu else 0.0
    return share * cluster.peak_flop_per_s


def attention_problem(system: System, model: Model, precision: Precision, backend: str) -> str:
    """Why no fused attention kernel of the stack (or the kernel `backend`, if named) takes a
    precision; empty if one does.

    Flash attention takes 16 bits.  torch's SDPA has a memory-efficient kernel for fp32, which needs
    equal numbers of query and key heads (aten/native/transformers/cuda/sdp_utils.cpp); for fp64 it
    has only plain products, with scores in memory.
    """
    if precision not in WIDE:
        return ""
    named = f"attention {backend or system.kernels.attention!r} in {precision}"
    if backend:
        return f"{named}: the kernel takes only 16 bits"
    takes = system.accepts.wide_attention
    if takes in ("fp64", precision):
        return ""
    if takes == "equal_heads" and precision == "fp32":
        if model.num_kv_heads == model.num_heads:
            return ""
        heads = f"{model.num_heads} heads of queries over {model.num_kv_heads} of keys"
        return f"{named}: torch's memory-efficient kernel does not take {heads}"
    has = "fp32" if takes != "none" else "16 bits"
    return f"{named}: the fused kernels of stack {system.name} take {has} at most"


NO_SINKS = ("fa1", "fa2", "triton")
"""Kernels without support for attention sinks.  cuDNN supports them, and so does the build of
FlashAttention-3 that the authors of gpt-oss recommend (kernels-community/vllm-flash-attn3)."""


def sinks_problem(model: Model, kernel: str) -> str:
    """Why a kernel cannot run a model with attention sinks; empty if it can."""
    if not model.attention_sinks or kernel not in NO_SINKS:
        return ""
    return f"attention {kernel!r} does not support attention sinks, which {model.name} has"
