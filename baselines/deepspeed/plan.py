"""deepspeed: DeepSpeed's activation checkpointing, state offloading, Ulysses and tiling, as a plan.

Claim: ZeRO shards states, checkpointing keeps one tensor a layer, tiling shrinks MLP and logits.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054); Ren et al. 2021 (arXiv 2101.06840); Jacobs
et al. 2023 (arXiv 2309.14509); Bekman et al. 2025 (arXiv 2506.13996); deepspeed 0.19.8.
Deviations: ZeRO's stage and Ulysses are the layout's; partitioning is over one model-parallel rank
here, so it frees nothing; the tiled loss is computed once, its backward beside its forward.
"""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rematbench.layout import Layout
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
from rematbench.solve.kept import kept_activations
from rematbench.workload import Model, PositiveInt

BUCKET_ELEMENTS = 500_000_000
MLP_OPS = ("mlp_norm", "fc1", "act", "mul", "fc2")
MLP_SAVED = ("gate_out", "up_out", "act_out", "fc2_in")


class DeepSpeed(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`checkpointing`: plain, partitioned (over model-parallel ranks), cpu (inputs on the host) or
    both.  `mlp_tiles`, `loss_tiles`: pieces of ALST's TiledMLP and TiledFusedLogitsLoss (1: not
    tiled)."""

    name: ClassVar[str] = "deepspeed"
    checkpointing: Literal["none", "plain", "partitioned", "cpu", "partitioned_cpu"] = "none"
    offload_optimizer: bool = False
    offload_param: bool = False
    overlap_comm: bool = False
    mlp_tiles: PositiveInt = 1
    loss_tiles: PositiveInt = 1

    def plan(self, problem: Problem, base: Plan) -> Plan | Unsupported:
        """The fates that the settings mean for what this stack saves."""
        if problem.layout.tp * problem.layout.cp * problem.layout.pp > 1:
            return Unsupported(
                "this baseline's model has no tensor, context or pipeline parallelism"
            )
        kept = kept_activations(problem, base)
        plan = base
        if self.checkpointing != "none":
            plan = plan.with_rules(_rebuilt(tuple(sorted(kept - {"layer_input"})), whole=True))
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
        """The policies that a configuration can say, simplest first (tiles are code)."""
        homes = {state.kind: state.home for state in problem.base_plan.states}
        optimizer = homes.get("optimizer") == "host"
        for checkpointing in ("none", "plain", "partitioned_cpu"):
            for offload in ((False, False), (True, False), (True, True)):
                if not optimizer or offload[0]:
                    yield cls(
                        checkpointing=checkpointing,
                        offload_optimizer=offload[0],
                        offload_param=offload[1],
                    )

    def flags(self, problem: Problem) -> str:
        """DeepSpeed's configuration as JSON."""
        work = problem.workload
        made = self.configuration(work.model, problem.layout, work.precision)
        return msgspec.json.format(msgspec.json.encode(made)).decode()

    def configuration(self, model: Model, layout: Layout, precision: str) -> dict[str, Any]:
        """What deepspeed.initialize takes.  Ulysses' groups are made beside it, by
        parallel_state_sp, and tiles by the model."""
        # Buckets of 5e8 elements are allocated whole: no larger than the model.
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
        if layout.ulysses > 1:  # for the batch's arithmetic; without data_parallel_size, or it
            made["sequence_parallel_size"] = layout.ulysses  # makes groups that reduce too little
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
                plan = plan.with_rules(_rebuilt(inside, whole=False))
        if self.loss_tiles > 1:
            runs.append(MiniSequence(("lm_head", "loss"), self.loss_tiles))
            saved = Select(parts=("head",), activations=("loss_saved",))
            plan = plan.with_rules(Rule(saved, Recompute()))
        return replace(plan, mini_sequences=tuple(runs))

    def _state(self, state: StateFate) -> StateFate:
        # An optimizer on the host keeps its part of the gradients there (Ren et al. 2021).
        away = self.offload_optimizer
        moved = {"optimizer": away, "gradient": away, "parameter": self.offload_param}
        return replace(state, home="host") if moved.get(state.kind, False) else state


def _rebuilt(names: tuple[str, ...], *, whole: bool) -> Rule:
    select = Select(parts=("layer",), activations=names, kept=True)
    return Rule(select, Recompute(scope="layer", whole=whole))
