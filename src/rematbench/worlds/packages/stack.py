"""Tensors that a baseline's stack keeps beyond the operator table, sized from shapes.

A prediction describes the problem's system (the authors' fused kernels). A trace describes the
package as installed on this machine. If the package keeps other tensors than the system, the
baseline's stack.py names them, and the same plan is sized with them. Any remaining difference is an
error of the prediction or of the trace.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, cast

from msgspec import Struct
from msgspec.structs import replace

from rematbench.costs.operators.block import LayerKind
from rematbench.costs.operators.ops import Activation, Op, OpTable, Part
from rematbench.engine.lowering.lower import lower
from rematbench.engine.program.program import RankProgram
from rematbench.evaluate.evaluation import (
    PlanEvaluation,
    RankBytes,
    evaluate_program,
    program_bytes,
)
from rematbench.evaluate.evaluator import reserved
from rematbench.inputs.system import with_facts
from rematbench.plan import Plan, Unsupported
from rematbench.plugins.discover import load_baseline
from rematbench.plugins.registry import Composition, Method
from rematbench.problem import Evaluator, Problem
from rematbench.worlds.packages.process import baselines


class Extra(Struct, frozen=True, kw_only=True):
    """A tensor of one micro-batch and one layer (or embedding, or head: `part`) that the operator
    table does not have.

    The tensor lives from the forward of `producer` to the backward of `saved_by`.  Without
    `saved_by` the tensor lives only inside the backward of `producer`, or, with `forward`, only
    inside the forward of `producer`.  Bytes are rows x row_bytes.  `why` is the reason why the
    package holds the tensor.
    """

    name: str
    dtype: str
    rows: int
    row_bytes: int
    producer: str
    saved_by: str = ""
    part: Part = "layer"
    forward: bool = False
    why: str

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes


class Stack(Struct, frozen=True, kw_only=True):
    """The tensors and facts of a baseline's stack under its settings. `fused_swiglu`: whether gate
    and product are one function (None: as in the problem's system). `shares_gathers`: gathered
    inputs share one buffer. `loss_over_logits`: the loss works in place on the logits. `once`:
    bytes, by name, of tensors that are allocated once and are alive at every peak. `system`: facts
    of the stack that differ in this package, such as the bytes per element of a state."""

    extras: tuple[Extra, ...] = ()
    fused_swiglu: bool | None = None
    shares_gathers: bool = False
    loss_over_logits: bool = False
    once: dict[str, int] = {}
    system: dict[str, int] = {}

    def problem(self, problem: Problem, evaluator: Evaluator | None = None) -> "StackProblem":
        system = problem.system
        if self.fused_swiglu is not None:
            system = with_facts(system, fused_swiglu=self.fused_swiglu)
        if self.system:
            system = with_facts(system, **self.system)
        return StackProblem(
            workload=problem.workload,
            cluster=problem.cluster,
            system=system,
            layout=problem.layout,
            calibration=problem.calibration,
            attention=problem.attention,
            backend=problem.backend,
            evaluator=evaluator,
            stack=self,
        )


EMPTY_STACK = Stack()


@dataclass(frozen=True, eq=False)
class StackProblem(Problem):
    stack: Stack = EMPTY_STACK

    def _extended(self, table: OpTable) -> OpTable:
        extras = [extra for extra in self.stack.extras if extra.part == table.part]
        saved = {e.name: Activation(e.name, e.rows, e.row_bytes, False) for e in extras}
        return OpTable(
            part=table.part,
            ops=tuple(self._op(op, extras) for op in table.ops),
            activations={
                **table.activations,
                **{e.name: saved[e.name] for e in extras if e.saved_by},
            },
        )

    def _op(self, op: Op, extras: list[Extra]) -> Op:
        made = tuple(e.name for e in extras if e.producer == op.name and e.saved_by)
        saves = tuple(e.name for e in extras if e.saved_by == op.name)
        inside = [e for e in extras if e.producer == op.name and not e.saved_by]
        first, second = (sum(e.nbytes for e in inside if e.forward == way) for way in (True, False))
        shared = self.stack.shares_gathers and op.has_weight
        in_place = self.stack.loss_over_logits and op.name == "loss"
        return replace(
            op,
            outputs=(*op.outputs, *made),
            saves=(*op.saves, *saves),
            scratch_forward_bytes=0 if in_place else op.scratch_forward_bytes + first,
            scratch_backward_bytes=op.scratch_backward_bytes + second,
            gathered_bytes=0 if shared else op.gathered_bytes,
        )

    @cached_property
    def _layers(self) -> dict[LayerKind, OpTable]:
        return {window: self._extended(table) for window, table in super()._layers.items()}

    @cached_property
    def embedding(self) -> OpTable:
        return self._extended(super().embedding)

    @cached_property
    def head(self) -> OpTable:
        return self._extended(super().head)


@cache
def _module(baseline: str) -> ModuleType | None:
    path = Path(baselines()[baseline].origin).with_name("stack.py")
    return load_baseline(path) if path.exists() else None


def stack_of(baseline: str, policy: Method, problem: Problem) -> Stack | None:
    """The stack of a policy on a problem, from the baseline's `stack.py`; None without this
    file."""
    module = _module(baseline)
    return cast(Stack, module.stack(policy, problem)) if module else None


def package_problem(method: Composition, problem: Problem) -> Problem:
    """The problem with the tensors of the package's stack, evaluated with the package's activation
    peaks; the unchanged problem if the baseline has no `stack.py` or the policy gives no plan."""
    policy = method.methods[0]
    stack = stack_of(policy.name, policy, problem)
    here = problem if stack is None else stack.problem(problem, partial(_evaluated, policy))
    return problem if isinstance(method.plan(here), Unsupported) else here


def _evaluated(policy: Method, problem: Problem, plan: Plan) -> PlanEvaluation:
    """The evaluation of a problem with a package's tensors. For the allocator's replay, bytes that
    the package holds beyond the plan's ledger are resident (in `pools`). If the package holds fewer
    bytes than the ledger, it makes gradients in the backward that the plan counts as a state; these
    bytes are subtracted from the resident gradients."""
    assert isinstance(problem, StackProblem)
    program = lower(plan, problem)
    planned = program_bytes(problem, plan, program)
    ranks, resident = [], []
    for rank, held in zip(program.ranks, planned, strict=True):
        peak = activation_peak(policy, problem, rank, held)
        beyond = peak - held.activation_peak
        ranks.append(replace(held, activation_peak=peak))
        pools, gradient = held.pools + max(0, beyond), held.gradient + min(0, beyond)
        resident.append(replace(held, pools=pools, gradient=max(0, gradient)))
    return replace(
        evaluate_program(problem, plan, program, ranks=tuple(ranks)),
        reserved_bytes=reserved(problem, program, resident).nbytes,
    )


def activation_peak(
    policy: Method, problem: StackProblem, rank: RankProgram, planned: RankBytes
) -> int:
    """Peak bytes of a rank's activations in the package, with the tensors that are allocated
    once.  The baseline's `stack.py` may compute the peak from the rank's program; otherwise it is
    the peak of `planned` (the ledger of the plan lowered for `problem`)."""
    walk = getattr(_module(policy.name), "activation_peak", None)
    peak: int = walk(policy, problem, rank) if walk else planned.activation_peak
    return peak + sum(problem.stack.once.values())


class LayerTensor(NamedTuple):
    """One tensor of a layer: its bytes in the operator table and in a baseline's stack."""

    name: str
    dtype: str
    rows: int
    row_bytes: int
    table_bytes: int
    stack_bytes: int
    why: str


def _dtype(name: str, precision: str) -> str:
    if name.endswith("_mask"):
        return "bool"
    return "fp32" if name == "lse" else precision


def layer_tensors(problem: Problem, stack: Stack) -> Iterator[LayerTensor]:
    """The tensors that one layer saves for one micro-batch, with their bytes in the operator table
    and in the stack; then the extra tensors that live only inside a forward or a backward."""
    plain, here = problem.layer(0), stack.problem(problem).layer(0)
    extras = {extra.name: extra for extra in stack.extras if extra.part == "layer"}
    for name in dict.fromkeys((*plain.saved, *here.saved)):
        sizes = [t.activations[name].nbytes if name in t.saved else 0 for t in (plain, here)]
        extra = extras.get(name)
        dtype = extra.dtype if extra else _dtype(name, problem.workload.precision)
        why = extra.why if extra else ""
        if sizes[0] > sizes[1]:
            why = "gate and product are one function, which saves its input only"
        tensor = plain.activations.get(name) or here.activations[name]
        yield LayerTensor(name, dtype, tensor.rows, tensor.row_bytes, sizes[0], sizes[1], why)
    for extra in extras.values():
        if not extra.saved_by:
            way = "forward" if extra.forward else "backward"
            why = f"in the {way} of {extra.producer} only: {extra.why}"
            shape = extra.rows, extra.row_bytes
            yield LayerTensor(extra.name, extra.dtype, *shape, 0, extra.nbytes, why)
