"""One immutable planning problem: workload, cluster, stack and layout, with operators and costs."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from functools import cached_property, lru_cache
from math import fsum
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from rematbench.costs.bind import CostModel
from rematbench.costs.offload_estimate import PipelineOffloadEstimator, pipeline_offload_estimator
from rematbench.costs.operators.adapters import Place, place_of, trained_table
from rematbench.costs.operators.block import (
    LayerKind,
    SharedVocabulary,
    embedding_table,
    head_table,
    layer_table,
    prediction_table,
    shared_vocabulary,
)
from rematbench.costs.operators.ops import Op, OpTable, rebuild_ops, without_weights
from rematbench.costs.operators.quantised import quantised_table
from rematbench.costs.states import (
    StateBytes,
    non_torch_bytes,
    room_bytes,
    state_bytes,
    unsharded_scales,
)
from rematbench.inputs.cluster import Cluster
from rematbench.inputs.constants import Calibration
from rematbench.inputs.facts import CPU
from rematbench.inputs.kernel_rates import RateError
from rematbench.inputs.layout import Layout, LayoutError
from rematbench.inputs.layout_rules import check_layout, unmodelled_of_experts
from rematbench.inputs.precision import attention_problem, peak_flop_per_s, sinks_problem
from rematbench.inputs.recipes import check_recipe, untimed
from rematbench.inputs.stages import base_partition, prediction_rank
from rematbench.inputs.system import AttentionBackend, StackChoice, System, TpOverlap
from rematbench.plan import VOCABULARY, Plan, state_fates
from rematbench.workload import Workload

AttentionKind = Literal["flash", "unfused"]
NOT_TIMED = "time not modelled: "


class Evaluation(Protocol):
    """The result of the chunk-level evaluator: seconds of a step, peak device bytes of each rank,
    and reserved bytes of the fullest rank."""

    @property
    def step_s(self) -> float: ...

    @property
    def peak_device_bytes(self) -> tuple[int, ...]: ...

    @property
    def reserved_bytes(self) -> int: ...


class Weight(NamedTuple):
    """The bytes of an evaluation, without its seconds."""

    peak_device_bytes: tuple[int, ...]
    reserved_bytes: int


@lru_cache(maxsize=64)
def _kinds_of(work: Workload, embedded: bool) -> tuple[LayerKind, ...]:
    """The kinds of a workload's layers.  `embedded`: whether the embedding trains."""
    model, count = work.model, work.model.num_layers
    windows = model.attention_window or (0,) * count
    return tuple(
        LayerKind(
            *(window, model.is_dense(i), place_of(i, work, embedded=embedded), i >= count),
            *(work.quantises(i, count), model.owner(i) != i, model.memory_of(i)),
        )
        for i, window in enumerate((*windows, *(0 for _ in range(model.mtp_layers))))
    )


Evaluator = Callable[["Problem", Plan], Evaluation]
Weigher = Callable[["Problem", Plan], Weight]


@dataclass(frozen=True, eq=False)
class Problem:
    """The planning problem that a method receives.

    `attention`: whether attention scores are in memory; `backend`: a fused kernel other than the
    stack's ("": the stack's).  A method that tunes its plan to the device leaves `reserve_bytes` of
    each device free.  `stack_choice`: the options of the stack that the run sets (`system` and
    `cluster` already follow them).  `evaluator` is the chunk-level evaluator; `weigher` computes
    the bytes of a plan without simulating time (the results of both are memoised).
    Raises LayoutError, and RateError for a kernel that the GPUs cannot run.
    """

    workload: Workload
    cluster: Cluster
    system: System
    layout: Layout
    calibration: Calibration
    attention: AttentionKind = "flash"
    evaluator: Evaluator | None = None
    weigher: Weigher | None = None
    backend: AttentionBackend | Literal[""] = ""
    reserve_bytes: int = 0
    stack_choice: StackChoice = field(default_factory=StackChoice)
    _memo: dict[bytes, Evaluation] = field(default_factory=dict, repr=False)
    _weights: dict[bytes, Weight] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.kernel == "unfused":
            object.__setattr__(self, "attention", "unfused")  # The stack has no fused kernel.
        else:
            self._check_attention()
        check_recipe(self.workload, self.system, self.cluster.generation)
        check_layout(self.layout, self.workload, self.system)
        _refuse_experts(self)

    def _check_attention(self) -> None:
        """Raise RateError if the stack has no fused attention for these GPUs and this precision."""
        generation, work = self.cluster.generation, self.workload
        problem = self.calibration.kernels.refusal(generation, self.kernel)
        if not problem and generation != CPU:
            problem = attention_problem(self.system, work.model, work.precision, self.backend)
            problem = problem or sinks_problem(work.model, self.kernel)
            problem = problem and f"{problem} (--attention unfused has a kernel)"
        if problem:
            raise RateError(problem)

    @cached_property
    def untimed(self) -> str:
        """Why the kernels' seconds are not predicted, in one line; empty if they are."""
        generation, precision = self.cluster.generation, self.workload.precision
        rates, tf32, missing = self.calibration.kernels, self.system.kernels.tf32, ""
        missing = self.workload.model.untimed or untimed(self.workload, generation)
        if self.workload.sample_len:
            missing = "samples of differing lengths (sample_len)"
        if not self.calibration.has_rates(generation):
            known = ", ".join(sorted(set(self.calibration.gpus) & set(rates.generations) - {CPU}))
            missing = (
                f"no kernel rates of {generation} (there are rates of {known}; a cluster file that "
                "names one of these as its generation is timed by that generation's efficiencies)"
            )
        elif self.kernel != "unfused" and (lacks := rates.lacks(generation, self.kernel)):
            missing = lacks
        elif not peak_flop_per_s(self.cluster, self.calibration, precision, tf32):
            key = "tf32" if precision == "fp32" and tf32 else precision
            missing = f"no {key} peak of {self.cluster.name} (its file may give {key}_flop_per_s)"
        return f"{NOT_TIMED}{missing}" if missing else ""

    def __getstate__(self) -> dict[str, object]:
        """The pickled state: the problem without cached chunks, costs and evaluations."""
        cached = ("chunks", "_costs")
        state = {key: value for key, value in self.__dict__.items() if key not in cached}
        return {**state, "_memo": {}, "_weights": {}}

    @property
    def kernel(self) -> AttentionBackend:
        """The attention kernel that runs."""
        fused = self.backend or self.system.attention_on(self.cluster.generation)
        return "unfused" if self.attention == "unfused" else fused

    def remade(self, **parts: Any) -> "Problem":
        """The problem with other parts, without the evaluations and weights of the old ones."""
        return replaced(self, **parts, _memo={}, _weights={})

    @property
    def chosen(self) -> StackChoice:
        """The stack choice that reproduces this problem: its attention kernel, the homes of its
        states and the overlap of its experts' exchanges."""
        system = self.system
        overlap = "delayed_wgrad" if system.experts.delayed_wgrad else "on"
        return msgspec.structs.replace(
            self.stack_choice,
            attention=self.backend or self.attention,
            optimizer="host" if system.host.optimizer_on_host else None,
            parameters="host" if system.host.parameters_on_host else None,
            ep_overlap=overlap if self.ep_overlaps else None,
        )

    @property
    def constants(self) -> tuple[str, str, str]:
        """The applicable entries of config/calibration.yaml: GPU generation, network, stack."""
        network = self.calibration.network_entry(self.cluster.constants)
        system = self.calibration.system_entry(self.system.constants)
        return self.cluster.generation, network, system

    @cached_property
    def chunks(self) -> dict[Hashable, object]:
        """A cache that lowering fills (`ChunkOps.of`, `ChunkOps.fates`)."""
        return {}

    @cached_property
    def tp_overlap(self) -> TpOverlap:
        """How the stack overlaps tensor-parallel collectives with GEMMs, given the links of this
        layout's groups."""
        ranks = self.system.parallel
        inside = self.cost.group("tp", 0).nodes == 1 or ranks.gemm_overlap_links == "all"
        return ranks.tp_overlap if inside or ranks.tp_overlap != "gemm" else "backward"

    @property
    def ep_overlaps(self) -> bool:
        """Whether experts' exchanges overlap the compute of another micro-batch wherever a forward
        follows a backward."""
        exchanges = self.layout.ep > 1 and self.system.experts.ep_overlap != "none"
        return exchanges and not self.system.host.launch_blocking

    @cached_property
    def non_torch_bytes(self) -> int:
        """Device bytes that the driver, the CUDA context and the communicators take."""
        return non_torch_bytes(self.cluster, self.layout, self.system, self.calibration)

    @property
    def usable_bytes(self) -> int:
        """Device bytes that the framework's allocator may reserve."""
        return self.cluster.hbm_bytes - self.non_torch_bytes

    @property
    def room_bytes(self) -> int:
        """Device bytes that processes may take: `usable_bytes` plus CUDA context and
        communicators."""
        return room_bytes(self.cluster, self.calibration)

    @cached_property
    def workspace_bytes(self) -> int:
        """Bytes of torch's allocator that each rank holds in addition to its states: cuBLAS and
        TransformerEngine workspaces, and scales that FSDP does not shard."""
        count = self.system.kernels.workspaces
        if self.workload.model.experts is not None:
            count += self.system.experts.expert_workspaces
        each = self.calibration.gpu_bytes(self.cluster.generation).workspace_bytes
        scales = unsharded_scales(self.workload, self.layout, self.system)
        return self.system.kernels.cublas_bytes + round(count * each) + scales

    @property
    def cost(self) -> "CostFacade":
        """Read-only costs: seconds and bytes of operators, links, states, and of whole plans."""
        return CostFacade(self, self._costs)

    @cached_property
    def _costs(self) -> dict[str, Any]:
        """The attributes of the problem's CostModel, which all facades share.  They do not refer to
        the problem, so an unused problem is freed without a garbage collection."""
        return vars(
            CostModel(
                cluster=self.cluster,
                system=self.system,
                layout=self.layout,
                workload=self.workload,
                calibration=self.calibration,
                attention=self.kernel,
                untimed=self.untimed,
            )
        )

    @cached_property
    def embedding(self) -> OpTable:
        table = embedding_table(self.workload, self.layout, self.system)
        place = Place(trains=self.workload.frozen_layers == 0)
        return trained_table(table, self.workload, self.system, place, self.layout.tp)

    @property
    def _embedded(self) -> bool:
        return self.embedding.trained > 0 or self.system.zero.reentrant

    @cached_property
    def head(self) -> OpTable:
        table = head_table(self.workload, self.layout, self.system)
        place = place_of(self.workload.model.num_layers, self.workload, embedded=self._embedded)
        return trained_table(table, self.workload, self.system, place, self.layout.tp)

    @cached_property
    def shared(self) -> SharedVocabulary:
        """The operators of a vocabulary that all stages share."""
        of = (self.workload, self.layout, self.system)
        return shared_vocabulary(*of, self.embedding, self.head)

    @cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return _kinds_of(self.workload, self._embedded)

    @cached_property
    def _layers(self) -> dict[LayerKind, OpTable]:
        return {kind: self._table(kind) for kind in sorted(set(self._kinds))}

    def _table(self, kind: LayerKind) -> OpTable:
        fused, of = self.attention == "flash", (self.workload, self.layout, self.system)
        window, dense, place, predicts, quantised, borrows, memory = kind
        if quantised:
            plain = self._table(kind._replace(quantised=False))
            return quantised_table(plain, *of, self.cluster.generation)
        if predicts:
            last = self.prediction_rank == self.layout.pp - 1
            copies = self.layout.pp > 1 and not (last and self.workload.model.tied_embeddings)
            return prediction_table(*of, fused_attention=fused, dense=dense, copies=copies)
        table = layer_table(*of, fused_attention=fused, window=window, dense=dense, memory=memory)
        table = trained_table(table, self.workload, self.system, place, self.layout.tp)
        return without_weights(table) if borrows else table

    @cached_property
    def prediction_rank(self) -> int | None:
        """The pipeline rank of the layer that predicts one more token; None if there is none."""
        return prediction_rank(self.workload.model, self.layout)

    @property
    def embedding_ranks(self) -> tuple[int, int] | None:
        """The first rank, and the other rank that has a copy of the token embedding (as its output
        projection, or to predict further tokens).  The two exchange its gradient.  None if no
        other rank has a copy."""
        tied, last = self.workload.model.tied_embeddings, self.layout.pp - 1
        other = last if tied else self.prediction_rank
        return (0, other) if last and other is not None else None

    def layer(self, index: int) -> OpTable:
        """The operators of a layer (global index), which follow from its kind (`LayerKind`)."""
        return self._layers[self._kinds[index]]

    def variant(self, index: int) -> int:
        """The index in `layer_kinds` of the operators of a layer (global index)."""
        return list(self._layers).index(self._kinds[index])

    @property
    def layer_kinds(self) -> tuple[OpTable, ...]:
        return tuple(self._layers.values())

    @cached_property
    def base_plan(self) -> Plan:
        """The plan that keeps all activations: the layout's partition and schedule, the system's
        state fates."""
        return Plan(
            partition=base_partition(self.workload.model, self.layout),
            schedule="interleaved_1f1b" if self.layout.vpp > 1 else "1f1b",
            states=state_fates(self.layout, self.system),
        )


def _refuse_experts(problem: Problem) -> None:
    """Raise LayoutError for a step with experts that is not modelled.  The message has the model's
    parameters, the states of the fullest rank and the bytes that a layer with experts saves."""
    work, lay = problem.workload, problem.layout
    model = work.model
    if not (refused := unmodelled_of_experts(model, problem.system)):
        return
    layer = next(problem.layer(i) for i in range(model.num_layers) if not model.is_dense(i))
    held = [rank_states(problem, problem.base_plan, rank).total for rank in range(lay.pp)]
    raise LayoutError(
        f"steps of models with experts are not simulated with {refused}: {model.name} has "
        f"{model.parameters / 1e9:.2f} B parameters ({model.active_parameters / 1e9:.2f} B active)"
        f"; states of a rank {max(held) / 2**30:.2f} GiB; a layer with experts keeps "
        f"{layer.saved_bytes / 2**20:.1f} MiB of a micro-batch ({work.balance})"
    )


def rank_states(problem: Problem, plan: Plan, rank: int) -> StateBytes:
    """Bytes of the training states of one rank on the device under the layout's ZeRO stage.  States
    of experts are sharded over expert data parallelism."""
    lay, system, found = problem.layout, problem.system, list[tuple[StateBytes, StateBytes]]()
    for trained in (False, True):
        experts = expert_parameters(problem, plan, rank, trained=trained)
        rest = rank_parameters(problem, plan, rank, trained=trained) - experts
        two = state_bytes(experts, lay, system, shards=lay.expert_shards)
        found.append((state_bytes(rest, lay, system), two))
    held, updated = found
    return StateBytes(
        parameter=sum(one.parameter for one in held),
        gradient=sum(one.gradient for one in updated),
        optimizer=sum(one.optimizer for one in updated),
    )


def expert_parameters(problem: Problem, plan: Plan, rank: int, *, trained: bool = False) -> int:
    """Parameters of experts that one rank holds; `trained`: only those with a gradient."""
    if problem.workload.model.experts is None:
        return 0
    layers = [problem.layer(index) for chunk in plan.partition[rank] for index in chunk]
    return sum(t.trained_experts if trained else t.expert_parameters for t in layers)


def tied_on_one_rank(problem: Problem) -> bool:
    """Whether embedding and output projection are one weight on one rank (tied, pp = 1)."""
    return problem.workload.model.tied_embeddings and problem.layout.pp == 1


def gathered_bytes(problem: Problem) -> int:
    """Bytes per parameter in a buffer that kernels read or write: the width in which the stack
    gathers, but at least the width of the kernels' precision."""
    return max(problem.system.states.gather_bytes, problem.workload.element_bytes)


def completed_after_backward(problem: Problem) -> str:
    """Why some gradient is incomplete at the end of its unit's backward, so that an update in the
    backward would be wrong; empty if all gradients are complete."""
    layout, count = problem.layout, problem.layout.num_micro_batches
    if count > 1:
        return f"optimizer-in-backward needs one micro-batch per step, not {count}"
    if problem.embedding_ranks is not None:
        return (
            f"optimizer-in-backward needs complete gradients, but {layout.pp} pipeline stages "
            "exchange the gradient of tied embeddings after all backwards"
        )
    return ""


def head_parameters(problem: Problem) -> tuple[int, int]:
    """(parameters of the head on its rank, how many of them have a gradient)."""
    ops = weighted_operators(problem, problem.head)
    return sum(op.parameters for op in ops), sum(op.trained_parameters for op in ops)


def weighted_operators(problem: Problem, table: OpTable) -> list[Op]:
    """The operators of a table that have parameters on their rank; a tied output projection has
    some only if the embedding is on another rank."""
    tied = table.part == "head" and tied_on_one_rank(problem)
    return [op for op in table.ops if op.parameters and not (tied and op.name == "lm_head")]


def trained_operators(problem: Problem, table: OpTable) -> list[Op]:
    """The operators of `weighted_operators` that have parameters with a gradient."""
    return [op for op in weighted_operators(problem, table) if op.trained_parameters]


def rank_parameters(problem: Problem, plan: Plan, rank: int, *, trained: bool = False) -> int:
    """Parameters of a rank after tensor and pipeline parallelism (`trained`: with a gradient)."""
    tables = [problem.layer(index) for chunk in plan.partition[rank] for index in chunk]
    if plan.schedule in VOCABULARY:
        share, norm, positions = problem.shared
        tables += [share, *([norm] * (rank == problem.layout.pp - 1))]
        return sum(t.parameters for t in tables) + positions * (rank == 0)
    tables += [problem.embedding] if rank == 0 else []
    pp, (every, learnt) = problem.layout.pp, head_parameters(problem)
    heads = (rank == plan.head_rank) + sum((stage - 1) % pp == rank for stage in plan.cuts)
    layers = sum(t.trained if trained else t.parameters for t in tables)
    return heads * (learnt if trained else every) + layers


class CostFacade(CostModel):
    """What a method sees of costs: a problem's formulas, and the evaluation of whole plans.
    `attributes`: those of the problem's CostModel, which all facades share."""

    __slots__ = ("_problem",)

    def __init__(self, problem: Problem, attributes: dict[str, Any]) -> None:
        self.__dict__ = attributes
        self._problem = problem

    def evaluate(self, plan: Plan) -> Evaluation:
        """Chunk-level step time and peaks of a plan (memoised by the plan's content)."""
        if self._problem.evaluator is None:
            raise RuntimeError("this problem has no evaluator; build it with rematbench.Problem")
        key = msgspec.json.encode(plan)
        memo = self._problem._memo
        if key not in memo:
            memo[key] = self._problem.evaluator(self._problem, plan)
        return memo[key]

    def weigh(self, plan: Plan) -> Weight | Evaluation:
        """Peaks and reserved bytes of a plan (memoised).  A problem with a weigher does not
        simulate time for them."""
        key = msgspec.json.encode(plan)
        weights, weigher = self._problem._weights, self._problem.weigher
        if weigher is None or key in self._problem._memo:
            return self.evaluate(plan)
        if key not in weights:
            weights[key] = weigher(self._problem, plan)
        return weights[key]

    def peak_bytes(self, plan: Plan) -> int:
        """The largest device peak of the ledger over all ranks, in bytes."""
        return max(self.weigh(plan).peak_device_bytes)

    def headroom_bytes(self, plan: Plan) -> int:
        """Usable device bytes minus `reserve_bytes` and the reserved bytes of the fullest rank;
        negative for a plan that does not fit."""
        room = self._problem.usable_bytes - self._problem.reserve_bytes
        return room - self.weigh(plan).reserved_bytes

    def pipeline_offload_estimator(self, chunk_bytes: float) -> PipelineOffloadEstimator:
        """ATC'24's estimator of the first stage's bytes for any offloaded share."""
        return pipeline_offload_estimator(self.workload.model, self.layout, chunk_bytes)

    def step_s(self, plan: Plan) -> float:
        """Seconds of one optimizer step; RateError if kernels cannot be timed."""
        self.require_rates()
        return self.evaluate(plan).step_s

    def recompute_s(self, table: OpTable, missing: frozenset[str]) -> float:
        """Seconds of the kernels and collectives that recompute `missing` from the other saved
        tensors."""
        available = frozenset(table.saved) - missing
        return fsum(
            self.op_s(op, "forward")
            + fsum(self.comm_s(c, 0) for c in (op.gather, op.reduce) if c is not None)
            for op in rebuild_ops(table, missing, available)
        )
