"""The operators of a model of which only some weights train, and what they save then.

A frozen linear saves no input, and an operator none of whose inputs has a gradient saves nothing.
An adapter (Hu et al. 2021, arXiv 2106.09685) changes a linear to y = x W + s (x A) B. Separate
operators compute x A, from a copy of x if the adapter applies dropout to it or has another type;
the linear's operator multiplies by B. The adapter saves the input of A if A trains (LoRA-FA trains
only B, arXiv 2308.03303), and x A. Source of the copies and sums: PEFT, tuners/lora/layer.py. A
bottleneck adapter (Houlsby et al. 2019, arXiv 1902.00751) follows attention and the MLP: a linear
to few columns, GELU, a linear back, and a sum with the adapter's input. Each product widens the
whole weight of a 4- or 8-bit linear (bitsandbytes, autograd/_functions.py). With tensor parallelism
adapters are those of Megatron Bridge (peft/utils.py, ParallelLinearAdapter). At a column-parallel
linear, ranks split the columns of A and save its gathered input; at a row-parallel linear they
split the rows of A and also gather the product with B. They always split the columns of B.
Deviations: ranks sum products with A instead of gathering them, and gather a norm's output twice,
for the linear and for the adapter. Each expert of a rank has its A and B, in grouped products as
its linears have (ms-swift 4.6, swift/megatron/tuners/lora.py): the gate and the up projection,
which are one linear, have one A. Norms that PEFT made fp32 have fp32 outputs, and a linear of
bitsandbytes returns the type of its input (nn/modules.py, Linear4bit), so layers pass fp32 on;
attention casts its inputs to 16 bits. Weights that train beside low-rank adapters are copies, and
the frozen ones stay (PEFT, utils/other.py, ModulesToSaveWrapper: modules_to_save and
original_module). Deviations: the first layer's input has a gradient only if recomputation is
reentrant (enable_input_require_grads); if layers save their input, the first layer does too, and
the head keeps the input of its linear, so that plans can compute from them again.
"""

from collections.abc import Iterator
from math import ceil
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from rematbench.costs.operators.kernels import Elementwise, Gemm, Kernel
from rematbench.costs.operators.ops import (
    Activation,
    Comm,
    Op,
    OpTable,
    memory_kernel,
    without_activation,
)
from rematbench.inputs.system import System
from rematbench.workload import PACKED_BYTES, Workload

FP32 = 4
LINEARS = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "proj"}
LINEARS |= {"gate": "fc1", "up": "fc1", "down": "fc2"}
"""The operator of each linear that an adapter may adapt."""
WIDE = (
    *("embedding_out", "layer_input", "attn_residual", "gate_out", "up_out", "act_out"),
    *("fc2_in", "fc2_out", "layer_output"),
)
"""The tensors of a layer that are fp32 if norms are fp32, in addition to the outputs of norms."""
BOTTLENECKS = {"proj_out": "attn", "fc2_out": "mlp"}
"""The tensors that bottleneck adapters read, with a word for the adapters' own tensors."""
_OUTPUTS = {"o": "proj_out", "down": "fc2_out", "gate": "gate_out", "up": "up_out"}


class Place(Struct, frozen=True, order=True):
    """`trains`: whether weights (or adapters) of a part of the model train; `differentiated`:
    whether the part's input has a gradient."""

    trains: bool = True
    differentiated: bool = True


def place_of(layer: int, work: Workload, *, embedded: bool) -> Place:
    """The `Place` of a layer, or of the head if `layer` is the number of layers.  `embedded`:
    whether the embedding trains."""
    if work.trains_all:
        return Place()
    inside = work.adapted or work.trains("norms") or not work.trained_parts
    below = embedded or (inside and layer > work.frozen_layers)
    return Place(trains=layer >= work.frozen_layers, differentiated=below)


def trained_table(
    table: OpTable, work: Workload, system: System, place: Place, tp: int = 1
) -> OpTable:
    """The operators of a part on one of `tp` ranks; if `work` trains only some weights, without
    what the frozen weights do not need."""
    return table if work.trains_all else _Trainer(table, work, system, place, tp).table()


def _is_wide(name: str) -> bool:
    """Whether a tensor of a layer is fp32 if norms are fp32."""
    return name in WIDE or name.endswith("norm_out")


def _reads_weights(kernel: Kernel) -> bool:
    return isinstance(kernel, Gemm) or (isinstance(kernel, Elementwise) and kernel.of_weights)


def _groups(op: Op) -> int:
    """The number of experts whose linears an operator multiplies by; 1 for any other operator."""
    return next(one.batch for one in op.forward if isinstance(one, Gemm)) if op.of_experts else 1


def _doubled(comm: Comm | None) -> Comm | None:
    """The collective of a linear, with the bytes of its adapter added. If the linear all-reduces,
    the adapter gathers its product, which costs half of an all-reduce."""
    halves = 3 if comm and comm.kind == "all_reduce" else 4
    return comm and replace(comm, nbytes=comm.nbytes * halves // 2)


class _Trainer:
    """Rewrites the operators of one part in forward order."""

    def __init__(
        self, table: OpTable, work: Workload, system: System, place: Place, tp: int
    ) -> None:
        self.tp, self.gathered = tp, dict[str, str]()
        self.part, self.work, self.system, self.place = table.part, work, system, place
        self.e = work.element_bytes
        self.width = max(FP32, self.e) if work.trained_dtype == "fp32" else self.e
        self.widens = work.trained_dtype != "stack"
        self.old, self.activations = table, dict(table.activations)
        self.widened = work.fp32_norms and work.base_dtype in PACKED_BYTES and self.e < FP32
        for name in filter(_is_wide, self.activations if self.widened else ()):
            one = self.activations[name]
            self.activations[name] = replace(one, row_bytes=2 * one.row_bytes)
        self.first = {"layer": "layer_input", "head": "layer_output"}.get(table.part, "")
        self.live = {self.first} if place.differentiated else set[str]()
        if self.first and not place.differentiated:
            self._still(self.first)
        self.adapted = work.targets if table.part == "layer" and place.trains else ()
        self.unmade: list[str] = []
        self.behind: dict[str, str] = {}  # a bottleneck adapter's output, by its input

    def table(self) -> OpTable:
        ops = [new for op in self.old.ops for new in self._with_bottleneck(op)]
        found = OpTable(part=self.part, ops=tuple(ops), activations=self.activations)
        for name in self.unmade:
            found = without_activation(found, name)
        return found

    def _still(self, *names: str) -> None:
        for name in names:
            self.activations[name] = replace(self.activations[name], differentiable=False)

    def _rewritten(self, op: Op) -> Iterator[Op]:
        """Yield the operators of an operator's adapters, and then the changed operator."""
        whole = self._trains(op)
        targets = self._targets(op)
        op = replace(op, **self._held(op, whole=whole))
        op = op if whole else self._frozen(op)
        if op.is_matrix and op.inputs[0] not in self.live:
            inner = tuple(one for one in op.backward_input if not _reads_weights(one))
            unread = (op.widened_bytes[0], 0)
            op = replace(op, backward_input=inner if targets else (), widened_bytes=unread)
        for target in targets:
            yield from self._inputs(op, target, split=op.reduce is not None)
        if targets:
            op = self._adapted(op, targets)
        if op.trained_parameters or not self.live.isdisjoint(op.inputs):
            self.live.update(name for name in op.outputs if self.activations[name].differentiable)
            yield replace(op, alias_inputs=tuple(n for n in op.alias_inputs if n in self.live))
            return
        self._still(*op.outputs)
        kept = tuple(name for name in op.saves if name == self.first)
        op = replace(op, saves=kept, backward_input=(), alias_inputs=(), scratch_backward_bytes=0)
        yield replace(op, grad_gather=None, grad_reduce=None, regather=None)

    def _trains(self, op: Op) -> bool:
        work, place = self.work, self.place
        if not work.partly:
            return True
        if not (work.adapted or work.trained_parts):  # only the first layers are frozen
            return place.trains
        if op.name in ("embedding", "lm_head"):
            ends = {"head" if op.name == "lm_head" else "embedding"}
            ends |= {"head", "embedding"} if work.model.tied_embeddings else set()
            return any(map(work.trains, ends))
        return place.trains and op.name.endswith("norm") and work.trains("norms")

    def _held(self, op: Op, *, whole: bool) -> dict[str, Any]:
        """The changed fields of an operator: the size of its weights and how many of them train."""
        own, packed = self.system.states.param_bytes, PACKED_BYTES.get(self.work.base_dtype)
        if whole:
            copied = op.parameters if self.work.lora_rank else 0
            return {"parameters": self._wide(op.parameters) + copied, "trained": op.parameters}
        if packed is None or not op.is_matrix or self.part != "layer" or op.replicated:
            return {"trained": 0}
        gemms = [one for one in op.forward if isinstance(one, Gemm)]
        weights = sum(one.n * one.k * one.batch for one in gemms)
        rest = op.parameters - weights
        largest = max(one.n * one.k for one in gemms)
        if not self.system.kernels.fused_linears and not op.of_experts:
            columns = [self.activations[name].row_bytes for name in op.outputs]
            largest = largest * max(columns) // sum(columns)
        return {
            "parameters": ceil(weights * packed / own) + rest,
            "trained": 0,
            "widened_bytes": (largest * self.e,) * 2,
        }

    def _wide(self, count: int) -> int:
        """The size of `count` training weights, counted in parameters of the stack's precision."""
        own = self.system.states.param_bytes
        return ceil(count * max(FP32, own) / own) if self.widens else count

    def _frozen(self, op: Op) -> Op:
        if op.name.endswith("norm"):
            scaled = [name for name in op.outputs if name.endswith("_scaled")]
            self.unmade += scaled
            if self.widened and (wide := f"{op.name}_wide") in op.saves:
                self.unmade.append(wide)  # the input is fp32 already
                return replace(op, saves=(op.inputs[0], *op.saves))
            return op
        if self.part == "embedding":
            return replace(op, backward_weight=())
        if not op.is_matrix:
            return op
        widened = self._widened(op)
        return replace(
            op,
            saves=tuple(n for n in op.saves if self.part == "head" or n != op.inputs[0]),
            forward=(*widened, *op.forward),
            backward_input=(*widened, *op.backward_input),
            backward_weight=(),
            regather=None,
        )

    def _widened(self, op: Op) -> tuple[Kernel, ...]:
        """The kernel that widens the packed weights of a linear; it reads and writes them."""
        packed = PACKED_BYTES.get(self.work.base_dtype)
        if packed is None or self.part != "layer" or op.replicated:
            return ()
        count = sum(one.n * one.k * one.batch for one in op.forward if isinstance(one, Gemm))
        names = (*op.inputs[:1], *op.outputs) if self.widened else ()
        casts = sum(self.activations[name].nbytes for name in names if _is_wide(name)) * 3 // 2
        moved = Elementwise(ceil(count * (packed + self.e)), of_weights=True)
        return (moved, *([Elementwise(casts, launches=0)] if casts else []))

    def _with_bottleneck(self, op: Op) -> Iterator[Op]:
        changed = {
            field: tuple(self.behind.get(name, name) for name in getattr(op, field))
            for field in ("inputs", "saves", "alias_inputs", "holds")
        }
        yield from self._rewritten(replace(op, **changed) if self.behind else op)
        if self.work.bottleneck and self.part == "layer" and self.place.trains:
            for name in op.outputs:
                if name in BOTTLENECKS:
                    yield from self._bottleneck(name, f"bottleneck_{BOTTLENECKS[name]}")

    def _bottleneck(self, x: str, stem: str) -> Iterator[Op]:
        """Yield the operators of a bottleneck adapter that follows the tensor `x`."""
        width, live, (rows, row_bytes) = self.work.bottleneck, x in self.live, self._size(x)
        hidden = row_bytes // self.e
        low, act, up, out = (
            self._add(f"{stem}_{kind}", x, columns, self.e, live=True)
            for kind, columns in zip(
                ("low", "act", "up", "out"), (width, width, hidden, hidden), strict=True
            )
        )
        inner, outer = (
            memory_kernel(n * self.activations[t].nbytes) for n, t in ((2, low), (3, up))
        )
        sizes = {"down": (x, low, hidden, width), "up": (act, up, width, hidden)}
        made = {
            name: Op(
                name=f"{stem}_{name}",
                inputs=(source,),
                outputs=(target,),
                saves=(source,),
                forward=(Gemm(rows, n, k),),
                backward_input=(Gemm(rows, k, n),) if name == "up" or live else (),
                backward_weight=(Gemm(k, n, rows),),
                parameters=self._wide(n * (k + 1)),
                trained=n * (k + 1),
            )
            for name, (source, target, k, n) in sizes.items()
        }
        yield made["down"]
        yield Op(
            name=f"{stem}_gelu", inputs=(low,), outputs=(act,), saves=(low,), forward=inner,
            backward_input=inner,
        )  # fmt: skip
        yield made["up"]
        skip = (up, x) if live else (up,)
        yield Op(
            name=f"{stem}_add", inputs=(up, x), outputs=(out,), forward=outer, alias_inputs=skip
        )
        self.live.update((low, act, up, out))
        self.behind[x] = out

    def _size(self, name: str) -> tuple[int, int]:
        return self.activations[name].rows, self.activations[name].row_bytes

    def _targets(self, op: Op) -> dict[str, str]:
        """The names of an operator's adapters, each with the output to which it adds."""
        of, _, linear = op.name.rpartition("_")
        names = [name for name in self.adapted if LINEARS[name] == linear]
        if op.of_experts:
            return {op.name: op.outputs[0]} if names else {}
        before, found = f"{of}_" if of == "shared" else "", dict[str, str]()
        for name in names:
            stem = before + ("out" if before + name == "shared_down" else _OUTPUTS.get(name, name))
            outputs = [o for o in op.outputs if o.removesuffix("_raw") in (stem, f"{stem}_rows")]
            found |= dict.fromkeys([before + name] * bool(outputs), "".join(outputs))
        return found

    def _columns(self, name: str) -> int:
        return self.old.activations[name].row_bytes // self.e

    def _add(self, name: str, like: str, columns: int, width: int, *, live: bool) -> str:
        rows = self.activations[like].rows
        self.activations[name] = Activation(name, rows, columns * width, live)
        return name

    def _gather(self, op: Op, target: str, x: str, columns: int) -> Iterator[Op]:
        """Yield the gather of the input's rows over tensor-parallel ranks. If the stack fuses
        linears, the adapters of one linear share it."""
        if x in self.gathered and self.system.kernels.fused_linears:
            return
        live, rows = x in self.live, self.activations[op.outputs[0]].rows
        self.gathered[x] = name = f"lora_{target}_rows"
        self.activations[name] = Activation(name, rows, columns * self.width, live)
        self.live.update({name} if live else ())
        nbytes = self.activations[name].nbytes
        back = Comm("reduce_scatter", "tp", nbytes) if live else None
        gather = Comm("all_gather", "tp", nbytes)
        yield Op(name=name, inputs=(x,), outputs=(name,), reduce=gather, grad_gather=back)

    def _inputs(self, op: Op, target: str, *, split: bool) -> Iterator[Op]:
        """Yield the operators that copy the input of an adapter and multiply it by A. `split`: the
        linear is row-parallel, so each rank has some columns of the input."""
        work, (x,) = self.work, op.inputs
        live, rows = x in self.live, self.activations[x].rows
        columns, source = self._columns(x), x
        both = work.lora_train == "ab"
        packed = work.base_dtype in PACKED_BYTES  # packed linears pass their input to adapters
        if work.lora_dropout or (self.widens and (self.width != self.e or not packed)):
            source = self._add(f"lora_{target}_in", x, columns, self.width, live=live)
            mask: tuple[str, ...] = ()
            if work.lora_dropout:
                mask = (self._add(f"lora_{target}_mask", x, columns, 1, live=False),)
            moved = memory_kernel(*(self.activations[name].nbytes for name in (x, source, *mask)))
            yield Op(
                name=source,
                inputs=(x,),
                outputs=(source, *mask),
                saves=mask if live else (),
                forward=moved,
                backward_input=moved if live else (),
                adapts=op.name,
            )
            self.live.update({source} if live else ())
        rank, sums, back = work.lora_rank, None, None
        tp, count = 1 if op.of_experts else self.tp, _groups(op)
        if tp > 1 and not split and self.activations[op.outputs[0]].rows != rows:
            yield from self._gather(op, target, source, columns)
            source = self.gathered[source]
            rows = self.activations[source].rows
        if tp > 1:
            sums = Comm("all_reduce", "tp", rows * rank * self.width)
            rank = rank if split else rank // tp
            if not split and live and source not in self.gathered.values():
                back = Comm("all_reduce", "tp", rows * columns * self.width)
        each = ceil(rows / count)
        low = self._add(f"lora_{target}", source, work.lora_rank, self.width, live=live or both)
        self.live.update({low} if live or both else ())
        yield Op(
            name=low,
            inputs=(source,),
            outputs=(low,),
            saves=(source,) if both else (),
            forward=(Gemm(each, rank, columns, count),),
            backward_input=(Gemm(each, columns, rank, count),) if live else (),
            backward_weight=(Gemm(columns, rank, each, count),) if both else (),
            parameters=self._wide(count * columns * rank),
            trained=count * columns * rank if both else 0,
            of_experts=op.of_experts,
            reduce=sums,
            grad_gather=sums if live or both else None,
            grad_reduce=back,
            adapts=op.name,
        )

    def _adapted(self, op: Op, targets: dict[str, str]) -> Op:
        rank, count = self.work.lora_rank, _groups(op)
        low, outs = tuple(f"lora_{target}" for target in targets), [*targets.values()]
        rows = self.activations[low[0]].rows
        each = ceil(rows / count)
        whole = self.tp if op.reduce is not None else 1  # row-parallel outputs are whole
        widths = [self._columns(out) // whole for out in outs]
        trained = count * sum(widths) * rank
        kernels: dict[str, tuple[Kernel, ...]] = {
            "forward": tuple(Gemm(each, width, rank, count) for width in widths),
            "backward_input": tuple(
                Gemm(each, rank, width, count)
                for name, width in zip(low, widths, strict=True)
                if name in self.live
            ),
            "backward_weight": tuple(Gemm(rank, width, each, count) for width in widths),
        }
        scratch = 0
        if not self.system.kernels.fused_linears:
            kernels["forward"] += self._sums(rows * sum(widths), forward=True, count=len(widths))
            kernels["backward_input"] += self._sums(
                rows * sum(widths), forward=False, count=len(widths)
            )
            scratch = 2 * self.width * rows * max(widths)
        op = replace(
            op,
            inputs=(*op.inputs, *low),
            saves=(*op.saves, *low),
            parameters=op.parameters + self._wide(trained),
            trained=op.trained_parameters + trained,
            scratch_forward_bytes=max(op.scratch_forward_bytes, scratch),
            **{name: (*getattr(op, name), *more) for name, more in kernels.items()},
        )
        if whole > 1:
            op = replace(op, reduce=_doubled(op.reduce), grad_gather=_doubled(op.grad_gather))
        return self._dora(op, [*targets], outs) if self.work.dora else op

    def _sums(self, elements: int, *, forward: bool, count: int) -> tuple[Kernel, ...]:
        """The kernels that scale an adapter's output and add it to the linear's output, with a cast
        if the two types differ."""
        cast = 0 if self.width == self.e else self.width + self.e
        each = 4 * self.width + self.e + cast if forward else 2 * self.width + cast
        launches = (2 if forward else 1) + bool(cast)
        return (Elementwise(elements * each, count * launches),)

    def _dora(self, op: Op, targets: list[str], outs: list[str]) -> Op:
        """A linear whose adapters also train a magnitude for each output column. It saves the
        outputs of the linear and of the adapter. Each forward computes the norm of W + s B A; the
        product of A and B is made with an identity matrix and then freed (PEFT,
        tuners/lora/dora.py)."""
        (x, *_), made, extra, scratch, kernels = op.inputs, list[str](), 0, 0, list[Kernel]()
        columns = self._columns(x)
        for target, out in zip(targets, outs, strict=True):
            width = self._columns(out)
            for kind in ("base", "out"):
                made.append(self._add(f"lora_{target}_{kind}", x, width, self.e, live=False))
            extra += width
            scratch = max(scratch, (columns**2 + 3 * columns * width) * self.width)
            kernels += [Gemm(columns, self.work.lora_rank, columns)]
            kernels += [Gemm(columns, width, self.work.lora_rank)]
        return replace(
            op,
            outputs=(*op.outputs, *made),
            saves=(*op.saves, *made),
            forward=(*op.forward, *kernels),
            parameters=op.parameters + FP32 * extra // self.system.states.param_bytes,
            trained=op.trained_parameters + extra,
            scratch_forward_bytes=max(op.scratch_forward_bytes, scratch),
        )
