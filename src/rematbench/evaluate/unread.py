"""Facts of a stack that nobody has read: the usual value stands in for them, which is said."""

from collections.abc import Callable

from rematbench.problem import Problem
from rematbench.spec.configfile import ASSUMED


def _has_stack_norm(problem: Problem) -> bool:
    """Whether the model's norms run on the stack's kernel of an RMSNorm."""
    model = problem.workload.model
    return model.norm == "rmsnorm" or model.norm_in_fp32


def _is_grouped(problem: Problem) -> bool:
    model = problem.workload.model
    return model.num_kv_heads < model.num_heads


def _has_soft_caps(problem: Problem) -> bool:
    model = problem.workload.model
    return model.attention_soft_cap > 0 or model.logit_soft_cap > 0


ACTS: dict[str, Callable[[Problem], bool]] = {
    "fused_swiglu": lambda p: p.workload.model.gated,
    "norm": _has_stack_norm,
    "norm_keeps_steps": lambda p: _has_stack_norm(p) and p.system.norm_kernel == "eager",
    "rope": lambda p: p.workload.model.position == "rope",
    "loss_in_place": lambda p: not p.system.fused_loss,
    "loss_keeps_logits": lambda p: not p.system.fused_loss and p.system.logits_fp32,
    "repeats_kv": lambda p: p.attention == "flash" and _is_grouped(p),
    "eager_operators": lambda p: p.attention == "unfused" or _has_soft_caps(p),
    "step_scratch_bytes": lambda p: True,
}
"""The facts of kernels and of the loss that a stack of one's own may leave out, each with the
problems in which it changes bytes or seconds."""


def unread_facts(problem: Problem) -> dict[str, str]:
    """The facts of the problem's stack that nobody has read and that change its prediction, each
    with its reason."""
    sources = problem.system.sources
    return {
        key: sources[key].removeprefix(ASSUMED)
        for key, acts in ACTS.items()
        if sources.get(key, "").startswith(ASSUMED) and acts(problem)
    }


def unread(problem: Problem) -> str:
    """The same facts with their values, in one line; empty if there are none."""
    facts = [f"{key} {_word(getattr(problem.system, key))}" for key in unread_facts(problem)]
    return f"assumed without a source: {', '.join(facts)}" if facts else ""


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
