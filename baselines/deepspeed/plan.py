"""deepspeed: DeepSpeed's activation checkpointing, state offloading, Ulysses and tiling, as a plan.

Claim: ZeRO shards states, checkpointing keeps one tensor a layer, tiling shrinks MLP and logits.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054); Ren et al. 2021 (arXiv 2101.06840); Jacobs
et al. 2023 (arXiv 2309.14509); Bekman et al. 2025 (arXiv 2506.13996); deepspeed 0.19.8.
Deviations: the layout sets ZeRO's stage and Ulysses; partitioning is over one model-parallel rank
here, so it frees nothing; the backward of the tiled loss is computed in its forward, not later.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from baselines.deepspeed import options
from rematbench.inputs.layout import Layout
from rematbench.plan import (
    MiniSequence,
    Offload,
    Plan,
    Recompute,
    Rule,
    Select,
    StateFate,
    Transfers,
    Unsupported,
)
from rematbench.problem import Problem
from rematbench.solve.kept import holding_inputs, kept_activations
from rematbench.solve.recompute_modules import rebuilding, rebuilding_layers
from rematbench.workload import Model, PositiveInt
from rematbench.worlds.packages.limits import Reason, Setup, active_reasons, setup_of

BUCKET_ELEMENTS = 500_000_000
MLP_OPS = ("mlp_norm", "fc1", "act", "mul", "fc2")
MLP_SAVED = ("gate_out", "up_out", "act_out", "fc2_in")


class DeepSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of DeepSpeed. `checkpointing`: plain, partitioned (over model-parallel ranks),
    cpu (inputs on the host) or partitioned_cpu (both). `mlp_tiles`, `loss_tiles`: the number of
    tiles of ALST's TiledMLP and TiledFusedLogitsLoss (1: not tiled)."""

    name: ClassVar[str] = "deepspeed"
    system: ClassVar[str] = "deepspeed"
    stacks: ClassVar[tuple[str, ...]] = ("deepspeed",)
    checkpointing: Literal["none", "plain", "partitioned", "cpu", "partitioned_cpu"] = "none"
    offload_optimizer: bool = False
    offload_param: bool = False
    overlap_comm: bool = False
    mlp_tiles: PositiveInt = 1
    loss_tiles: PositiveInt = 1

    @property
    def mechanism(self) -> str:
        if self.mlp_tiles > 1 or self.loss_tiles > 1:
            return self.name
        return "keep_all" if self.checkpointing == "none" else "full_recompute"

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """The plan of what happens to this stack's saved tensors under the settings."""
        if refused := active_reasons(self.limits(setup_of(problem))):
            return Unsupported(refused[0])
        kept = kept_activations(problem, base)
        plan = base
        if self.checkpointing != "none":
            inner = tuple(sorted(kept - {"layer_input"}))
            plan = holding_inputs(problem, plan, inner, whole=True)
            plan = plan.with_rules(rebuilding_layers(inner, None))
        if self.checkpointing.endswith("cpu"):
            inputs = Select(parts=("layer",), activations=("layer_input",), kept=True)
            plan = replace(
                plan.with_rules(Rule(inputs, Offload())), transfers=Transfers(granularity="layer")
            )
        if self.mlp_tiles > 1 or self.loss_tiles > 1:
            plan = self._tiled(problem, plan, kept)
        return replace(plan, states=tuple(self._state(state) for state in plan.states))

    @classmethod
    def candidates(cls, problem: Problem) -> Iterator["DeepSpeed"]:
        """The policies that a configuration can express, the simplest first. Tiles are not among
        them: they need code."""
        homes = {state.kind: state.home for state in problem.base_plan.states}
        overlaps = problem.system.zero.reduce_overlap and problem.layout.zero_stage > 0
        optimizer = homes.get("optimizer") == "host"
        for checkpointing in ("none", "plain", "partitioned_cpu"):
            for offload in ((False, False), (True, False), (True, True)):
                made = cls(
                    checkpointing=checkpointing,
                    offload_optimizer=offload[0],
                    offload_param=offload[1],
                    overlap_comm=overlaps,
                )
                if offload[0] >= optimizer and not active_reasons(_policy(made, setup_of(problem))):
                    yield made

    @classmethod
    def inexpressible(cls, problem: Problem) -> tuple[str, ...]:
        """The facts of a problem that no configuration can express under any policy."""
        code = (
            problem.layout.ulysses > 1,
            "Ulysses is code (DistributedAttention, and its groups as mpu): of a configuration "
            "sequence_parallel_size alone exchanges nothing",
        )
        graphs = problem.system.kernels.captures
        captured = (graphs, "CUDA graphs: DeepSpeed captures none in training")
        return active_reasons([*_job(setup_of(problem)), code, captured])

    def limits(self, setup: Setup) -> list[Reason]:
        """The jobs that DeepSpeed or this baseline refuses or runs wrongly in any world."""
        return [*_job(setup), *_policy(self, setup)]

    @classmethod
    def partition(cls, problem: Problem, plan: Plan) -> bool:
        """Whether options can give each stage of a plan its layers. Only one stage runs here."""
        return problem.layout.pp == 1

    @classmethod
    def facts_with_options(cls, problem: Problem) -> set[str]:
        return {*options.KEYS, *options.POLICY}

    def flags(self, problem: Problem, _: Plan | None = None, *, whole: bool = False) -> str:
        """DeepSpeed's configuration as JSON. It lacks the model, so `whole` has no effect."""
        work = problem.workload
        made = self.configuration(work.model, problem.layout, work.precision)
        made["zero_optimization"] |= options.stack_values(problem, made["zero_optimization"])
        return msgspec.json.format(msgspec.json.encode(made)).decode()

    def configuration(self, model: Model, layout: Layout, precision: str) -> dict[str, Any]:
        """The configuration for deepspeed.initialize. It contains neither Ulysses' groups, which
        parallel_state_sp makes, nor tiles, which the model makes."""
        # Buckets of 5e8 elements are allocated whole, so the bucket is no larger than the model.
        bucket = min(BUCKET_ELEMENTS, model.parameters)
        zero: dict[str, Any] = {"stage": layout.zero_stage, "reduce_bucket_size": bucket}
        if layout.zero_stage > 0:
            zero["overlap_comm"] = self.overlap_comm
        if self.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.offload_param:
            zero["offload_param"] = {"device": "cpu"}
        made: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": layout.micro_batch,
            "gradient_accumulation_steps": layout.num_micro_batches,
            "train_batch_size": layout.global_batch,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "bf16": {"enabled": precision == "bf16"},
        }
        if layout.ulysses > 1:  # the batch size needs it; with data_parallel_size it
            made["sequence_parallel_size"] = layout.ulysses  # would reduce over too few ranks
        if self.checkpointing != "none":
            made["activation_checkpointing"] = {
                "partition_activations": self.checkpointing.startswith("partitioned"),
                "cpu_checkpointing": self.checkpointing.endswith("cpu"),
            }
        return made

    def _tiled(self, problem: Problem, base: Plan, kept: frozenset[str]) -> Plan:
        runs = list(base.mini_sequences)
        plan = base
        if self.mlp_tiles > 1:
            known = {op.name for op in problem.layer(0).ops}
            ops = tuple(name for name in MLP_OPS if name in known)
            runs.append(MiniSequence(ops, self.mlp_tiles))
            inside = tuple(name for name in MLP_SAVED if name in kept)
            if inside and self.checkpointing == "none":
                plan = plan.with_rules(*rebuilding(inside, "layer"))
        if self.loss_tiles > 1:
            runs.append(MiniSequence(("lm_head", "loss"), self.loss_tiles))
            saved = Select(parts=("head",), activations=("loss_saved",))
            plan = plan.with_rules(Rule(saved, Recompute()))
        return replace(plan, mini_sequences=tuple(runs))

    def _state(self, state: StateFate) -> StateFate:
        # An optimizer on the host has its part of the gradients there, too (Ren et al. 2021).
        away = self.offload_optimizer
        moved = {"optimizer": away, "gradient": away, "parameter": self.offload_param}
        return replace(state, home="host") if moved.get(state.kind, False) else state


def _job(setup: Setup) -> list[Reason]:
    model, lay = setup.model, setup.layout
    return [
        (lay.tp > 1, "tensor parallelism (this baseline's model has none)"),
        (lay.cp > 1, "context parallelism (DeepSpeed has Ulysses: set ulysses)"),
        (lay.pp > 1, "pipeline parallelism (PipelineModule is code)"),
        (
            lay.state_shards < lay.dp * lay.cp,
            "hybrid sharding (0.19.8 has no MiCS; hpZ only shards a second copy of parameters)",
        ),
        (model.drops, "dropout has no common stream of random numbers to compare"),
        (model.position == "alibi", "ALiBi positions (this baseline's model has none)"),
        (model.qk_norm, "norms over heads (this baseline's model has none)"),
        *((True, f"{words} (this baseline's model has none)") for words in setup.special_features),
        (any(model.attention_window), "sliding-window attention (this baseline's model has none)"),
        (setup.work.document_len > 0, "packed documents (this baseline's model has none)"),
        (
            model.attention_soft_cap != 0 or model.logit_soft_cap != 0,
            "soft caps (this baseline's model has none)",
        ),
        (
            setup.work.precision not in ("fp32", "bf16"),
            f"precision {setup.work.precision} (fp32 and bf16 run)",
        ),
        (
            setup.attention == "unfused",
            "unfused attention (this baseline's model has flash only)",
        ),
        (
            lay.ulysses > 1 and lay.replicas > 1 and lay.zero_stage == 0,
            "ZeRO 0 with Ulysses and dp",
        ),
        (model.num_kv_heads % lay.ulysses != 0, "KV heads that Ulysses cannot share out evenly"),
    ]


def _policy(policy: DeepSpeed, setup: Setup) -> list[Reason]:
    stage = setup.layout.zero_stage
    return [
        (policy.offload_param and stage != 3, f"offload_param needs zero_stage 3, not {stage}"),
        (policy.offload_optimizer and stage == 0, "offload_optimizer needs zero_stage 1 to 3"),
        (policy.overlap_comm and stage == 0, "overlap_comm has no effect at zero_stage 0"),
        (
            policy.mlp_tiles > 1 and setup.model.post_norm,
            "tiled MLP with post-norms (not in this baseline's model)",
        ),
        _uneven("mlp_tiles", policy.mlp_tiles, setup),
        _uneven("loss_tiles", policy.loss_tiles, setup),
        (
            policy.loss_tiles > 1
            and setup.model.tied_embeddings
            and (stage > 1 or (stage == 1 and policy.overlap_comm)),
            "loss_tiles with tied embeddings where gradients are reduced during the backward "
            "(zero_stage 2 or 3, or overlap_comm): the shared weight has two gradients",
        ),
    ]


def _uneven(name: str, tiles: int, setup: Setup) -> Reason:
    """Whether tiles do not divide a micro-batch's rows evenly, with the reason.

    TiledMLP and TiledFusedLogitsLoss split the rows of a micro-batch as torch.chunk does, which may
    make fewer tiles than requested. They pass a weight's gradient on at the last requested tile; if
    that tile does not exist, 0.19.8 silently trains on a part of the gradient.
    """
    lay = setup.layout
    rows = lay.micro_batch * (setup.work.seq_len // lay.ulysses)
    made = pieces(rows, tiles)
    above = next((n for n in range(tiles, rows + 1) if pieces(rows, n) == n), made)
    near = " or ".join(str(n) for n in sorted({made, above}))
    return (
        made != tiles,
        f"{name} {tiles}: {rows} rows make {made} tiles, and DeepSpeed waits for the gradient of "
        f"the last requested tile; set {near}",
    )


def pieces(rows: int, count: int) -> int:
    """The number of pieces that torch.chunk returns for the rows and the argument `count`."""
    return -(-rows // -(-rows // count))
