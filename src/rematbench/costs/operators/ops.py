"""The decoder block as named operators with their inputs, outputs, saved activations and kernels.

Every activation that a plan can name is a tensor of these operators.  The saved activations depend
on the stack's fused operators, never on a method.  Symbols: n = micro_batch x seq_len / cp, the
tokens of a rank; t = tensor-parallel ranks; h = hidden columns; e = bytes per element.
"""

from functools import cached_property
from typing import Literal, get_args

from msgspec import Struct
from msgspec.structs import replace

from rematbench.costs.operators.kernels import Elementwise, Gemm, Kernel
from rematbench.model import AdapterTarget

CommKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "ring", "amax"]
"""`amax`: an all-reduce of a few numbers, which are the largest elements of tensors."""
DenseGroup = Literal["tp", "columns", "cp", "ulysses", "dp", "pp", "replica", "stage"]
Group = Literal[DenseGroup, "ep", "etp", "edp", "expert_replica"]
"""The ranks of each group. `columns`: those that split the second dimension of the matrices that
`tp` splits; `ulysses`: those of an all-to-all inside context parallelism (Ulysses without ring
attention uses `cp`); `dp`: those over which states are sharded; `replica`: those that hold equal
shards; `ep`: those over which a layer's experts are spread; `etp`: those that split an expert;
`edp`: those over which states of the same part of the same experts are sharded; `expert_replica`:
those that hold equal shards of these states; `stage`: all ranks of a pipeline stage."""
STREAMS_OF: dict[Group, str] = {
    **{"replica": "dp", "edp": "dp", "expert_replica": "dp"},
    **{"etp": "ep", "ulysses": "cp", "columns": "tp", "pp": "dp", "stage": "tp"},
}
"""For a group without its own stream: the group whose stream it uses."""
Part = Literal["embedding", "layer", "head"]


class Comm(Struct, frozen=True):
    """A collective over one group; `nbytes` is the full (gathered) payload."""

    kind: CommKind
    group: Group
    nbytes: int

    @property
    def stream(self) -> str:
        return STREAMS_OF.get(self.group, self.group)


class Activation(Struct, frozen=True):
    """A tensor that one rank holds for one micro-batch: rows x row_bytes. `copy_of`: the tensor
    whose quantised copy it is, and with which it has one gradient; `block_rows`: the number of rows
    with common scales (0: all rows)."""

    name: str
    rows: int
    row_bytes: int
    differentiable: bool = True
    copy_of: str = ""
    block_rows: int = 1

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class Op(Struct, frozen=True, kw_only=True):
    """One operator of the block.

    `inputs`, `outputs` and `saves` name activations; `forward`, `backward_input` and
    `backward_weight` are kernels of one rank. Collectives: `gather` runs on the inputs before the
    forward, `regather` on the saved inputs before the backward (the gathered copy is not saved),
    `reduce` on the output after the forward, `grad_gather` on the output's gradient, `grad_reduce`
    on the input's gradient; `amax` and `grad_amax` run before `gather` and `grad_gather`, on the
    largest element of the tensor that is quantised.

    `gathered_bytes` is the temporary gathered input, `unreduced_bytes` the output before `reduce`.
    An operator whose `reduce` is an all-to-all has no kernel (`exchanges`): output i has the rows
    of input i in another order, or once for each rank that receives them, and `grad_gather` sends
    the gradient back. An operator that only gathers its input has no kernel either (`moves`).

    `of_experts`: the weights are those of the experts that the rank holds. `replicated`: each
    tensor-parallel rank has the whole weight and the gradient of its own rows.

    `row_local`: each output row depends on the same input row only. `alias_inputs`: inputs whose
    gradient is the same tensor as the output's gradient (a residual addition), so the backward
    moves no bytes. `scratch_*`: bytes that exist only during the kernel. `widened_bytes` too: those
    of the widened copy of a packed weight, in the forward and in the input's backward, which needs
    the whole copy even for some of the rows.

    `holds`: tensors that the caller of a module keeps until the end of this operator's forward.

    `parameters`: the size of the operator's weights, in parameters of the stack's precision (a
    4-bit weight is a fraction of one); `trained`: how many weights have a gradient (None: all).
    `adapts`: the linear to whose adapter the operator belongs, or whose input it quantises.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saves: tuple[str, ...] = ()
    forward: tuple[Kernel, ...] = ()
    backward_input: tuple[Kernel, ...] = ()
    backward_weight: tuple[Kernel, ...] = ()
    gather: Comm | None = None
    regather: Comm | None = None
    reduce: Comm | None = None
    grad_gather: Comm | None = None
    grad_reduce: Comm | None = None
    amax: Comm | None = None
    grad_amax: Comm | None = None
    gathered_bytes: int = 0
    unreduced_bytes: int = 0
    row_local: bool = True
    alias_inputs: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    parameters: int = 0
    trained: int | None = None
    adapts: str = ""
    of_experts: bool = False
    replicated: bool = False
    scratch_forward_bytes: int = 0
    scratch_backward_bytes: int = 0
    widened_bytes: tuple[int, int] = (0, 0)

    @property
    def has_weight(self) -> bool:
        """Whether the operator computes a weight gradient, separately from the input gradient."""
        return bool(self.backward_weight)

    @property
    def is_matrix(self) -> bool:
        """Whether the operator multiplies by a weight."""
        return self.parameters > 0 and any(isinstance(one, Gemm) for one in self.forward)

    @property
    def narrow(self) -> bool:
        """Whether the operator is a linear with quantised operands."""
        return any(isinstance(one, Gemm) and one.narrow for one in self.forward)

    @property
    def trained_parameters(self) -> int:
        """The number of weights with a gradient."""
        return self.parameters if self.trained is None else self.trained

    @property
    def exchanges(self) -> bool:
        """Whether the operator is only an all-to-all, which reorders each of its inputs."""
        return self.reduce is not None and self.reduce.kind == "all_to_all"

    @property
    def moves(self) -> bool:
        """Whether the operator is only a collective: an all-to-all, or a gather for a backward."""
        return self.exchanges or (self.reduce is not None and not self.forward)


class OpTable(Struct, frozen=True, kw_only=True, dict=True):
    """The operators of one part of the model in forward order, and every activation that they
    name."""

    part: Part
    ops: tuple[Op, ...]
    activations: dict[str, Activation]

    @cached_property
    def saved(self) -> tuple[str, ...]:
        """The activations that a backward needs, in forward order of production."""
        saves = {name for op in self.ops for name in op.saves}
        return tuple(name for name in self.activations if name in saves)

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps for one micro-batch under keep_all."""
        return sum(self.activations[name].nbytes for name in self.saved)

    @cached_property
    def parameters(self) -> int:
        """The number of weights that one rank holds of this part, after tensor parallelism."""
        return sum(op.parameters for op in self.ops)

    @cached_property
    def expert_parameters(self) -> int:
        """The number of weights of the experts that the rank holds."""
        return sum(op.parameters for op in self.ops if op.of_experts)

    @cached_property
    def trained(self) -> int:
        """The number of weights of one rank with a gradient."""
        return sum(op.trained_parameters for op in self.ops)

    @cached_property
    def trained_experts(self) -> int:
        """The number of weights with a gradient of the experts that the rank holds."""
        return sum(op.trained_parameters for op in self.ops if op.of_experts)

    @cached_property
    def quantised(self) -> int:
        """The number of one rank's weights of which GEMMs read quantised copies, without weights
        that belong to an earlier layer."""
        return sum(one.n * one.k * one.batch for one in self._narrow)

    @property
    def products(self) -> int:
        """The number of GEMMs with quantised weights on one rank."""
        return sum(one.batch for one in self._narrow)

    @cached_property
    def _narrow(self) -> list[Gemm]:
        own = [op for op in self.ops if op.parameters]
        gemms = [one for op in own for one in op.forward if isinstance(one, Gemm)]
        return [one for one in gemms if one.narrow]

    def op(self, name: str) -> Op:
        """The operator with this name; StopIteration if the table has no such operator."""
        return next(op for op in self.ops if op.name == name)

    def of_gradient(self, name: str) -> str:
        """The activation that has the gradient of `name`: the original of a copy, or `name`."""
        return self.activations[name].copy_of or name

    def producer(self, name: str) -> Op | None:
        """The operator that writes an activation; None if it is the input of the part."""
        return next((op for op in self.ops if name in op.outputs), None)


def with_saved(table: OpTable, names: tuple[str, ...]) -> OpTable:
    """The table in which the tensors `names` are saved too: an output by the operator that writes
    it, an input of the part by its first reader."""
    outputs = {name for op in table.ops for name in op.outputs}
    part_inputs = {name for name in names if name not in outputs}
    ops = []
    for op in table.ops:
        more = [name for name in op.outputs if name in names]
        more += [name for name in op.inputs if name in part_inputs]
        part_inputs.difference_update(op.inputs)
        ops.append(replace(op, saves=tuple(dict.fromkeys((*op.saves, *more)))))
    return replace(table, ops=tuple(ops))


def without_activation(table: OpTable, name: str) -> OpTable:
    def less(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(other for other in names if other != name)

    ops = tuple(replace(op, outputs=less(op.outputs), saves=less(op.saves)) for op in table.ops)
    activations = {key: tensor for key, tensor in table.activations.items() if key != name}
    return replace(table, ops=ops, activations=activations)


def without_weights(table: OpTable) -> OpTable:
    """The table of a layer that shares the weights of an earlier layer.  The earlier layer has the
    states and sums the gradients, which are complete after its backward."""
    return replace(table, ops=tuple(replace(op, parameters=0, trained=0) for op in table.ops))


def rebuild_ops(
    table: OpTable, missing: frozenset[str], available: frozenset[str]
) -> tuple[Op, ...]:
    """The fewest operators, in forward order, that compute `missing` from `available`."""
    needed = set(missing)
    chosen: list[Op] = []
    for op in reversed(table.ops):
        if needed.isdisjoint(op.outputs):
            continue
        chosen.append(op)
        needed.difference_update(op.outputs)
        needed.update(name for name in op.inputs if name not in available)
    return tuple(reversed(chosen))


def memory_kernel(*nbytes: int) -> tuple[Kernel, ...]:
    """One memory-bound kernel that reads and writes the sum of `nbytes`."""
    return (Elementwise(hbm_bytes=sum(nbytes)),)


LORA_KINDS = ("", "_in", "_mask", "_base", "_out")
"""Endings of the names of tensors that an adapter saves: the product with its first matrix, its
input if that is a copy, the dropout mask of the input, and for DoRA the outputs of linear and
adapter."""
GATHERED_INPUTS = ("q", "k", "v", "gate", "up", "shared_gate", "shared_up")
"""The linears whose adapters save a gathered input under tensor parallelism (`lora_*_rows`)."""
_HEADS = ("q", "k", "v")
NORMS = (
    "attn_norm",
    "post_attn_norm",
    "mlp_norm",
    "post_mlp_norm",
    "final_norm",
    "q_latent_norm",
    "kv_latent_norm",
    "next_norm",
    "hidden_norm",
    "predict_norm",
)
_MORE_NORMS = ("embedding_norm", "head_norm", "q_norm", "k_norm")
"""Norms whose outputs are not named after the norm."""
_BLOCK = (
    "embedding_out",
    "layer_input",
    "lse",
    "attn_heads",
    "attn_out",
    "proj_out",
    "attn_residual",
    "gate_out",
    "up_out",
    "act_out",
    "act_steps",
    "fc2_in",
    "fc2_out",
    "layer_output",
)
_EXPERTS = (
    *("router_scores", "permutation", "unsorted", "combined", "routed_out"),
    *(f"{name}{kind}" for name in ("permuted", "dispatched") for kind in ("", "_probs")),
    *(f"expert_{name}" for name in ("counts", "in", "probs", "fc1_out", "act_out", "clamped")),
    *("expert_fc2_in", "expert_out"),
    *(f"shared_{name}" for name in ("gate_out", "up_out", "fc2_in", "out")),
)
QUANTISED = "_quantised"
"""The end of the names of quantised copies."""
LINEAR_INPUTS = (
    *("layer_input", "attn_norm_out", "attn_out", "attn_residual", "mlp_norm_out", "fc2_in"),
    *("q_latent_norm_out", "kv_latent_norm_out", "expert_in", "expert_fc2_in", "shared_fc2_in"),
    "joined",
)
_SCORES = ("probs", "softmax", "capped", "probs_mask", "probs_dropped")
_ADAPTED = (
    *(*get_args(AdapterTarget), "expert_fc1", "expert_fc2"),
    *("shared_gate", "shared_up", "shared_down"),
)
_ADAPTERS = (
    *(f"lora_{name}{kind}" for name in _ADAPTED for kind in LORA_KINDS),
    *(f"lora_{name}_rows" for name in GATHERED_INPUTS),
    *(f"bottleneck_{w}_{kind}" for w in ("attn", "mlp") for kind in ("low", "act", "up", "out")),
)
_MEMORY = tuple(f"memory_{name}" for name in ("query", "rows", "weights", "bag", "gate_out", "in"))
_NARROW = ("embedding_narrow", "embedding_norm_out", "head_narrow", "head_act_out", "head_norm_out")
_ENDS = ("logits", "logits_capped", "logits_held", "loss_saved")
_PREDICTION = (
    *("next_embedding", "joined", "join_columns", "join_out", "predicted", "predicted_mask"),
    *("predict_logits", "predict_loss_saved"),
)

ACTIVATIONS = frozenset(
    {
        *_BLOCK,
        *_EXPERTS,
        *_ENDS,
        *_NARROW,
        *_MEMORY,
        *_PREDICTION,
        *_ADAPTERS,
        *_HEADS,
        *(f"{name}{QUANTISED}" for name in LINEAR_INPUTS),
        *("q_latent", "kv_latent", "k_rope", "k_nope", "k_turned", "chosen"),
        *(f"{name}_rows" for name in _HEADS),
        *(f"{name}{order}_raw" for name in "qk" for order in ("", "_rows")),
        *(f"{name}_repeated" for name in "kv"),
        *(f"{norm}_out" for norm in NORMS),
        *(f"{n}_{s}" for n in (*NORMS, *_MORE_NORMS) for s in ("wide", "root", "scaled")),
        *(f"attn_{name}" for name in _SCORES),
        *(f"{name}_mask" for name in ("embedding", "attn_residual", "layer_output")),
    }
)
"""The activation names of all models and stacks. Each model has only some of them, so a rule may
name an activation that a problem does not have."""
