"""Where each fact of a stack acts: a condition on the layout, the model and the other facts.

Where a fact does not act, no value of it changes the bytes or the seconds of a job.  A new field of
System gets its line here; tests/inputs/test_effects.py holds the lines to what is computed, in
every shipped stack.
"""

from collections.abc import Callable
from typing import NamedTuple

from rematbench.inputs.layout import Layout
from rematbench.inputs.precision import WIDE
from rematbench.inputs.system import System
from rematbench.workload import BYTES_PER_ELEMENT, Model, Precision


class Use(NamedTuple):
    """The use of a stack in a job.  `flash`: the job requests the stack's fused attention;
    `offloads`: activations are copied to the host; `leaves_node`: a group of ranks has members on
    several nodes; `rebuilds`: a part of a linear's outputs is recomputed."""

    system: System
    layout: Layout
    model: Model
    flash: bool = True
    offloads: bool = False
    leaves_node: bool = False
    rebuilds: bool = False
    precision: Precision = "bf16"

    @property
    def fused(self) -> bool:
        """Whether a fused attention kernel runs."""
        return self.flash and self.system.kernels.attention != "unfused"

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 if no rank shares states."""
        return self.layout.zero_stage if self.layout.state_shards > 1 else 0

    @property
    def peers(self) -> bool:
        """Whether gradients are summed over several ranks."""
        return self.layout.dp * self.layout.cp > 1

    @property
    def wide(self) -> bool:
        """Whether the precision has more than 16 bits."""
        return self.precision in WIDE

    @property
    def mixed(self) -> bool:
        """Whether ranks are in groups of more than one kind."""
        lay = self.layout
        return sum(degree > 1 for degree in (lay.tp, lay.cp, lay.dp, lay.pp)) > 1

    @property
    def hosted(self) -> bool:
        """Whether the optimizer states are in host memory."""
        return self.system.host.optimizer_on_host

    @property
    def pairs(self) -> bool:
        """Whether a forward follows a backward, so that experts' exchanges of both may overlap."""
        return self.layout.ep > 1 and self.layout.num_micro_batches > 1

    @property
    def held(self) -> bool:
        """Whether a pipeline holds gathered parameters or gradients until its last pass."""
        return self.layout.pp > 1 and self.stage > 1

    @property
    def by_layer(self) -> bool:
        """Whether parameters are gathered per layer."""
        sharded = self.stage == 3 or (self.stage == 2 and self.system.zero.data_parallel == "fsdp")
        return sharded or (self.layout.zero_stage == 3 and self.system.host.parameters_on_host)

    @property
    def by_matrix(self) -> bool:
        """Whether the matrices of each operator are gathered by themselves."""
        return self.by_layer and not self.held and self.system.zero.data_parallel == "zero"

    @property
    def gradients_leave(self) -> bool:
        """Whether gradients are copied to the host in each backward."""
        return self.hosted and self.system.host.host_gradients and self.layout.zero_stage > 1

    @property
    def accumulates_late(self) -> bool:
        """Whether the backward allocates gradients between activations."""
        several = self.layout.num_micro_batches > 1 and self.layout.pp == 1
        return self.system.states.fresh_gradients and several and not self.gradients_leave

    @property
    def eager_norm(self) -> bool:
        """Whether a norm of eager operators runs."""
        rms = self.model.norm == "rmsnorm" or self.model.norm_in_fp32
        return rms and not self.system.kernels.compiled and self.system.kernels.norm == "eager"


Acts = Callable[[Use], bool]


def _always(use: Use) -> bool:
    return True


def _never(use: Use) -> bool:
    return False


def _bucketed(use: Use) -> bool:
    """Gradients that stay whole are reduced in overlapped buckets; others in whole buckets."""
    overlapped = use.system.zero.reduce_overlap and use.peers and use.stage < 2
    return overlapped or (use.system.zero.whole_buckets and use.stage > 0)


def _flat(use: Use) -> bool:
    """The states that the first step allocates, and what the step holds beside ZeRO 1's whole
    gradients."""
    system = use.system
    scratch = system.states.step_scratch_bytes > 0 and use.stage == 1
    return not use.hosted and (system.states.late_state_bytes > 0 or scratch)


def _grouped(use: Use) -> bool:
    """Sub-groups of ZeRO 3, in host memory or in the flat step."""
    zero3 = use.layout.zero_stage == 3
    if use.hosted:
        return zero3 and use.system.host.host_gradients
    return use.stage == 3 and use.system.states.flat_step and _steps(use)


def _by_tensor(use: Use) -> bool:
    """Linears of their own are rebuilt, allocated, bucketed and moved one by one."""
    bucketed = use.system.zero.whole_buckets and use.system.zero.bucket_bytes > 0 and use.stage > 1
    return use.rebuilds or use.accumulates_late or bucketed or _pinned(use)


def _steps(use: Use) -> bool:
    return use.system.states.step_scratch_bytes > 0 or use.system.states.late_state_bytes > 0


def _pinned(use: Use) -> bool:
    system = use.system
    return (use.hosted and system.host.host_gradients) or system.host.parameters_on_host


def _waits_for_messages(use: Use) -> bool:
    return use.layout.pp > 1 and not use.system.sends_beside(use.layout.vpp)


def _rotates(use: Use) -> bool:
    return use.model.position == "rope" and not use.system.kernels.compiled


ACTS: dict[str, Acts] = {
    "param_bytes": _always,
    "grad_bytes": _always,
    "optimizer_bytes": _always,
    "reduce_bytes": lambda use: use.peers,
    "gather_bytes": lambda use: use.stage > 0 or use.by_layer or use.gradients_leave,
    "attention": lambda use: use.flash,
    "fused_swiglu": lambda use: use.model.gated,
    "fused_linears": _by_tensor,
    "fused_loss": _always,
    "logits_fp32": _always,
    "loss_in_place": lambda use: not use.system.loss.fused_loss,
    "loss_keeps_logits": lambda use: not use.system.loss.fused_loss and use.system.loss.logits_fp32,
    "norm": lambda use: use.model.norm == "rmsnorm" or use.model.norm_in_fp32,
    "rope": _rotates,
    "norm_keeps_steps": lambda use: use.eager_norm,
    "repeats_kv": lambda use: use.fused and use.model.num_kv_heads < use.model.num_heads,
    "eager_operators": lambda use: not use.fused or use.model.logit_soft_cap > 0,
    "held_logit_bytes": _always,
    "tp_overlap": lambda use: use.layout.tp > 1,
    "gemm_overlap_links": lambda use: (
        use.layout.tp > 1 and use.system.parallel.tp_overlap == "gemm" and use.leaves_node
    ),
    "p2p_overlap": lambda use: use.layout.pp > 1,
    "p2p_synchronous": _waits_for_messages,
    "holds_outputs": lambda use: use.layout.pp > 1,
    "blocking_copies": lambda use: use.offloads,
    "reduce_overlap": lambda use: use.peers and not use.held,
    "gather_overlap": lambda use: use.stage > 0,
    "bucket_bytes": _bucketed,
    "prefetch_elements": lambda use: use.by_matrix,
    "live_elements": lambda use: (
        use.by_matrix and use.system.zero.prefetch_elements > 0 and use.system.zero.gather_overlap
    ),
    "whole_buckets": lambda use: use.stage > 0 and use.system.zero.bucket_bytes > 0,
    "step_scratch_bytes": lambda use: not use.hosted,
    "flat_step": _flat,
    "cp_kind": lambda use: use.layout.cp > 1,
    "dispatcher": lambda use: use.layout.ep > 1,
    "ep_overlap": lambda use: use.pairs,
    "delayed_wgrad": lambda use: use.pairs and use.system.experts.ep_overlap != "none",
    "cublas_bytes": _always,
    "workspaces": _always,
    "expert_workspaces": lambda use: use.model.experts is not None,
    "data_parallel": lambda use: use.stage > 1,
    "compiled": _always,
    "launch_blocking": _always,
    "tf32": lambda use: use.precision == "fp32",
    "fp32_copy": lambda use: (
        use.wide and use.system.states.param_bytes < BYTES_PER_ELEMENT[use.precision]
    ),
    "cuda_graphs": _always,
    "optimizer_on_host": _always,
    "parameters_on_host": lambda use: use.layout.zero_stage == 3,
    "late_state_bytes": lambda use: not use.hosted,
    "fresh_gradients": lambda use: use.layout.num_micro_batches > 1 and use.layout.pp == 1,
    "host_grad_bytes": lambda use: use.hosted,
    "host_gradients": lambda use: use.hosted,
    "host_pinned": lambda use: _pinned(use) and use.system.host.pinned_blocks != "exact",
    "pinned_blocks": lambda use: use.offloads or _pinned(use),
    "sub_group_parameters": _grouped,
    "expandable_segments": _always,
    "vocab_multiple": _always,
    "rank_order": lambda use: use.leaves_node and use.mixed,
    "model_parallel": _never,
    "zero_stages": _never,
    "pipeline_zero_stages": _never,
    "features": _never,
    "wide_attention": _never,
}
"""The condition of each fact.  `model_parallel`, `zero_stages`, `pipeline_zero_stages`, `features`
and `wide_attention` decide which jobs a stack accepts: none changes a job's numbers."""
