"""Operators of a layer whose linears are quantised by a recipe (inputs/recipes.py).

TransformerEngine quantises the input of a linear once, and the linear saves this 8-bit copy and its
scales instead of the input. A separate operator makes the copy, so plans can treat it like any
saved tensor. If another operator saves the input too and the recipe allows it, the linear saves the
input and quantises it again in its backward (megatron-core 0.16.1, attention.py and
shared_experts.py: set_save_original_input). torchao saves the input in 16 bits and casts the input
and the weight at each use. Under sequence parallelism, gathers of inputs and of output gradients
move quantised bytes; if a tensor has one scale from its current values, ranks first reduce its
largest element (with_amax_reduction of TransformerEngine's linears). Each quantisation reads its
tensor in 16 bits and writes its quantised forms. Deviations: norms and activations do not write
quantised outputs, and the rows of experts are not padded to the recipe's multiples.
"""

from math import ceil

from msgspec.structs import replace

from rematbench.costs.operators.kernels import Elementwise, Gemm, Kernel
from rematbench.costs.operators.ops import QUANTISED, Activation, Comm, Op, OpTable
from rematbench.inputs.facts import CPU
from rematbench.inputs.layout import Layout
from rematbench.inputs.recipes import holds_copies, library_of, recipe_of
from rematbench.inputs.system import System
from rematbench.workload import Workload

EAGER_BYTES, EAGER_KERNELS, EAGER_SCRATCH = 33, 6, 8
"""Bytes moved per element, kernels, and scratch bytes per element of torchao's cast without a
compiler.  The kernels: absolute values, maximum, cast to fp32, scaling, clamp, cast to 8 bits
(torchao 0.9, float8/float8_scaling_utils.py and float8_utils.py: bf16 is read twice and copied
once, fp32 is written and read three times, and two fp32 tensors are live at a time)."""
LARGEST = Comm("amax", "tp", 4)
PLAIN = ("router", "index", "lm_head", "predict_head", "shared_add")


def quantised_table(
    table: OpTable, work: Workload, layout: Layout, system: System, generation: str
) -> OpTable:
    """The operators of a layer whose linears the recipe of `work` quantises."""
    return _Quantiser(table, work, layout, system, generation).table()


def is_quantised(op: Op) -> bool:
    """Whether an operator is a linear that recipes quantise."""
    matrix = any(isinstance(one, Gemm) for one in op.forward)  # is_matrix leaves out shared weights
    return matrix and op.has_weight and op.name not in PLAIN


SCALE_LAUNCHES = 3
"""Kernels that compute a scale before the cast: they clear the largest element, look for it, and
compute the scale (TransformerEngine, csrc/quantizer.cpp, Float8CurrentScalingQuantizer, and
common/recipe/current_scaling.cu)."""


class _Quantiser:
    def __init__(
        self, table: OpTable, work: Workload, layout: Layout, system: System, generation: str
    ) -> None:
        recipe, library = recipe_of(work), library_of(system)
        assert recipe is not None
        self.old, self.recipe, self.e = table, recipe, work.element_bytes
        self.forms, self.compiled = recipe.forms(generation), system.kernels.compiled
        self.casts = library == "torchao"
        self.by_pass = generation == CPU or not (
            (self.casts and work.fp8_params) or holds_copies(work, system, layout.zero_stage)
        )
        self.copies: dict[str, Activation] = {}
        linears = [op for op in table.ops if is_quantised(op)]
        self.kept = {name for op in table.ops if op not in linears for name in op.saves}

    def table(self) -> OpTable:
        ops = [new for op in self.old.ops for new in self._rewritten(op)]
        tensors: dict[str, Activation] = {}
        for name, tensor in self.old.activations.items():
            tensors[name] = tensor
            if name in self.copies:
                tensors[f"{name}{QUANTISED}"] = self.copies[name]
        return OpTable(part=self.old.part, ops=tuple(ops), activations=tensors)

    def _rewritten(self, op: Op) -> list[Op]:
        if not is_quantised(op):
            return [op]
        (x,), products = op.inputs, [one for one in op.forward if isinstance(one, Gemm)]
        count, batch = sum(one.m * one.n * one.batch for one in products), products[0].batch
        weights = self._cast(sum(one.n * one.k * one.batch for one in products), batch)
        weights *= self.by_pass
        gradients, tensor = self._cast(count, batch), self.old.activations[x]
        elements = tensor.nbytes // self.e
        keeps = self.casts or (self.recipe.keeps_original and x in self.kept)
        cast = self._cast(elements, batch, 1 if keeps else self.forms)
        changed = replace(
            op,
            forward=(*cast * keeps, *weights, *self._narrow(op.forward)),
            backward_input=(*gradients, *weights, *self._narrow(op.backward_input)),
            backward_weight=(*cast * keeps, *self._narrow(op.backward_weight)),
            scratch_forward_bytes=op.scratch_forward_bytes + self._beside(elements),
            scratch_backward_bytes=op.scratch_backward_bytes + self._beside(count, self.forms),
            **self._sent(op, tensor),
        )
        if keeps:
            return [changed]
        copy = f"{x}{QUANTISED}"
        saves = tuple(copy if name == x else name for name in op.saves)
        changed = replace(changed, inputs=(copy,), saves=saves)
        if x in self.copies:
            return [changed]
        columns = tensor.row_bytes // self.e
        self.copies[x] = Activation(
            name=copy,
            rows=tensor.rows,
            row_bytes=self.recipe.row_bytes(columns),
            differentiable=tensor.differentiable,
            copy_of=x,
            block_rows=self.recipe.rows,
        )
        amax, changed = changed.amax, replace(changed, amax=None)
        quantise = Op(
            name=copy,
            inputs=(x,),
            outputs=(copy,),
            forward=cast,
            adapts=op.name,
            amax=amax,
            row_local=self.recipe.rows > 0,
        )
        return [quantise, changed]

    def _cast(self, elements: int, batch: int, forms: int | None = None) -> tuple[Kernel, ...]:
        """The kernels that quantise a tensor of `elements` elements, in a loop over `batch`
        experts. A compiler looks for the largest element in the kernel that makes the tensor."""
        passes = 0 if self.compiled else self.recipe.amax_passes
        written = (forms or self.forms) * self.recipe.bits / 8
        if self.casts and not self.compiled:
            return (Elementwise(elements * EAGER_BYTES, EAGER_KERNELS, batch),)
        nbytes = elements * (self.e * (1 + passes) + written)
        return (Elementwise(ceil(nbytes), 1 + passes * SCALE_LAUNCHES, batch),)

    def _beside(self, elements: int, forms: int = 1) -> int:
        """Scratch bytes of a linear for `forms` quantised forms of a tensor."""
        made = ceil(elements * self.recipe.bits / 8) * (forms if self.forms > 1 else 0)
        return made + (EAGER_SCRATCH * elements if self.casts and not self.compiled else 0)

    def _narrow(self, kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(replace(one, narrow=True) if isinstance(one, Gemm) else one for one in kernels)

    def _sent(self, op: Op, tensor: Activation) -> dict[str, Comm | int | None]:
        """The collectives of a linear over tensor-parallel ranks, which move quantised bytes."""
        if self.casts:
            return {}
        columns = tensor.row_bytes // self.e
        share = self.recipe.row_bytes(columns) / tensor.row_bytes

        def fewer(comm: Comm | None, share: float) -> Comm | None:
            return comm and Comm(comm.kind, comm.group, ceil(comm.nbytes * share))

        def first(comm: Comm | None) -> Comm | None:
            gathers = comm is not None and (comm.kind, comm.group) == ("all_gather", "tp")
            return LARGEST if gathers and self.recipe.reduces == "tensor" else None

        gathered = min(1.0, self.recipe.gathered_forms * share)
        return {
            "gather": fewer(op.gather, share),
            "regather": fewer(op.regather, share),
            "gathered_bytes": ceil(op.gathered_bytes * share),
            "grad_gather": fewer(op.grad_gather, gathered),
            "amax": first(op.gather),
            "grad_amax": first(op.grad_gather),
        }
