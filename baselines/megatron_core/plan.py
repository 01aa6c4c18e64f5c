"""megatron_core: Megatron-core's own recomputation and activation offloading, as a plan.

Claim: what NVIDIA provides: full, block or selective recomputation, or offloading module inputs.
Source: megatron-core 0.16.1 (`recompute_granularity`, `recompute_modules`, `offload_modules`);
Korthikanti et al. 2022 (arXiv 2205.05198) for selective recomputation of core attention.
Deviations: a dropped tensor is rebuilt before each reader, not once per module; offloading moves a
module's whole saved input and reloads it one layer ahead.
"""

from collections.abc import Container, Iterator
from functools import partial
from itertools import combinations
from typing import Any, ClassVar, Literal, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace

from baselines.megatron_core import options
from baselines.megatron_core.limits import has_biases, of_layout, of_model
from baselines.megatron_core.modules import (
    MIN_OFFLOADED,
    MOVED,
    TRACED,
    OffloadModule,
    RecomputeModule,
)
from rematbench.engine.lowering.passes.emit_recompute import NOT_AGAIN, REPLAYS
from rematbench.engine.lowering.schedule import interleaved
from rematbench.inputs.stages import stages_of
from rematbench.plan import (
    Offload,
    Pass,
    Plan,
    Rule,
    Select,
    Transfers,
    Unsupported,
)
from rematbench.problem import Problem
from rematbench.solve.kept import holding_inputs, kept_activations, sharing_inputs
from rematbench.solve.recompute_modules import (
    before_experts,
    chunks_of,
    modules_dropped,
    rebuilding,
    rebuilding_groups,
    rebuilding_layers,
    with_copies,
)
from rematbench.workload import Model, PositiveInt
from rematbench.worlds.packages.limits import (
    NOT_RUN,
    Reason,
    Setup,
    active_reasons,
    setup_of,
    without_options,
)
from rematbench.worlds.packages.stack import StackProblem

T = TypeVar("T")


class MegatronCore(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of Megatron-core: `recompute` with its `method` and `num_layers` (full) or
    `modules` (selective), and `offload_modules` of fine-grained activation offloading.
    `distribute_saved_activations` (full): tensor-parallel ranks share the inputs of groups out.

    `bias_activation_fusion`: SwiGLU or GELU with its bias as one function that saves only its input
    (Megatron's fused GELU is the tanh approximation).  `batch_p2p`, `overlap_p2p`: how pipeline
    neighbours exchange tensors.  `overlap_grad_reduce`: gradients are reduced bucket by bucket.
    """

    name: ClassVar[str] = "megatron_core"
    stacks: ClassVar[tuple[str, ...]] = ("megatron-core", "megatron-kwai")
    later: ClassVar[tuple[str, ...]] = ("distribute_saved_activations",)
    by_layer: ClassVar[tuple[str, dict[str, str]]] = (
        "num_layers",
        {"recompute": "full", "method": "block"},
    )
    recompute: Literal["none", "full", "selective"] = "none"
    method: Literal["uniform", "block"] = "uniform"
    num_layers: PositiveInt = 1
    modules: tuple[RecomputeModule, ...] = ("core_attn",)
    offload_modules: tuple[OffloadModule, ...] = ()
    distribute_saved_activations: bool = False
    bias_activation_fusion: bool = False
    batch_p2p: bool = False
    overlap_p2p: bool = False
    overlap_grad_reduce: bool = False

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """The plan of what happens to this stack's saved tensors under the settings, also for a job
        that has options but is not run here."""
        if refused := without_options(active_reasons(self._reasons(problem, base))):
            return Unsupported(refused[0])
        plan = replace(base, orders=_orders(problem))
        if self.recompute == "full":
            plan = self._full(problem, plan)
        elif self.recompute == "selective":
            beside = tuple(name for module in self.modules for name in TRACED.get(module, ()))
            if "mlp" in self.modules and _norms_in_linears(problem):
                beside += ("mlp_norm_out",)
            dropped = modules_dropped(self.modules)
            dropped = with_copies(dropped) if problem.workload.recipe != "none" else dropped
            routed = self._norms_before_experts(problem)
            dense = "mlp" in self.modules
            plan = _dropping(problem, plan, (*dropped, *beside), routed, dense=dense)
        if self.offload_modules:
            plan = self._offloading(problem, plan)
        if self.distribute_saved_activations:
            first = self._first(plan) if self.method == "block" else ()
            return sharing_inputs(problem, plan, first, "device")
        return plan

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator["MegatronCore"]:
        """Every policy that options can express for this problem, the simplest first."""
        fused = problem.workload.model.mlp == "swiglu" and problem.system.kernels.fused_swiglu
        model, per_chunk = problem.workload.model, _per_chunk(setup_of(problem))
        made = partial(cls, bias_activation_fusion=fused)
        full = partial(made, recompute="full")
        sets = _subsets(get_args(RecomputeModule))
        moves = _subsets(get_args(OffloadModule))
        found = [made(), *(made(recompute="selective", modules=modules) for modules in sets)]
        found += [made(offload_modules=modules) for modules in moves]
        for count in range(1, per_chunk + 1):
            found += [full(num_layers=count), full(method="block", num_layers=count)]
        if problem.layout.tp > 1 and not problem.layout.sequence_parallel:
            shared = (p for p in found if p.recompute == "full")
            found += [replace(policy, distribute_saved_activations=True) for policy in shared]
        for policy in found:
            reasons = [*_policy(policy, model, {per_chunk}), *policy._inside_linears(problem)]
            if not active_reasons(reasons):
                yield policy

    @classmethod
    def remarks(cls, problem: Problem) -> tuple[str, ...]:
        lay, whole = problem.layout, "the model's arguments are not here: --whole prints them"
        words = "CUDA_DEVICE_MAX_CONNECTIONS=1 is needed with tp or cp above 1 before Blackwell"
        return (whole, words) if lay.tp > 1 or lay.cp > 1 else (whole,)

    @classmethod
    def inexpressible(cls, problem: Problem) -> tuple[str, ...]:
        """The facts of a problem that no option can express under any policy. A reason that ends
        with NOT_RUN is about a job that has options but is not run here."""
        setup = setup_of(problem)
        hosted = (
            problem.system.host.optimizer_on_host,
            "optimizer states in host memory (--optimizer-cpu-offload, not run here)",
        )
        reasons = [
            *of_model(setup),
            *of_layout(setup),
            _uneven(setup),
            hosted,
            _overlapped(problem),
        ]
        return active_reasons(reasons)

    def limits(self, setup: Setup) -> list[Reason]:
        """The jobs that 0.16.1 refuses late, runs wrongly or never ends, executed or traced."""
        policy = _policy(self, setup.model, {_per_chunk(setup)})
        return [*of_model(setup), *of_layout(setup), _uneven(setup), *policy]

    def norms(self, model: Model) -> Reason:
        """Whether the settings recompute or offload norms that are part of linears, which has no
        effect, with the reason. Only the norms before experts are separate modules."""
        idle = (
            {"attn_norm"} if model.expert_layers == model.num_layers else {"attn_norm", "mlp_norm"}
        )
        recomputed = self.recompute == "selective" and "layernorm" in self.modules
        return (
            bool(idle & set(self.offload_modules)) or (recomputed and model.experts is None),
            "norms recomputed or offloaded on TransformerEngine, where a norm is part of the "
            "linear after it: 0.16.1 silently ignores the setting",
        )

    def _norms_before_experts(self, problem: Problem) -> tuple[int, ...]:
        """The layers whose norms are recomputed if only the norms before experts are separate
        modules; empty if all norms are separate, or if none are recomputed."""
        outside = not _norms_in_linears(problem) or "layernorm" not in self.modules
        return () if outside else before_experts(problem)

    @property
    def mechanism(self) -> str:
        if self.offload_modules:
            return self.name
        names = {"full": "full_recompute", "selective": "selective_recompute"}
        return names.get(self.recompute, "keep_all")

    @property
    def unit(self) -> int:
        """The number of layers in a recomputation group; a chunk consists of whole groups."""
        return self.num_layers if (self.recompute, self.method) == ("full", "uniform") else 1

    def _reasons(self, problem: Problem, base: Plan) -> list[Reason]:
        setup, sizes = setup_of(problem), _chunk_sizes(base)
        itself = base.partition == problem.base_plan.partition
        selected = self.modules if self.recompute == "selective" else ()
        layers = self.recompute == "full" and REPLAYS not in problem.system.accepts.features
        again = layers or "moe" in selected
        return [
            *of_model(setup), *of_layout(setup), _uneven(setup, itself and len(sizes) > 1),
            *_policy(self, setup.model, sizes), *self._inside_linears(problem),
            (problem.ep_overlaps and again, NOT_AGAIN), _overlapped(problem),
        ]  # fmt: skip

    def _inside_linears(self, problem: Problem) -> list[Reason]:
        return [self.norms(problem.workload.model)] if _norms_in_linears(problem) else []

    @classmethod
    def partition(cls, problem: Problem, plan: Plan) -> bool:
        """Whether options can give each stage of a plan its layers. They always can."""
        return True

    @classmethod
    def facts_with_options(cls, problem: Problem) -> set[str]:
        return options.facts_with_options(problem)

    def flags(self, problem: Problem, plan: Plan | None = None, *, whole: bool = False) -> str:
        lay, work = problem.layout, problem.workload
        words = [
            f"--tensor-model-parallel-size {lay.tp}",
            f"--pipeline-model-parallel-size {lay.pp}",
            f"--context-parallel-size {lay.cp}",
            f"--micro-batch-size {lay.micro_batch}",
            f"--global-batch-size {lay.global_batch}",
            f"--seq-length {work.seq_len}",
        ]
        partition = (plan or problem.base_plan).partition
        words += options.partition_words(stages_of(partition, work.model.num_layers), lay)
        words += ["--sequence-parallel"] * lay.sequence_parallel
        words += ["--use-distributed-optimizer"] * (lay.zero_stage == 1)
        words += [f"--{work.precision}"] * (work.precision in ("bf16", "fp16"))
        words += ["--attention-backend unfused"] * (problem.attention == "unfused")
        words += ["--qk-layernorm"] * work.model.qk_norm
        words += [*options.expert_words(lay, work), *options.recipe_words(work)]
        words += options.stack_words(problem)
        words += options.model_words(work.model) if whole else []
        fusion = fusion_argument(work.model)
        words += [fusion] * (bool(fusion) and not self.bias_activation_fusion)
        for name, value in self.fields.items():
            said = value if isinstance(value, list) else [] if value is True else [str(value)]
            words.append(" ".join((f"--{name.replace('_', '-')}", *said)))
        return " ".join(words)

    @property
    def fields(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.recompute != "none":
            found["recompute_granularity"] = self.recompute
        if self.recompute == "full":
            found |= {"recompute_method": self.method, "recompute_num_layers": self.num_layers}
        if self.distribute_saved_activations:
            found["distribute_saved_activations"] = True
        if self.recompute == "selective":
            found["recompute_modules"] = list(self.modules)
        if self.offload_modules:
            found["fine_grained_activation_offloading"] = True
            found["offload_modules"] = list(self.offload_modules)
            found["min_offloaded_tensor_size"] = MIN_OFFLOADED
        return found

    def _full(self, problem: Problem, base: Plan) -> Plan:
        inner = tuple(sorted(kept_activations(problem, base) - {"layer_input"}))
        base = holding_inputs(problem, base, inner, whole=True)
        if self.method == "block":
            return base.with_rules(rebuilding_layers(inner, self._first(base)))
        return base.with_rules(*rebuilding_groups(inner, base, self.num_layers))

    def _first(self, plan: Plan) -> tuple[int, ...]:
        return tuple(i for chunk in chunks_of(plan) for i in chunk[: self.num_layers])

    @property
    def moved(self) -> dict[str, tuple[str, ...]]:
        return {module: MOVED[module] for module in self.offload_modules}

    def _offloading(self, problem: Problem, base: Plan) -> Plan:
        kept = kept_activations(problem, base)
        names = tuple(n for every in self.moved.values() for n in every if n in kept)
        if not names:
            return base.noting(megatron_core="no-op: no tensor of these modules is kept")
        select = Select(parts=("layer",), activations=names, kept=True)
        moves = Transfers(granularity="layer")
        return replace(base.with_rules(Rule(select, Offload())), transfers=moves)


def _overlapped(problem: Problem) -> Reason:
    option = "--overlap-moe-expert-parallel-comm"
    return problem.ep_overlaps, f"exchanges beside another micro-batch ({option}, {NOT_RUN}"


def fusion_argument(model: Model) -> str:
    """Megatron-LM's argument that turns the fused activation off. Empty for a model that has none:
    the fused GELU needs biases."""
    if model.gated:
        return "--no-bias-swiglu-fusion"
    return "--no-bias-gelu-fusion" if has_biases(model) else ""


def _orders(problem: Problem) -> tuple[tuple[Pass, ...], ...]:
    """The passes of every rank where 0.16.1 differs from the simulated interleaved schedule, else
    empty. With pp micro-batches older releases ran all forwards first; 0.16.1 does not."""
    lay = problem.layout
    if lay.pp == 1 or lay.vpp == 1 or lay.num_micro_batches != lay.pp:
        return ()
    return tuple(
        interleaved(rank, lay.pp, lay.vpp, lay.num_micro_batches) for rank in range(lay.pp)
    )


def _per_chunk(setup: Setup) -> int:
    return max(1, setup.model.num_layers // setup.layout.num_chunks)


def _chunk_sizes(base: Plan) -> set[int]:
    return {len(layers) for rank in base.partition for layers in rank if layers}


def _norms_in_linears(problem: Problem) -> bool:
    """Whether norms are part of the linears after them, as in TransformerEngine, with which stacks
    with fused norms run. The stack without TransformerEngine (stack.py) has separate norms."""
    return problem.system.kernels.norm == "fused" and not isinstance(problem, StackProblem)


def _uneven(setup: Setup, uneven: bool | None = None) -> Reason:
    count, chunks = setup.model.num_layers, setup.layout.num_chunks
    words = f"{count} layers in pp x vpp = {chunks} chunks (only equal chunks are built, {NOT_RUN}"
    uneven = count % chunks != 0 if uneven is None else uneven
    return (uneven or bool(setup.layout.stages), words)


def _policy(policy: MegatronCore, model: Model, sizes: set[int]) -> list[Reason]:
    selective, full = policy.recompute == "selective", policy.recompute == "full"
    modules, moved, layers = set(policy.modules), set(policy.offload_modules), policy.num_layers
    least = min(sizes)
    return [
        *((selective, reason) for reason in _idle_modules(modules, model)),
        (
            model.experts is not None and not policy.bias_activation_fusion,
            "experts without bias_activation_fusion (not run here)",
        ),
        (
            selective and "mlp" in modules and has_biases(model),
            "selective recomputation of mlp with biases never ends in 0.16.1 without "
            "TransformerEngine; use a model without biases or recompute=full",
        ),
        (selective and not modules, "recompute=selective without modules"),
        (
            not full and policy.distribute_saved_activations,
            "distribute_saved_activations needs recompute=full",
        ),
        (not full and layers != 1, f"num_layers {layers} without recompute=full has no effect"),
        (
            not full and policy.method != "uniform",
            f"method {policy.method} without recompute=full has no effect",
        ),
        (
            not selective and policy.modules != MegatronCore().modules,
            f"modules {','.join(policy.modules)} without recompute=selective has no effect",
        ),
        (
            full and policy.method == "uniform" and layers > least,
            f"num_layers {layers} is more than a chunk's {least} layers",
        ),
        (
            full and policy.method == "uniform" and any(n % min(layers, n) != 0 for n in sizes),
            f"uniform groups of num_layers {layers} do not divide a chunk's "
            f"{' or '.join(map(str, sorted(sizes)))} layers",
        ),
        (
            "attn_proj" in moved and "core_attn" not in moved,
            "offload_modules attn_proj without core_attn, whose backward needs attn_proj's input",
        ),
        (bool(moved) and model.latent is not None, "offloads of latent attention (not run here)"),
        (
            moved == set(get_args(OffloadModule)),
            "all five offload_modules at once fail in 0.16.1; leave one out",
        ),
        (bool(moved) and full, "fine-grained offloading with full recomputation"),
        (
            policy.bias_activation_fusion and model.mlp == "gelu" and not has_biases(model),
            "bias_activation_fusion of GELU without biases (its fused function adds one)",
        ),
    ]


def _idle_modules(modules: Container[str], model: Model) -> Iterator[str]:
    """The reasons why recompute modules have no effect in a model."""
    routed, shared = model.experts is not None, bool(model.experts and model.experts.shared_ffn)
    for module, there in (
        ("moe", routed),
        ("moe_act", routed),
        ("shared_experts", shared),
        ("mlp", model.expert_layers < model.num_layers),
        ("mla_up_proj", model.latent is not None),
    ):
        if module in modules and not there:
            yield f"recompute module {module} has no effect: no layer of {model.name} has it"
        elif "moe" in modules and module in modules and module in ("moe_act", "shared_experts"):
            yield f"recompute module {module} beside moe has no effect"


def _subsets(names: tuple[T, ...]) -> list[tuple[T, ...]]:
    return [pick for size in range(1, len(names) + 1) for pick in combinations(names, size)]


def _dropping(
    problem: Problem, base: Plan, names: tuple[str, ...], routed: tuple[int, ...], *, dense: bool
) -> Plan:
    """The plan that drops these tensors. If `routed` has layers, the only norms dropped are those
    before the experts of these layers and, with `dense`, those before dense MLPs."""
    kept = kept_activations(problem, base) - ({"attn_norm_out"} if routed else set())
    dropped = tuple(sorted(set(names) & kept))
    if not dropped:
        return base.noting(megatron_core="no-op: this stack saves nothing inside these modules")
    base = holding_inputs(problem, base, dropped, whole=False)
    return base.with_rules(*rebuilding(dropped, "consumer", () if dense else routed))
